import pytest

from kvplug import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Rank, Router
from kvplug.events import Tier
from kvplug.kernels import costing
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


def test_an_engine_that_evicts_long_before_it_is_full_is_named_and_learnt_from(router, caplog):
    router.set_cache_capacity(A, 100)
    store(router, A, range(50))
    remove(router, A, range(50))
    store(router, A, range(100, 150))
    remove(router, A, range(101, 150))
    assert known(router, A) == (1, 100, "given")
    remove(router, A, range(100, 101))
    assert known(router, A) == (0, 50, "learned")
    problem = (
        "it has evicted 100 blocks and never held more than 50, well below its capacity of 100"
    )
    assert router.cache_sizes.of(A).problem == problem
    assert [problem in record.message for record in caplog.records] == [True]
    router.set_cache_capacity(A, 200)  # it came back as another one
    remove(router, A, range(1))
    assert known(router, A) == (0, 200, "given")


def test_an_engine_that_evicts_when_it_is_nearly_full_is_believed(router):
    router.set_cache_capacity(A, 100)
    for first in range(0, 500, 85):  # the others are being computed
        store(router, A, range(first, first + 85))
        remove(router, A, range(first, first + 85))
    assert known(router, A) == (0, 100, "given")


def test_of_a_rank_that_counts_for_nothing_the_cache_is_not_known(router):
    store(router, A, range(50))
    router.set_worth(A, 0.0)
    column = router.load.ranks[:, costing.RESIDENT_BLOCKS]
    assert column.tolist() == [costing.UNKNOWN_BLOCKS, 0]
    store(router, A, range(50, 60))
    router.clear(A)
    router.add_worker("c")
    assert router.load.ranks[:, costing.RESIDENT_BLOCKS].tolist() == [-1, 0, 0]
    store(router, A, range(10))
    router.set_worth(A, 0.5)
    assert known(router, A) == (10, 0, "unknown")


class TestWithoutEvents:
    """What was sent tells how full a cache is."""

    @pytest.fixture
    def router(self):
        router = Router(RouterConfig(block_size=1, use_kv_events=False))
        router.add_worker("a")
        return router

    def resident_after(self, router, *prompts):
        for prompt in prompts:
            request_id = router.route(prompt).request_id
            router.first_token(request_id)
            router.finish(request_id)
        return router.load.ranks[0, costing.RESIDENT_BLOCKS]

    def test_nothing_is_known_without_a_capacity(self, router):
        assert self.resident_after(router) == costing.UNKNOWN_BLOCKS
        assert self.resident_after(router, range(10)) == costing.UNKNOWN_BLOCKS

    def test_blocks_that_were_sent_are_there_until_it_is_full(self, router):
        router.set_cache_capacity(A, 25)
        assert self.resident_after(router, range(10), range(12)) == 12
        assert self.resident_after(router, range(100, 110)) == 22
        assert self.resident_after(router, range(200, 210)) == 25
        assert self.resident_after(router, range(300, 310)) == 25

    def test_a_capacity_may_become_known_later(self, router):
        self.resident_after(router, range(10))
        router.set_cache_capacity(A, 25)
        assert self.resident_after(router) == 10

    def test_a_worker_that_comes_back_is_empty(self, router):
        router.set_cache_capacity(A, 25)
        self.resident_after(router, range(10))
        router.clear(A)
        assert self.resident_after(router) == 0
        router.remove_worker("a")
        router.add_worker("a")
        assert self.resident_after(router) == costing.UNKNOWN_BLOCKS


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


def test_nobody_knows_a_stranger(router):
    router.set_cache_capacity(Rank("stranger"), 100)
    assert router.cache_sizes.of(Rank("stranger")).source == "unknown"
