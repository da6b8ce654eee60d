"""What a Router reports to its observer: what, in which order, and under its lock."""

import pytest
from msgspec.msgpack import encode as pack

from kvplug import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Rank, Router, codec
from kvplug import RouterConfig as Config
from kvplug.errors import DecodeError
from kvplug.hashing import as_tokens
from kvplug.packed import encode
from kvplug.records import read_payloads
from kvplug.router import followed_fleet
from kvplug.router.observer import Arrival, RouterObserver
from tests.index.packing import as_packed
from tests.router.test_core import Clock

RANK, BLOCK = Rank("a"), 4


class Recorder(RouterObserver):
    """Keeps each report, with how many blocks the index had; all must come under the lock."""

    def __init__(self, router, *, watched=True):
        self.router, self.watched = router, watched
        self.decisions, self.reports = [], []
        router.set_observer(self)

    def on_decision(self, decision, request):
        assert self.router._lock._inner.locked()
        assert self.router.load.request(decision.request_id) is request
        self.decisions.append((decision, request))

    def watches(self, rank):
        assert self.router._lock._inner.locked()
        return self.watched

    def before_removal(self, rank):
        self.note("before removal", rank)

    def after_removal(self, arrival):
        self.note("after removal", arrival)

    def on_applied(self, arrival):
        self.note("applied", arrival)

    def on_clear(self, rank):
        self.note("clear", rank)

    def on_rank_left(self, rank):
        self.note("left", rank)

    def note(self, what, about):
        assert self.router._lock._inner.locked()
        self.reports.append((what, about, len(self.router.index)))


@pytest.fixture
def router():
    router = Router(Config(block_size=BLOCK), clock=Clock())
    router.add_worker("a")
    return router


def stored(*names):
    return [
        BlockStored(block_hashes=(name,), token_ids=(name,) * BLOCK, block_size=BLOCK)
        for name in names
    ]


def removed(*names):
    return [BlockRemoved(block_hashes=(name,)) for name in names]


def apply_batch(router, rank, *events):
    router.apply(rank, EventBatch(events=events, ts=7.0))


def apply_records(router, rank, *events):
    router.apply_records(
        rank, read_payloads([codec.encode(EventBatch(events=events, ts=7.0, dp_rank=rank.dp_rank))])
    )


def apply_packed(router, rank, *events):
    index = router.fleet_index.groups[0].index
    packed = [each for event in events for each in as_packed(index, rank, event)]
    router.apply_packed(rank, encode(packed), ts=7.0)


ways = pytest.mark.parametrize("apply", [apply_batch, apply_records, apply_packed])


@ways
def test_removals_are_told_from_stores_while_they_are_watched(router, apply):
    recorder = Recorder(router)
    apply(router, RANK, *stored(1, 2, 3), *removed(1, 2), *stored(4), AllBlocksCleared())
    arrival = Arrival(RANK, 7.0, router.clock())
    assert recorder.reports == [
        ("before removal", RANK, 3),
        ("after removal", arrival, 1),
        ("before removal", RANK, 2),
        ("after removal", arrival, 0),
        ("applied", arrival, 0),
    ]


@ways
def test_what_nobody_watches_is_applied_as_it_comes(router, apply):
    recorder = Recorder(router, watched=False)
    apply(router, RANK, *stored(1, 2, 3), *removed(1, 2))
    assert recorder.reports == [("applied", Arrival(RANK, 7.0, router.clock()), 1)]


@ways
def test_removals_in_several_slices_are_one_report(router, apply, monkeypatch):
    monkeypatch.setattr(followed_fleet, "_EVENTS_PER_SLICE", 2)
    monkeypatch.setattr(followed_fleet, "BLOCKS_PER_SLICE", 2)
    apply(router, RANK, *stored(1, 2, 3))
    recorder = Recorder(router)
    apply(router, RANK, *removed(1, 2, 3))
    assert [(what, size) for what, _, size in recorder.reports] == [
        ("before removal", 3),
        ("after removal", 0),
        ("applied", 0),
    ]


def test_a_damaged_payload_takes_nothing_away(router):
    """The observer is told that it begins, and that it is over."""
    apply_batch(router, RANK, *stored(1, 2))
    recorder = Recorder(router)
    with pytest.raises(DecodeError):
        router.apply_packed(RANK, pack([2, [1, 0, bytes(8)], [1, 0, b"odd"]]))
    assert [(what, size) for what, _, size in recorder.reports] == [
        ("before removal", 2),
        ("after removal", 2),
    ]
    router.route(range(9))  # and the lock is free


def test_clears_and_departures_are_reported(router):
    apply_batch(router, RANK, *stored(1, 2))
    router.add_worker("b", dp_size=2)
    recorder = Recorder(router)
    router.clear(RANK)
    router.remove_worker("b")
    router.remove_worker("unknown")
    assert recorder.reports == [
        ("before removal", RANK, 2),
        ("after removal", Arrival(RANK, 0.0, router.clock()), 0),
        ("clear", RANK, 0),
        ("left", Rank("b"), 0),
        ("left", Rank("b", 1), 0),
    ]


@pytest.mark.parametrize("rank", [Rank("unknown"), Rank("a", 1)])
def test_nothing_is_reported_of_ranks_that_are_not_in_the_fleet(router, rank):
    recorder = Recorder(router)
    for apply in (apply_batch, apply_records):
        apply(router, rank, *stored(1), *removed(1))
    router.apply_packed(rank, encode([]))
    assert router.clear(rank) == 0
    assert recorder.reports == []


def test_each_decision_is_reported_in_order(router):
    recorder = Recorder(router)
    made = [router.route(range(9)), *router.route_many([range(9), range(4)])]
    made.append(router.route_hashed([1, 2], 9))
    assert [decision for decision, _ in recorder.decisions] == made
    hashes = router.index.hasher.sequence_hashes(as_tokens(range(9))).tolist()
    assert [request.sequence_hashes.tolist() for _, request in recorder.decisions] == [
        hashes, hashes, hashes[:1], [1, 2],
    ]  # fmt: skip


def test_the_last_observer_is_told(router):
    first, second = Recorder(router), Recorder(router)
    router.route(range(9))
    apply_batch(router, RANK, *stored(1))
    assert (first.decisions, first.reports) == ([], [])
    assert (len(second.decisions), len(second.reports)) == (1, 1)
