"""Readers of an index that another router writes: as one router that does both."""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplug.errors import SharedMemoryError
from kvplug.events import BlockRemoved, BlockStored, EventBatch, Rank
from kvplug.kernels import costing
from kvplug.router.config import RouterConfig
from kvplug.router.core import Router
from kvplug.shared.folder import OwnedFolder
from kvplug.shared.peers import Place, make_files
from kvplug.shared.publishing import WritingRouter
from kvplug.shared.reading import ReadingRouter
from tests.shared.conftest import NUM_PROCESSES

SIZE, NUM_WORKERS, DEPTH = 4, 3, 12
WORKERS = [f"w{n}" for n in range(NUM_WORKERS)]
CONFIG = RouterConfig(block_size=SIZE)


class Clock:
    """The time that a test says."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def tokens_of(path, num_blocks):
    return (np.arange(num_blocks * SIZE, dtype=np.uint32) + 1000 * path).astype(np.uint32)


def stored(path, num_blocks, first=0):
    hashes = [100 * path + n + 1 for n in range(num_blocks)]
    return EventBatch(
        ts=0.0,
        events=(
            BlockStored(
                block_hashes=tuple(hashes[first:]),
                parent=hashes[first - 1] if first else None,
                token_ids=tuple(tokens_of(path, num_blocks)[first * SIZE :].tolist()),
                block_size=SIZE,
            ),
        ),
    )


def removed(path, first, end):
    hashes = [100 * path + n + 1 for n in range(first, end)]
    return EventBatch(ts=0.0, events=(BlockRemoved(block_hashes=tuple(hashes[::-1])),))


def routers(folder, clock, config=CONFIG):
    """The writer, and all readers, with the same workers."""
    writer = WritingRouter(config, folder, clock=clock)
    readers = [
        ReadingRouter(
            config, folder, Place(n, NUM_PROCESSES), clock=clock, random_=random.Random(n)
        )
        for n in range(NUM_PROCESSES)
    ]
    for router in (writer, *readers):
        for worker in WORKERS:
            router.add_worker(worker)
    writer.catch_up(is_late=True)
    return writer, readers


def overlaps(router, tokens):
    """What each worker has of a prompt, by the router's own decisions."""
    peeked = [router.peek(tokens, workers=[worker]) for worker in WORKERS]
    return [each.overlap_blocks for each in peeked]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 2), st.integers(0, 3), st.integers(1, DEPTH)),
        st.tuples(st.just("remove"), st.integers(0, 2), st.integers(0, 3), st.integers(0, DEPTH)),
        st.tuples(st.just("clear"), st.integers(0, 2), st.just(0), st.just(0)),
        st.tuples(st.just("grow"), st.integers(0, 2), st.integers(4, 6), st.integers(700, 900)),
        st.tuples(st.just("trust"), st.integers(0, 2), st.just(0), st.integers(0, 4)),
    ),
    max_size=12,
)


def apply_to(router, step):
    kind, worker, path, number = step
    rank = Rank(WORKERS[worker])
    match kind:
        case "store" | "grow":
            router.apply(rank, stored(path, number))
        case "remove":
            router.apply(rank, removed(path, number, DEPTH))
        case "clear":
            router.clear(rank)
        case "trust":
            router.set_confidence(rank, number / 4)


@given(steps)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_a_reader_decides_as_the_router_that_follows_the_events(tmp_path_factory, given_steps):
    folder = OwnedFolder(tmp_path_factory.mktemp("shared"))
    make_files(folder, NUM_PROCESSES)
    clock = Clock()
    writer, readers = routers(folder, clock)
    plain = Router(CONFIG, clock=clock)
    for worker in WORKERS:
        plain.add_worker(worker)
    for step in given_steps:
        apply_to(writer, step)
        apply_to(plain, step)
        for path in (0, 1, 5):
            tokens = tokens_of(path, DEPTH + 2)
            expected = overlaps(plain, tokens)
            for reader in readers:
                assert overlaps(reader, tokens) == expected
                assert reader.num_given_up == 0
    writer.index.check()
    folder.close()


def test_a_prompt_of_another_process_is_expected_where_it_went(folder):
    clock = Clock()
    _, readers = routers(folder, clock)
    tokens = tokens_of(0, DEPTH)
    first = readers[0].route(tokens)
    assert first.overlap_blocks == 0
    peeked = readers[1].peek(tokens, workers=[first.rank.worker])
    assert peeked.overlap_blocks == DEPTH
    clock.now_s += 60.0
    assert readers[1].peek(tokens, workers=[first.rank.worker]).overlap_blocks == 0


def test_processes_decide_by_one_load(folder):
    clock = Clock()
    _, readers = routers(folder, clock)
    rng = np.random.default_rng(1)
    ids, counts = [], dict.fromkeys(WORKERS, 0)
    for n in range(12):
        reader = readers[n % 2]
        decision = reader.route(rng.integers(1, 9999, 64, dtype=np.uint32))
        counts[decision.rank.worker] += 1
        ids.append((reader, decision.request_id))
    assert set(counts.values()) == {4}
    for reader in readers:
        reader.take_news()
        assert reader.load.ranks[:, 4].tolist() == [4.0] * 3
    for reader, request_id in ids:
        assert reader.first_token(request_id)
        assert reader.finish(request_id, 10)
    for reader in readers:
        reader.take_news()
        np.testing.assert_allclose(reader.load.ranks[:, :9][:, [0, 3, 4, 5, 6, 7, 8]], 0.0)


@pytest.mark.parametrize("kind", ["store", "grow"])
def test_a_writer_that_takes_over_publishes_when_it_has_as_much(folder, kind):
    clock = Clock()
    writer, readers = routers(folder, clock)
    step = (kind, 0, 4, 800 if kind == "grow" else 8)
    apply_to(writer, step)
    tokens = tokens_of(4, DEPTH)
    expected = overlaps(readers[0], tokens)
    assert expected[0] == min(step[3], DEPTH)
    successor = WritingRouter(CONFIG, folder, clock=clock)
    for worker in reversed(WORKERS):  # other numbers than before
        successor.add_worker(worker)
    assert not successor.catch_up(is_late=False)
    assert overlaps(readers[0], tokens) == expected
    apply_to(successor, step)
    assert successor.catch_up(is_late=False)
    assert overlaps(readers[0], tokens) == expected
    apply_to(successor, ("clear", 0, 0, 0))
    assert overlaps(readers[0], tokens) == [0, 0, 0]


requests = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(["route", "route", "first_token", "finish", "wait"]),
        st.integers(1, 60),
    ),
    max_size=60,
)


@given(requests)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_whatever_two_processes_do_their_load_is_the_sum(tmp_path_factory, steps):
    folder = OwnedFolder(tmp_path_factory.mktemp("shared"))
    make_files(folder, NUM_PROCESSES)
    clock, flights = Clock(), [{}, {}]
    _, readers = routers(folder, clock)
    for number, (process, kind, size) in enumerate(steps):
        reader, mine = readers[process], flights[process]
        clock.now_s += 0.001
        match kind:
            case "route":
                tokens = np.arange(number, number + size * SIZE, dtype=np.uint32)
                decision = reader.route(tokens)
                assert decision.predicted_ttft_ms >= 0
                mine[decision.request_id] = decision.rank
            case "wait":
                clock.now_s += size / 100
            case "first_token" if mine:
                reader.first_token(list(mine)[size % len(mine)])
            case "finish" if mine:
                request_id = list(mine)[size % len(mine)]
                assert reader.finish(request_id, 3)
                del mine[request_id]
        ranks = [*flights[0].values(), *flights[1].values()]
        for each in readers:
            each.take_news()
            rows = each.load.ranks
            assert rows[:, costing.NUM_RUNNING].tolist() == [
                ranks.count(Rank(worker)) for worker in WORKERS
            ]
            waiting, first = rows[:, costing.WAITING_MS], rows[:, costing.FIRST_MS]
            is_waiting = rows[:, costing.NUM_WAITING] > 0.5
            assert (waiting[is_waiting] >= first[is_waiting] - 1e-6).all()
    folder.close()


class FullFolder(OwnedFolder):
    """No memory is left for arrays while `is_full`."""

    is_full = False

    def create(self, name, num_words):
        if self.is_full and name.startswith("array."):
            raise SharedMemoryError("cannot make a shared array: it is full")
        return super().create(name, num_words)


def test_without_memory_requests_go_by_load_until_there_is_some(tmp_path, caplog):
    folder = FullFolder(tmp_path)
    make_files(folder, NUM_PROCESSES)
    writer, [reader, _] = routers(folder, Clock())
    tokens = tokens_of(4, DEPTH)
    folder.is_full = True
    apply_to(writer, ("grow", 0, 4, 4000))
    assert overlaps(reader, tokens) == [0, 0, 0]
    assert reader.num_given_up > 0
    folder.is_full = False
    apply_to(writer, ("store", 1, 1, 2))
    assert overlaps(reader, tokens) == [DEPTH, 0, 0]
    assert [record.message for record in caplog.records] == [
        "requests are routed by load alone: cannot make a shared array: it is full"
    ]
    folder.close()


def window_stored(rank, num_blocks, group):
    hashes = tuple(5000 + n for n in range(num_blocks))
    attention = "sliding_window" if group else "full_attention"
    event = BlockStored(
        block_hashes=hashes,
        token_ids=tuple(tokens_of(0, num_blocks).tolist()),
        block_size=SIZE,
        group=group,
        attention=attention,
        sliding_window=4 * SIZE if group else None,
    )
    return rank, EventBatch(ts=0.0, events=(event,))


def test_hybrid_models_are_matched_as_in_one_process(folder):
    clock = Clock()
    writer, readers = routers(folder, clock)
    plain = Router(CONFIG, clock=clock)
    for worker in WORKERS:
        plain.add_worker(worker)
    for router in (writer, plain):
        router.apply(*window_stored(Rank("w0"), DEPTH, 0))
        router.apply(*window_stored(Rank("w0"), DEPTH, 1))
        router.apply(*window_stored(Rank("w1"), DEPTH, 0))
        gone = tuple(5000 + n for n in range(DEPTH - 2, DEPTH))
        router.apply(Rank("w0"), EventBatch(events=(BlockRemoved(block_hashes=gone, group=1),)))
    tokens = tokens_of(0, DEPTH + 1)
    expected = overlaps(plain, tokens)
    assert expected[1] > expected[0] > 0
    for reader in readers:
        assert overlaps(reader, tokens) == expected
