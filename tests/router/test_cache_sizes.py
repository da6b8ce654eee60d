import pytest

from kvplug import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineModel,
    EventBatch,
    Rank,
    Router,
    codec,
    packed,
)
from kvplug.errors import UnknownRankError
from kvplug.events import Tier
from kvplug.kernels import costing
from kvplug.records import read_payloads
from kvplug.router.config import RouterConfig

A, B = Rank("a"), Rank("b")


@pytest.fixture
def router():
    router = Router(RouterConfig(block_size=1))
    for worker in "ab":
        router.add_worker(worker)
    return router


def store(router, rank, names, **more):
    event = BlockStored(block_hashes=tuple(names), token_ids=tuple(names), block_size=1, **more)
    router.apply(rank, EventBatch(events=(event,)))


def remove(router, rank, names):
    router.apply(rank, EventBatch(events=(BlockRemoved(block_hashes=tuple(names)),)))


def known(router, rank):
    size = router.cache_sizes.of(rank)
    number = router.fleet_index.numbers.number_of(rank)
    in_load = router.load.ranks[number, [costing.RESIDENT_BLOCKS, costing.CAPACITY_BLOCKS]]
    assert in_load.tolist() == [size.num_resident, size.capacity]
    return size.num_resident, size.capacity, size.source


def test_what_is_resident_is_counted_once_and_on_the_device(router):
    store(router, A, range(10))
    store(router, A, range(5))
    store(router, A, range(100, 120), tier=Tier.HOST)
    assert known(router, A) == (10, 0, "unknown")
    assert known(router, B) == (0, 0, "unknown")


def test_what_the_engine_says_is_its_capacity(router):
    router.set_cache_capacity(A, 100)
    store(router, A, range(50))
    remove(router, A, range(40, 50))
    assert known(router, A) == (40, 100, "given")
    assert known(router, B)[1:] == (0, "unknown")


def test_an_engine_that_evicts_was_full(router):
    store(router, A, range(50))
    remove(router, A, range(45, 50))
    assert known(router, A) == (45, 50, "learned")
    store(router, A, range(45, 60))
    assert known(router, A)[1] == 50  # more than that, but nothing was evicted for it
    remove(router, A, range(59, 60))
    assert known(router, A)[1] == 60


@pytest.mark.parametrize("said", [0, -5, float("nan")])
def test_a_capacity_that_is_none_is_named_and_ignored(router, said, caplog):
    router.set_cache_capacity(A, said)
    router.set_cache_capacity(A, said)
    store(router, A, range(50))
    assert known(router, A) == (50, 0, "unknown")
    assert "is none" in router.cache_sizes.of(A).problem
    assert len(caplog.records) == (1 if said == said else 2)
    router.set_cache_capacity(A, 80)
    assert known(router, A) == (50, 80, "given")
    assert router.cache_sizes.of(A).problem is None


def test_an_engine_that_holds_more_than_it_said_is_named_and_learnt_from(router, caplog):
    router.set_cache_capacity(A, 20)
    store(router, A, range(50))
    assert known(router, A) == (50, 0, "unknown")  # it may have room for many more
    remove(router, A, range(1))
    assert known(router, A) == (49, 50, "learned")
    problem = "it holds 50 blocks, more than its capacity of 20"
    assert router.cache_sizes.of(A).problem == problem
    assert [problem in record.message for record in caplog.records] == [True]


def evict(router, first, num_blocks):
    """So many blocks come and go."""
    store(router, A, range(first, first + num_blocks))
    remove(router, A, range(first, first + num_blocks))


def test_an_engine_that_evicts_long_before_it_is_full_is_learnt_from(router, caplog):
    router.set_cache_capacity(A, 100)
    evict(router, 0, 50)
    evict(router, 100, 49)
    assert known(router, A) == (0, 100, "given")
    evict(router, 200, 1)
    assert known(router, A) == (0, 50, "learned")
    assert router.cache_sizes.of(A).problem is None  # it may count other blocks, too
    evict(router, 300, 80)
    assert known(router, A) == (0, 100, "given")  # it was right
    assert caplog.records == []


def test_an_engine_that_is_set_otherwise_or_starts_over_is_believed_again(router):
    for start_over in (
        lambda: router.set_cache_capacity(A, 99),
        lambda: router.clear(A),
        lambda: router.apply(A, EventBatch(events=(AllBlocksCleared(),))),
    ):
        router.set_cache_capacity(A, 100)
        for first in (0, 50):
            evict(router, first, 50)
        assert known(router, A)[1] == 50
        start_over()
        assert known(router, A) == (0, router.cache_sizes.of(A).said, "given")


def test_what_is_not_all_known_says_nothing_of_a_capacity(router):
    router.set_cache_capacity(A, 100)
    router.set_confidence(A, 0.5)  # there may be blocks of which no event came
    for first in (0, 50, 100):
        evict(router, first, 50)
    assert known(router, A) == (0, 100, "given")


def test_what_an_index_had_no_room_for_says_nothing_of_a_capacity():
    router = Router(RouterConfig(block_size=1, max_index_blocks=50))
    router.add_worker("a")
    router.set_cache_capacity(A, 100)
    for first in range(0, 400, 100):
        evict(router, first, 100)
    assert router.cache_sizes.of(A).source == "given"


def test_what_leaves_the_host_says_nothing_of_the_device(router):
    router.set_cache_capacity(A, 100)
    store(router, A, range(40))
    for first in range(100, 400, 50):
        names = tuple(range(first, first + 50))
        store(router, A, names, tier=Tier.HOST)
        gone = BlockRemoved(block_hashes=names, tier=Tier.HOST)
        router.apply(A, EventBatch(events=(gone,)))
    assert known(router, A) == (40, 100, "given")


def test_an_engine_that_evicts_when_it_is_nearly_full_is_believed(router):
    router.set_cache_capacity(A, 100)
    for first in range(0, 500, 85):  # the others are being computed
        store(router, A, range(first, first + 85))
        remove(router, A, range(first, first + 85))
    assert known(router, A) == (0, 100, "given")


def test_a_rank_of_which_nobody_tells_is_empty_until_something_is_sent(router):
    router.set_confidence(A, 0.0)
    resident = router.load.ranks[:, costing.RESIDENT_BLOCKS]
    requests = [router.route(range(10), workers=[worker]).request_id for worker in "ab"]
    assert resident.tolist() == [0, 0]
    for request_id in requests:
        router.first_token(request_id)
    assert resident.tolist() == [costing.UNKNOWN_BLOCKS, 0]
    store(router, A, range(10))
    router.set_confidence(A, 0.5)
    assert known(router, A) == (10, 0, "unknown")


class TestWithoutEvents:
    """What was sent tells how full a cache is."""

    @pytest.fixture
    def router(self):
        router = Router(RouterConfig(block_size=1, use_kv_events=False), clock=lambda: self.now_s)
        router.add_worker("a")
        return router

    now_s = 0.0

    def send(self, router, prompt):
        """Its decision."""
        decision = router.route(prompt)
        router.first_token(decision.request_id)
        router.finish(decision.request_id)
        return decision

    def resident(self, router):
        return router.load.ranks[0, costing.RESIDENT_BLOCKS]

    def test_nothing_is_known_without_a_capacity(self, router):
        assert self.resident(router) == costing.UNKNOWN_BLOCKS
        self.send(router, range(10))
        assert self.resident(router) == costing.UNKNOWN_BLOCKS

    def test_blocks_that_were_sent_are_there_until_it_is_full(self, router):
        router.set_cache_capacity(A, 100)
        for prompt, num_there in (
            (range(32), 32),
            (range(40), 40),
            (range(100, 140), 80),
            (range(200, 240), 100),
            (range(300, 340), 100),
        ):
            self.send(router, prompt)
            assert self.resident(router) == num_there

    def test_what_is_on_its_way_counts_once(self, router):
        router.set_cache_capacity(A, 100)
        first, second = router.route(range(32)), router.route(range(100, 132))
        router.first_token(first.request_id)
        row = router.load.ranks[0]
        assert (row[costing.RESIDENT_BLOCKS], row[costing.COMING_BLOCKS]) == (32, 32)
        router.first_token(second.request_id)
        assert (row[costing.RESIDENT_BLOCKS], row[costing.COMING_BLOCKS]) == (64, 0)

    def test_a_prompt_that_is_sent_again_after_long_counts_once(self, router):
        router.set_cache_capacity(A, 1000)
        for _ in range(12):
            self.send(router, range(96))
            self.now_s += 200  # what is expected expires
        assert self.resident(router) < 2 * 96

    def test_what_was_evicted_since_is_not_predicted(self, router):
        router.set_cache_capacity(A, 100)
        router.set_engine_model(A, EngineModel())
        assert self.send(router, range(32)).predicted_ttft_ms > 8
        assert self.send(router, range(32)).predicted_ttft_ms < 4
        for first in range(100, 400, 40):
            self.send(router, range(first, first + 32))
        assert self.send(router, range(32)).predicted_ttft_ms > 8

    def test_a_capacity_that_becomes_known_later_counts_from_then_on(self, router):
        self.send(router, range(10))
        router.set_cache_capacity(A, 100)
        assert self.resident(router) == 0
        self.send(router, range(20))
        assert self.resident(router) == 20

    def test_a_worker_that_comes_back_is_empty(self, router):
        router.set_cache_capacity(A, 100)
        self.send(router, range(10))
        router.clear(A)
        assert self.resident(router) == 0
        router.remove_worker("a")
        router.add_worker("a")
        assert self.resident(router) == costing.UNKNOWN_BLOCKS


def test_a_rank_that_is_cleared_is_empty_and_as_large_as_before(router):
    store(router, A, range(50))
    remove(router, A, range(45, 50))
    router.apply(A, EventBatch(events=(AllBlocksCleared(),)))
    assert known(router, A) == (0, 50, "learned")
    store(router, A, range(5))
    router.clear(A)
    assert known(router, A) == (0, 50, "learned")


def test_a_worker_that_left_and_came_back_is_a_new_one(router):
    router.set_cache_capacity(A, 100)
    store(router, A, range(50))
    router.remove_worker("a")
    router.add_worker("a")
    assert known(router, A) == (0, 0, "unknown")


STRANGER = Rank("stranger")


@pytest.mark.parametrize(
    "ask",
    [
        lambda router: router.set_cache_capacity(STRANGER, 100),
        lambda router: router.cache_size(STRANGER),
        lambda router: router.set_confidence(STRANGER, 1.0),
        lambda router: router.set_recomputed_blocks(STRANGER, 1),
        lambda router: router.set_engine_model(STRANGER, EngineModel()),
        lambda router: router.engine_model(STRANGER),
        lambda router: router.model_quality(STRANGER),
        lambda router: router.set_reported_load(STRANGER),
        lambda router: router.index_of(STRANGER),
        lambda router: router.adopt("r", STRANGER, [], 1),
        lambda router: router.moved("r", STRANGER),
    ],
)
def test_nothing_is_asked_or_set_of_a_stranger(router, ask):
    with pytest.raises(UnknownRankError, match="cannot find rank stranger: expected one that was"):
        ask(router)
    assert router.cache_sizes.of(STRANGER).source == "unknown"


def test_what_a_stranger_says_is_refused(router):
    batch = EventBatch(events=(AllBlocksCleared(),))
    assert router.apply(STRANGER, batch).rejected == {"unknown_rank": 1}
    assert router.apply_records(STRANGER, read_payloads([codec.encode(batch)])).rejected == {
        "unknown_rank": 1
    }
    assert router.apply_packed(STRANGER, packed.encode([packed.PackedCleared()])).rejected == {
        "unknown_rank": 1
    }
    assert router.clear(STRANGER) == 0
    assert router.forget_adapter("stranger", "lora") == 0
