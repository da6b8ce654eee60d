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
    assert known(router, A) == (50, 50, "learned")
    problem = "it holds 50 blocks, more than its capacity of 20"
    assert router.cache_sizes.of(A).problem == problem
    assert [problem in record.message for record in caplog.records] == [True]


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
