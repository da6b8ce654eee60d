"""A router that begins with the blocks of a former one."""

import pytest

from kvplug import BlockRemoved, BlockStored, EventBatch, Rank, Router, RouterConfig
from kvplug.errors import ConfigError, SnapshotError

TOKENS = tuple(range(64))


def stored(first_name=1, block_size=16):
    num_blocks = len(TOKENS) // block_size
    names = tuple(range(first_name, first_name + num_blocks))
    event = BlockStored(block_hashes=names, token_ids=TOKENS, block_size=block_size)
    return EventBatch(events=(event,))


def make_router(*workers, **settings):
    router = Router(RouterConfig(speculative_ttl_s=0.0, **settings))
    for worker in workers:
        router.add_worker(worker)
    return router


@pytest.fixture
def path(tmp_path):
    router = make_router("a", "b")
    router.add_worker("c", dp_size=2)
    for rank in (Rank("a"), Rank("b"), Rank("c", 1)):
        router.apply(rank, stored())
    router.save_index(tmp_path / "index")
    return tmp_path / "index"


def test_members_go_on_with_what_they_had(path):
    router = make_router("c", "a", "b")  # other numbers, and a rank less
    router.set_confidence(Rank("b"), 0.5)
    assert router.load_index(path) == ["c"]
    assert router.route(TOKENS, workers=["a"]).overlap_blocks == 4
    assert router.route(TOKENS, workers=["c"]).overlap_blocks == 0
    assert router.cache_size(Rank("a")).num_resident == 4
    assert router.index_of(Rank("b")).confidence.tolist().count(0.5) == 1
    removed = EventBatch(events=(BlockRemoved(block_hashes=(4,)),))
    assert router.apply(Rank("a"), removed).num_removed == 1
    assert router.route(TOKENS, workers=["a"]).overlap_blocks == 3
    router.index.check()


def test_workers_that_are_not_in_the_fleet_are_left_out(path):
    router = make_router("a", "new")
    assert router.load_index(path) == ["b", "c"]
    assert router.apply(Rank("b"), stored()).rejected == {"unknown_rank": 1}
    router.add_worker("b")
    assert router.route(TOKENS, workers=["b"]).overlap_blocks == 0
    assert router.apply(Rank("b"), stored()).num_stored == 4
    assert router.apply(Rank("new"), stored()).num_stored == 4
    assert [len(held) for held in router.holders_of(TOKENS)] == [3, 3, 3, 3]
    router.index.check()


def test_blocks_that_were_loaded_are_a_workers_own(path):
    router = make_router("a", "b")
    router.load_index(path)
    router.add_worker("a", model="m")  # holds blocks: stays
    assert router.route(TOKENS, workers=["a"], model="m").overlap_blocks == 4
    assert router.clear(Rank("a")) == 4
    router.remove_worker("b")
    assert len(router.index) == 0


def test_a_block_size_that_nobody_has_said_is_that_of_the_file(tmp_path):
    router = make_router("a")
    router.apply(Rank("a"), stored(block_size=32))
    router.save_index(tmp_path / "index")
    router = make_router("a")
    router.route(TOKENS)
    assert router.load_index(tmp_path / "index") == []
    assert router.index.block_size == 32
    assert router.route(TOKENS).overlap_blocks == 2


def test_requests_in_flight_stay_load(path):
    router = make_router("a", "b")
    router.route(TOKENS, request_id="r")
    router.load_index(path)
    assert len(router.load) == 1
    assert router.finish("r") is True


def require_refused(router, path, sentence):
    before = router.ranks, [len(group.index) for group in router.fleet_index.groups]
    with pytest.raises(ConfigError, match=f"cannot load an index{sentence}"):
        router.load_index(path)
    assert (router.ranks, [len(group.index) for group in router.fleet_index.groups]) == before


def test_what_cannot_take_an_index_over_says_why(path):
    router = make_router("a")
    router.apply(Rank("a"), stored())
    require_refused(router, path, ": expected a router without blocks, this one has 4")
    router = make_router("a")
    router.add_worker("b", block_size=32)
    router.apply(Rank("b"), stored(block_size=32))
    router.apply(Rank("a"), stored())
    require_refused(router, path, ": expected a fleet with one index")
    require_refused(make_router("a", block_size=32), path, " with blocks of 16 tokens: those of a")
    router = make_router("a", use_kv_events=False)
    require_refused(router, path, ": expected a router that goes by events")


def test_a_file_that_is_none_changes_nothing(tmp_path):
    (tmp_path / "index").write_bytes(b"no snapshot")
    router = make_router("a")
    with pytest.raises(SnapshotError):
        router.load_index(tmp_path / "index")
    assert router.route(TOKENS).overlap_blocks == 0


def test_holders_in_a_fleet_with_several_indexes(path):
    router = make_router()
    router.add_worker("a", model="x")
    router.add_worker("b", model="y")
    for worker in ("a", "b"):
        router.apply(Rank(worker), stored())
    assert [set(held) for held in router.holders_of(TOKENS)] == [{Rank("a"), Rank("b")}] * 4
    router.add_worker("c", block_size=32)
    with pytest.raises(ConfigError, match="cannot find the holders of blocks: expected a fleet"):
        router.holders_of(TOKENS)
