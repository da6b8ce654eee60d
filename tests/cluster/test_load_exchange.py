"""Load between replicas, whatever becomes of the messages; NATS is in test_sync.py."""

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import BlockStored, EventBatch, Rank, RouterConfig
from kvplug.cluster import load_exchange, sync_messages
from kvplug.cluster.load_exchange import SILENCE_S
from kvplug.cluster.sync_messages import AddRequest, News, RankLoad, decode, encode
from kvplug.kernels import costing
from tests.cluster.replicas import (
    SIZE,
    WORKERS,
    Clock,
    Replica,
    carry,
    give,
    require_equal,
    say_rows,
)

A, B, C = WORKERS


def replicas_of(num_routers, clock=None, **options):
    clock = clock or Clock()
    return [Replica(f"r{n}", clock, seed=n, **options) for n in range(num_routers)]


def prompt(number, num_blocks=8):
    return np.arange(num_blocks * SIZE, dtype=np.uint32) + 1000 * number


def is_idle(replica):
    return all((row == 0).all() for row in replica.loads().values())


def test_replicas_decide_by_one_load():
    replicas, counts = replicas_of(2), dict.fromkeys(WORKERS, 0)
    for number in range(12):
        counts[replicas[number % 2].route(prompt(number)).rank.worker] += 1
        carry(replicas)
    assert set(counts.values()) == {4}
    require_equal(replicas)
    for replica in replicas:
        for request_id in replica.flights:
            replica.router.first_token(request_id)
            replica.router.finish(request_id, 3)
        carry(replicas)
    assert all(is_idle(each) for each in replicas)
    assert all(each.exchange.counts.missed == 0 for each in replicas)


def test_each_change_is_told_by_its_name():
    [replica] = replicas_of(1)
    decision = replica.route(prompt(0))
    told = [replica.exchange.news()]
    replica.router.first_token(decision.request_id)
    told.append(replica.exchange.news())
    replica.router.finish(decision.request_id)
    told.append(replica.exchange.news())
    messages = [decode(payload) for payloads in told for payload in payloads]
    assert [type(each.updates[0]).__name__ for each in messages] == [
        "AddRequest", "MarkPrefillCompleted", "Free",
    ]  # fmt: skip
    assert [each.number for each in messages] == [0, 1, 2]
    assert replica.exchange.news() == []
    assert replica.num_woken == 3


def test_a_prompt_of_a_peer_is_expected_where_it_went():
    clock = Clock()
    first, second = replicas = replicas_of(2, clock)
    decision = first.route(prompt(0))
    carry(replicas)
    peeked = second.router.peek(prompt(0), workers=[decision.rank.worker])
    assert peeked.overlap_blocks == 8
    clock.now_s += 60.0
    assert second.router.peek(prompt(0), workers=[decision.rank.worker]).overlap_blocks == 0


@pytest.mark.parametrize("follows_events", [True, False])
def test_without_events_what_was_sent_is_all_that_is_known(follows_events):
    config = RouterConfig(block_size=SIZE, use_kv_events=follows_events)
    first, second = replicas = replicas_of(2, config=config)
    for _ in range(2):
        decision = first.route(prompt(0, 3000), workers=[A])
        carry(replicas)
        first.router.finish(decision.request_id)
    # No more than so many are told at a time.
    expected = second.router.peek(prompt(0, 3000), workers=[A]).overlap_blocks
    assert expected == sync_messages.MAX_EXPECTED if follows_events else expected >= 2048


def test_what_a_peer_has_sent_is_evicted_for():
    first, second = replicas = replicas_of(2)
    for replica in replicas:
        replica.router.set_cache_capacity(Rank(A), 100)
    first.route(prompt(0, 40), workers=[A])
    carry(replicas)
    number = second.router.fleet_index.numbers.number_of(Rank(A))
    for replica in replicas:
        assert replica.router.load.forecast.num_blocks(number) == 40
        replica.router.load.forecast.check()


def do(replica, kind, number, size):
    request_id = replica.flights[size % len(replica.flights)] if replica.flights else None
    match kind:
        case "route":
            replica.route(prompt(number, size))
        case "first_token" if request_id:
            replica.router.first_token(request_id)
        case "move" if request_id:
            replica.router.moved(request_id, Rank(WORKERS[size % 3]))
        case "finish" if request_id:
            replica.router.finish(request_id, 3)
            replica.flights.remove(request_id)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(["route", "route", "first_token", "finish", "move", "wait"]),
            st.integers(0, 60),
        ),
        max_size=60,
    ),
    st.randoms(use_true_random=False),
    st.sampled_from([0.0, 0.1, 0.5]),
)
def test_whatever_is_lost_a_row_puts_it_right(steps, dice, loss):
    clock = Clock()
    replicas = replicas_of(4, clock)
    for number, (at, kind, size) in enumerate(steps):
        clock.now_s += size / 100 if kind == "wait" else 0.001
        do(replicas[at], kind, number, size)
        carry(replicas, lost=lambda: dice.random() < loss)
        if not loss:
            require_equal(replicas)
    say_rows(replicas)
    require_equal(replicas)
    for replica in replicas:
        for request_id in replica.flights:
            assert replica.router.finish(request_id)
    carry(replicas)
    assert all(is_idle(each) for each in replicas)


def running_on(replica, others):
    """What a replica sees in flight, and what really is, on each worker."""
    seen = np.array([replica.load_of(worker)[2] for worker in WORKERS])
    own = [
        each.router.load.ranks[:, costing.NUM_RUNNING]
        - each.router.load.peers[:, costing.NUM_RUNNING]
        for each in others
    ]
    return seen, np.sum(own, axis=0)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(["route", "route", "finish", "deliver", "deliver"]),
            st.integers(0, 60),
        ),
        max_size=60,
    )
)
def test_load_is_off_by_no_more_than_what_is_on_its_way(steps):
    clock = Clock()
    replicas = replicas_of(3, clock)
    ways = {(a, b): [] for a in range(3) for b in range(3) if a != b}
    for number, (at, kind, size) in enumerate(steps):
        clock.now_s += 0.001
        if kind == "deliver":
            way = list(ways)[size % len(ways)]
            for payload in ways[way][: 1 + size % 3]:
                replicas[way[1]].exchange.hear(f"r{way[0]}", payload)
            del ways[way][: 1 + size % 3]
        do(replicas[at], kind, number, size)
        for payload in replicas[at].exchange.news():
            for way in ways:
                ways[way] += [payload] if way[0] == at else []
        for reader, replica in enumerate(replicas):
            seen, true = running_on(replica, replicas)
            on_its_way = sum(len(ways[way]) for way in ways if way[1] == reader)
            assert np.abs(seen - true).sum() <= on_its_way


def test_a_message_that_comes_late_or_twice_changes_nothing():
    first, second = replicas_of(2)
    decision = first.route(prompt(0), workers=[A])
    [added] = first.exchange.news()
    first.router.finish(decision.request_id)
    [freed] = first.exchange.news()
    for payload in (added, freed, added, freed, added):
        second.exchange.hear("r0", payload)
    assert is_idle(second)
    assert second.exchange.counts.late == 3
    third = Replica("r2", Clock())
    third.exchange.hear("r0", freed)
    third.exchange.hear("r0", added)
    assert is_idle(third)


def test_a_lost_free_is_put_right_by_the_next_row_and_counted_as_missed():
    first, second = replicas = replicas_of(2)
    decision = first.route(prompt(0), workers=[A])
    carry(replicas)
    first.router.finish(decision.request_id)
    carry(replicas, lost=lambda: True)
    assert second.load_of(A)[2] == 1.0
    say_rows(replicas)
    assert is_idle(second)
    assert second.exchange.counts.missed == 1


def test_a_silent_peer_is_forgotten_and_one_that_stops_at_once():
    clock = Clock()
    first, second, third = replicas = replicas_of(3, clock)
    for replica in replicas:
        replica.route(prompt(0), workers=[A])
    carry(replicas)
    assert first.load_of(A)[2] == 3.0
    give(third, replicas, [third.exchange.bye()])
    assert first.load_of(A)[2] == 2.0
    for _ in range(2):
        clock.now_s += SILENCE_S - 0.1
        give(first, replicas, first.exchange.rows())
        for each in (first, second):
            each.exchange.tick(is_connected=True)
        assert second.load_of(A)[2] == 2.0
    assert first.load_of(A)[2] == 1.0  # of itself
    assert (first.exchange.counts.lost_peers, second.exchange.counts.lost_peers) == (1, 0)
    assert list(second.exchange.peers) == ["r0"]


def test_a_router_that_is_cut_off_counts_its_load_for_the_others_too():
    clock = Clock()
    first, second, third = replicas = replicas_of(3, clock)
    carry(replicas)
    say_rows(replicas)
    first.route(prompt(0), workers=[A])
    first.exchange.news()
    clock.now_s += SILENCE_S + 0.1
    first.exchange.tick(is_connected=False)
    assert first.exchange.num_assumed == 2
    assert first.load_of(A)[2] == 3.0
    decision = first.route(prompt(1), workers=[B])
    first.exchange.news()
    assert first.load_of(B)[2] == 3.0
    first.router.finish(decision.request_id)
    first.exchange.news()
    assert first.load_of(B)[2] == 0.0
    first.exchange.reconnected()
    first.exchange.tick(is_connected=True)
    assert first.load_of(A)[2] == 1.0
    second.route(prompt(2), workers=[A])
    carry(replicas)
    say_rows(replicas)
    require_equal(replicas)
    assert len(third.exchange.peers) == 2


def test_a_restarted_peer_begins_with_nothing_and_its_past_life_is_over():
    clock = Clock()
    first, second = replicas = replicas_of(2, clock)
    first.route(prompt(0), workers=[A])
    first.route(prompt(1), workers=[A])
    past = first.exchange.news() + first.exchange.rows()
    give(first, replicas, past)
    again = Replica("r0", clock)
    give(again, [second], again.exchange.rows())
    assert is_idle(second)
    give(again, [second], past)
    assert is_idle(second)
    assert second.exchange.counts.late == len(past)


def test_another_router_of_the_same_name_is_named(caplog):
    first, second = replicas_of(2)
    first.exchange.hear("r0", first.exchange.bye())
    assert first.exchange.counts.namesakes == 0
    first.exchange.hear("r0", second.exchange.bye())
    assert first.exchange.counts.namesakes == 1
    assert "another router calls itself 'r0'" in caplog.text


def test_two_models_are_kept_apart(caplog):
    clock = Clock()
    first, second = replicas = replicas_of(2, clock, workers=())
    for replica in replicas:
        replica.router.add_worker(A, model="m")
        replica.router.add_worker(B, model="n")
    first.route(prompt(0), model="m")
    second.route(prompt(0), model="n")
    carry(replicas)
    require_equal(replicas)
    assert first.load_of(A)[2] == first.load_of(B)[2] == 1.0
    second.router.remove_worker(A)
    second.router.add_worker(A, model="other")
    first.route(prompt(1), model="m")
    carry(replicas)
    say_rows(replicas)
    assert second.load_of(A)[2] == 0.0
    assert second.exchange.counts.unknown_ranks == 2
    assert caplog.text.count("which this router does not know") == 1


def test_workers_that_come_and_go_take_their_rows_along():
    first, second = replicas = replicas_of(2)
    for worker in WORKERS:
        first.route(prompt(0), workers=[worker])
    carry(replicas)
    second.router.remove_worker(A)
    second.router.add_worker("http://d:8000")  # with the number of the first
    first.route(prompt(1), workers=[B])
    carry(replicas)
    assert second.load_of("http://d:8000")[2] == 0.0
    assert (second.load_of(B)[2], second.load_of(C)[2]) == (2.0, 1.0)
    second.router.add_worker(A)
    say_rows(replicas)
    assert second.load_of(A)[2] == 1.0


def test_a_large_fleet_is_told_in_parts_and_a_lost_part_ends_nothing():
    names = [f"http://{'x' * 600}-{n}:8000" for n in range(300)]
    first, second = replicas = replicas_of(2, workers=names)
    ids = [first.route(prompt(0), workers=[name]).request_id for name in names]
    parts = first.exchange.rows()
    assert len(parts) > 3
    assert max(map(len, parts)) <= sync_messages.MAX_MESSAGE_BYTES
    give(first, [second], parts)
    carry(replicas)
    require_equal(replicas)
    for request_id in ids[:100]:
        first.router.finish(request_id)
    first.exchange.news()  # which nobody hears
    give(first, [second], first.exchange.rows()[1:])
    assert second.load_of(names[0])[2] == 1.0
    say_rows(replicas)
    require_equal(replicas)


def test_many_changes_at_once_are_divided():
    first, _ = replicas = replicas_of(2)
    for number in range(40):
        first.route(prompt(number, 2000))
    payloads = first.exchange.news()
    assert len(payloads) > 2
    assert max(map(len, payloads)) <= sync_messages.MAX_MESSAGE_BYTES
    give(first, replicas, payloads)
    require_equal(replicas)


def load(row, worker=A):
    return RankLoad(worker, 0, "", np.asarray(row, dtype="<f8").tobytes())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 1e300])
def test_numbers_that_cannot_be_are_refused_and_counted(bad, caplog):
    [replica] = replicas_of(1)
    prompt_ = sync_messages.prompt_of(np.arange(3, dtype=np.uint64), 0, SIZE, 3.0, 5.0)
    updates = [AddRequest(load([bad] * 10), prompt_), AddRequest(load([1.0] * 10, B), prompt_)]
    replica.exchange.hear("evil", encode(News(1, 7, 0, updates)))
    assert replica.exchange.counts.refused == 1
    assert (replica.load_of(A) == 0).all()
    assert replica.load_of(B)[2] == 1.0
    assert "a message of evil is refused" in caplog.text


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"x" * (sync_messages.MAX_MESSAGE_BYTES + 1),
        msgspec.msgpack.encode(["news", 2, 1, 0, []]),
        msgspec.msgpack.encode(["news", 1, -1, 0, []]),
        msgspec.msgpack.encode(["rows", 1, 1, 0, 0, 2**40, []]),
        msgspec.msgpack.encode(["news", 1, 1, 0, [["add", ["a", 0, "", b"short"], []]]]),
        msgspec.msgpack.encode(["what", 1, 1, 0]),
        b"\x91" * 100_000,
    ],
)
def test_what_is_no_message_is_refused(payload):
    [replica] = replicas_of(1)
    replica.exchange.hear("evil", payload)
    assert replica.exchange.counts.refused == 1
    assert replica.exchange.peers == {}


def test_a_prompt_whose_hashes_do_not_fit_is_refused_and_its_load_counts():
    [replica] = replicas_of(1)
    fitting = sync_messages.prompt_of(np.arange(40, dtype=np.uint64), 0, SIZE, 3.0, 5.0)
    for wrong in ({"chunks": b"12345678"}, {"expected": b"1"}, {"num_blocks": 1}):
        replica.exchange.counts.refused = 0
        update = AddRequest(load([1.0] * 10), msgspec.structs.replace(fitting, **wrong))
        number = len(replica.exchange.peers) and replica.exchange.peers["r9"].number + 1
        replica.exchange.hear("r9", encode(News(1, 7, number, [update])))
        assert replica.exchange.counts.refused == 1
        assert replica.load_of(A)[2] == 1.0


def test_more_routers_than_can_be_are_refused():
    [replica] = replicas_of(1)
    for number in range(70):
        other = Replica(f"x{number}", Clock(), workers=())
        give(other, [replica], other.exchange.rows())
    assert len(replica.exchange.peers) == 64
    assert replica.exchange.counts.refused == 6


def test_a_queue_that_nobody_sends_is_bounded(monkeypatch):
    monkeypatch.setattr(load_exchange, "_MAX_QUEUE", 5)
    first, second = replicas = replicas_of(2)
    for number in range(8):
        first.route(prompt(number))
    assert first.exchange.counts.unsent == 3
    carry(replicas)
    say_rows(replicas)
    require_equal([first, second])


def test_ages_not_clocks_are_exchanged():
    ahead, behind = Clock(), Clock()
    ahead.now_s += 5000.0
    first, second = Replica("r0", ahead), Replica("r1", behind)
    first.route(prompt(0, 100), workers=[A])
    ahead.now_s += 0.25
    behind.now_s += 0.25
    give(first, [second], first.exchange.rows())
    since = second.router.load.ranks[0, costing.FIRST_SINCE_MS]
    assert since == pytest.approx(1e3 * (behind.now_s - 0.25))


def test_what_a_rank_computes_for_peers_counts_where_speeds_are_learnt():
    clock = Clock()
    first, second = replicas = replicas_of(2, clock)
    number = second.router.fleet_index.numbers.number_of(Rank(A))
    second.route(prompt(0), workers=[A])
    [mine] = second.flights
    second.router.first_token(mine)
    request = second.router.load.request(mine)
    for path in range(1, 4):
        decision = first.route(prompt(path), workers=[A])
        carry(replicas)
        clock.now_s += 0.01
        first.router.first_token(decision.request_id)
        carry(replicas)
    assert second.router.load.prefilled_since(request) == 3 * 8 * SIZE
    newcomer = Replica("r2", clock)  # to whom all of that was before its time
    first.route(prompt(9), workers=[A])
    give(first, [newcomer], first.exchange.rows())
    assert newcomer.router.load._prefilled_tokens[number] == 0


def test_a_rank_begins_with_the_oldest_prompt_when_it_has_computed_one():
    clock = Clock()
    first, second = replicas = replicas_of(2, clock)
    decision = first.route(prompt(0, 400), workers=[A])
    second.route(prompt(1, 400), workers=[A])
    carry(replicas)
    clock.now_s += 0.5
    first.router.first_token(decision.request_id)
    carry(replicas)
    since = costing.FIRST_SINCE_MS
    for replica in replicas:
        assert replica.router.load.ranks[0, since] == pytest.approx(1e3 * clock.now_s, abs=0.1)
        assert replica.load_of(A)[1] == 1.0


def test_what_an_engine_reports_of_others_is_not_told():
    first, second = replicas = replicas_of(2)
    first.router.set_reported_load(Rank(A), num_running=5)
    first.route(prompt(0), workers=[A])
    carry(replicas)
    say_rows(replicas)
    assert first.load_of(A)[2] == 6.0
    assert second.load_of(A)[2] == 1.0


def test_reports_and_ranks_that_come_meanwhile_are_no_error():
    [one] = replicas_of(1)
    one.exchange.rows()
    one.router.add_worker("http://late:8000")
    one.router.set_reported_load(Rank("http://late:8000"), num_running=5)
    own = one.exchange._rows.show(one.exchange._rows.numbers)  # as `news` does, without the lock
    assert not own[:, costing.NUM_RUNNING].any()


def test_events_confirm_what_a_peer_has_sent():
    first, second = replicas = replicas_of(2)
    first.route(prompt(0), workers=[A])
    carry(replicas)
    blocks = BlockStored(
        block_hashes=tuple(range(1, 9)), token_ids=tuple(prompt(0).tolist()), block_size=SIZE
    )
    second.router.apply(Rank(A), EventBatch(events=(blocks,)))
    assert second.router.peek(prompt(0), workers=[A]).overlap_blocks == 8
    index = second.router.index
    assert len(index.speculative) == 0
    index.check()


def test_random_traffic_of_sixteen_routers_comes_to_rest_equal():
    clock, dice = Clock(), random.Random(7)
    replicas = replicas_of(16, clock)
    for number in range(400):
        clock.now_s += 0.002
        replica = dice.choice(replicas)
        if replica.flights and dice.random() < 0.5:
            replica.router.finish(replica.flights.pop(dice.randrange(len(replica.flights))))
        else:
            replica.route(prompt(number))
        carry(replicas, lost=lambda: dice.random() < 0.1)
    say_rows(replicas)
    require_equal(replicas)
