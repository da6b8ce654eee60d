"""Requests, events and changes of the fleet at once: requests wait for one slice of the others."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from kvplug import BlockRemoved, BlockStored, EventBatch, Rank, Router, RouterConfig
from kvplug.audit.router import AuditedRouter, Usage
from kvplug.packed import PackedStored, encode
from kvplug.router import core
from tests.plugins.stock_client import wait_until

BLOCK, NUM_PROMPTS = 4, 3000
RANK = Rank("a")
LAST = [NUM_PROMPTS] * BLOCK
PATIENCE_S = 120  # the first call of a kernel compiles it


def prompts_stored(first=1, last=NUM_PROMPTS):
    """Prompts of one block each, which have nothing in common."""
    events = tuple(
        BlockStored(block_hashes=(number,), token_ids=(number,) * BLOCK, block_size=BLOCK)
        for number in range(first, last + 1)
    )
    return EventBatch(events=events)


@pytest.fixture
def router():
    router = AuditedRouter(RouterConfig(block_size=BLOCK))
    router.add_worker("a")
    return router


class Slices:
    """Counts the slices that a thread is through with; the first one ends when somebody waits."""

    def __init__(self, router):
        self.num_done, self.has_begun = 0, threading.Event()
        self._query_waiting = router._deciding.query_waiting

    def watch(self, function):
        def watched(*arguments):
            self.has_begun.set()
            result = function(*arguments)
            if not self.num_done:
                wait_until(lambda: self._query_waiting[0], "a request waits")
            self.num_done += 1
            return result

        return watched


@pytest.fixture
def slices(router, monkeypatch):
    """Of a clear of many blocks."""
    router.apply(RANK, prompts_stored())
    slices = Slices(router)
    monkeypatch.setattr(router, "_clear_slice", slices.watch(router._clear_slice))
    return slices


@contextmanager
def in_thread(function, *arguments):
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_request_goes_between_two_slices_of_a_clear(router, slices):
    with in_thread(router.clear, RANK):
        assert slices.has_begun.wait(PATIENCE_S)
        with router.deciding():
            decision, num_before = router.route(LAST), slices.num_done
            router.expect(decision)
    assert num_before == 1 < slices.num_done
    assert (decision.overlap_blocks, len(router.index)) == (1, 0)  # it was the last to go
    router.finish(decision.request_id)
    router.answered(decision.request_id, Usage(prompt_tokens=BLOCK, cached_tokens=0))
    [expectation] = [answer.expectation for answer in router._answers]
    assert expectation.lowest == 0  # that its block went is known
    router.index.check()


@pytest.mark.parametrize("kind", ["stored", "removed"])
def test_a_request_goes_between_two_slices_of_a_batch(router, monkeypatch, kind):
    batch = prompts_stored()
    if kind == "removed":
        router.apply(RANK, batch)
        batch = EventBatch(
            events=tuple(BlockRemoved(block_hashes=event.block_hashes) for event in batch.events)
        )
    slices = Slices(router)
    fleet_index = router.fleet_index
    monkeypatch.setattr(fleet_index, "apply", slices.watch(fleet_index.apply))
    with in_thread(router.apply, RANK, batch):
        assert slices.has_begun.wait(PATIENCE_S)
        with router.deciding():
            router.expect(router.route(LAST))
            num_before = slices.num_done
    assert num_before == 1 < slices.num_done == -(-NUM_PROMPTS // core._EVENTS_PER_SLICE)
    assert len(router.index) == (NUM_PROMPTS if kind == "stored" else 0)
    router.index.check()


def test_a_fleet_changes_before_or_after_a_clear(router, slices, monkeypatch):
    seen, clear_slice = [], router._clear_slice
    monkeypatch.setattr(
        router, "_clear_slice", lambda c: clear_slice(c) or seen.append(router.ranks)
    )
    with in_thread(router.clear, RANK):
        assert slices.has_begun.wait(PATIENCE_S)
        with in_thread(router.remove_worker, "a"), router.deciding():
            assert router.ranks == [RANK]
    assert len(seen) > 2
    assert all(ranks == [RANK] for ranks in seen)
    assert (router.ranks, len(router.index)) == ([], 0)


def test_an_index_is_saved_while_requests_go_and_events_wait(router, tmp_path, monkeypatch):
    router.apply(RANK, prompts_stored(last=10))
    is_writing, may_end = threading.Event(), threading.Event()

    def write(snapshot, path):
        is_writing.set()
        assert may_end.wait(PATIENCE_S)

    monkeypatch.setattr(core.Snapshot, "write", write)
    with in_thread(router.save_index, tmp_path / "index"):
        assert is_writing.wait(PATIENCE_S)
        with in_thread(router.apply, RANK, prompts_stored(11, 20)):
            with router.deciding():
                router.expect(router.route(LAST))
            assert len(router.index) == 10
            may_end.set()
    assert len(router.index) == 20


def route_all(router, number):
    for at in range(60):
        prompts = [[(number + at + i) % 50 + 1] * 2 * BLOCK for i in range(3)]
        many = router.route_many(prompts[1:], workers="ab")
        for decision in (router.route(prompts[0], workers="ab"), *many):
            router.first_token(decision.request_id)
            router.finish(decision.request_id, 5)


def tell_all(router, worker):
    for at in range(60):
        first = at % 40 + 1
        router.apply(Rank(worker), prompts_stored(first, first + 5))
        if at % 7 == 0:
            router.clear(Rank(worker))


def change_all(router, worker):
    for at in range(30):
        router.add_worker(worker)
        router.set_cache_capacity(Rank(worker), 100)
        router.apply(Rank(worker), prompts_stored(at + 1, at + 20))
        names = np.arange(at, at + 30, dtype=np.uint64) + np.uint64(10_000)
        router.apply_packed(Rank(worker), encode([PackedStored(names, names, None)]))
        router.remove_worker(worker)


def test_packed_events_come_before_or_after_a_clear(router, slices):
    names = np.arange(5000, dtype=np.uint64) + np.uint64(10_000)
    payload = encode([PackedStored(names, names, None)])
    with in_thread(router.clear, RANK):
        assert slices.has_begun.wait(PATIENCE_S)
        with in_thread(router.apply_packed, RANK, payload), router.deciding():
            assert len(router.index) <= NUM_PROMPTS  # none of the packed ones
    assert len(router.index) == len(names)
    router.index.check()


@pytest.mark.parametrize("kind", [Router, AuditedRouter])
def test_threads_that_route_tell_and_change_the_fleet_do_not_collide(kind, monkeypatch):
    monkeypatch.setattr(core, "_EVENTS_PER_SLICE", 2)
    monkeypatch.setattr(core, "_SLOTS_PER_SLICE", 8)
    router = kind(RouterConfig(block_size=BLOCK))
    for worker in "ab":
        router.add_worker(worker)
    work = [(route_all, 0), (route_all, 1), (route_all, 2)]
    work += [(tell_all, "a"), (tell_all, "b"), (change_all, "c")]
    with ThreadPoolExecutor(len(work)) as threads:
        for done in [threads.submit(each, router, argument) for each, argument in work]:
            done.result(60)
    router.index.check()
    assert len(router.load) == 0
    assert router.ranks == [Rank("a"), Rank("b")]
