"""A router within bounds: what a fleet holds beyond them costs tails, never memory."""

import pytest

from kvplug import BlockStored, EventBatch, Rank, Router, RouterConfig
from kvplug.errors import ConfigError


def store(router, worker, chain, num_blocks=20):
    tokens = tuple(range(1000 * chain, 1000 * chain + num_blocks))
    names = tuple(range(1000 * chain, 1000 * chain + num_blocks))
    event = BlockStored(block_hashes=names, token_ids=tokens, block_size=1)
    return router.apply(Rank(worker), EventBatch(events=(event,)))


def test_the_index_of_a_router_is_bounded():
    router = Router(RouterConfig(block_size=1, max_index_blocks=50))
    for worker in ("a", "b"):
        router.add_worker(worker)
    for chain in range(10):
        store(router, "ab"[chain % 2], chain)
    assert len(router.index) <= 50
    assert router.index.capacity_guard.stats.num_blocks >= 150
    decision = router.route(range(9000, 9020))
    assert (decision.rank, decision.overlap_blocks) == (Rank("b"), 20)


def test_senseless_bounds_are_rejected():
    with pytest.raises(ConfigError, match="max_blocks"):
        RouterConfig(max_index_blocks=0)
