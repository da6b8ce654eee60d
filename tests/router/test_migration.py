"""Requests whose worker has failed: where they go on, and what that changes."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import BlockStored, EventBatch, Rank, Router, RouterConfig, Tier
from kvplug.errors import ConfigError, HashingError, NoWorkerError, UnknownRequestError
from kvplug.events import CxlMetadata, CxlState
from kvplug.hashing import as_tokens
from kvplug.kernels import costing
from kvplug.router.observer import RouterObserver
from tests.router.test_core import Clock

PROMPT = list(range(64))
NUM_BLOCKS = 16
A, B, C = map(Rank, "abc")


def make_router(*workers, clock=None, **settings):
    settings = {"block_size": 4, "speculative_ttl_s": 0.0, **settings}
    router = Router(RouterConfig(**settings), clock=clock or Clock(), random_=random.Random(0))
    for worker in workers:
        router.add_worker(worker)
    return router


def store(router, worker, num_blocks, **more):
    event = BlockStored(
        block_hashes=tuple(range(1, num_blocks + 1)),
        token_ids=tuple(PROMPT[: 4 * num_blocks]),
        block_size=4,
        **more,
    )
    assert not router.apply(Rank(worker), EventBatch(events=(event,))).rejected


def pool(router, num_blocks, *readers, owner="prefill"):
    store(router, owner, num_blocks, cxl=CxlMetadata(CxlState.CXL_POOLED, 0, readers))


def live(router):
    """float64[ranks, 7]: of requests in flight."""
    return router.load.ranks[
        :,
        [
            *(costing.NUM_RUNNING, costing.NUM_WAITING, costing.WAITING_MS, costing.PREFILL_TOKENS),
            *(costing.COMING_BLOCKS, costing.ACTIVE_BLOCKS, costing.CONTEXT_TOKENS),
        ],
    ]


def load_of(router):
    return router.load.ranks.copy(), len(router.load)


def test_old_and_new_booking_change_in_one_step():
    router = make_router("a", "b")
    decision = router.route(PROMPT, request_id="r", worker="a")
    migration = router.migrate("r", [*PROMPT, 1, 2, 3], max_tokens=7)
    assert (migration.failed, migration.decision.rank) == (A, B)
    assert migration.decision.request_id == decision.request_id == "r"
    alone = make_router("a", "b")
    alone.route([*PROMPT, 1, 2, 3], worker="b")
    np.testing.assert_allclose(live(router), live(alone))
    assert len(router.load) == 1
    router.first_token("r")
    router.finish("r", num_tokens=7)
    assert len(router.load) == len(router.load.active) == 0
    assert not live(router).any()


def test_what_is_reached_and_what_is_computed_again_is_told():
    router = make_router("a", "b", "prefill")
    pool(router, 8, "b")
    store(router, "b", 10)  # on its device, besides what it reads in the pool
    router.route(PROMPT, request_id="r", worker="a")
    migration = router.migrate("r", [*PROMPT, 1], workers=["a", "b"])
    assert migration.reached_blocks == migration.decision.overlap_blocks == 10
    assert (migration.reached_tokens, migration.recomputed_tokens) == (40, 25)
    assert migration.cxl_accessible == {B: 10}


def test_lower_tiers_count_as_reached():
    router = make_router("a", "b")
    store(router, "b", 16, tier=Tier.HOST)
    router.route(PROMPT, request_id="r", worker="a")
    migration = router.migrate("r", PROMPT)
    # An engine computes the last token in any case.
    assert (migration.reached_tokens, migration.recomputed_tokens) == (64, 1)
    assert migration.cxl_accessible == {B: 0}


def test_blocks_that_are_only_expected_are_not_reached():
    router = make_router("a", "b", speculative_ttl_s=5.0)
    router.route(PROMPT, worker="b")
    router.route(PROMPT, request_id="r", worker="a")
    migration = router.migrate("r", PROMPT)
    assert (migration.decision.overlap_blocks, migration.reached_blocks) == (16, 0)


def busy(router, worker, num_requests=50):
    for number in range(num_requests):
        router.route([1000 + number] * 400, worker=worker)


@pytest.mark.parametrize("cost", ["ms", "blocks"])
@pytest.mark.parametrize("mode", ["kv", "least_loaded", "round_robin", "random"])
def test_who_reads_the_pool_comes_first_however_busy(cost, mode):
    router = make_router("a", "b", "c", "prefill", cost=cost, mode=mode)
    pool(router, 16, "a", "b")
    busy(router, "b")
    router.route(PROMPT, request_id="r", worker="a")
    migration = router.migrate("r", PROMPT, workers=["a", "b", "c"])
    assert migration.decision.rank == B
    assert migration.cxl_accessible == {B: 16, C: 0}


def test_among_those_that_reach_enough_the_cost_decides():
    router = make_router("a", "b", "c", "d", "prefill")
    pool(router, 16, "b")
    store(router, "c", 8)  # half as much, without a pool
    store(router, "d", 7)
    busy(router, "b")
    router.route(PROMPT, request_id="r", worker="a")
    migration = router.migrate("r", PROMPT, workers=["a", "b", "c", "d"])
    assert migration.decision.rank == C
    assert list(migration.cxl_accessible.values()) == [16, 8, 7]


def test_without_pools_the_cost_decides():
    router = make_router("a", "b", "c")
    store(router, "b", 2)
    busy(router, "b")
    router.route(PROMPT, request_id="r", worker="a")
    assert router.migrate("r", PROMPT).decision.rank == C


def test_no_rank_of_the_failed_worker_and_none_that_failed_before_is_chosen():
    router = make_router("b", "c")
    router.add_worker("a", dp_size=2)
    store(router, "b", 16)
    router.route(PROMPT, request_id="r", worker="a", dp_rank=1)
    migration = router.migrate("r", PROMPT, exclude=["b"])
    assert (migration.failed, migration.decision.rank) == (Rank("a", 1), C)
    assert migration.cxl_accessible == {C: 0}
    with pytest.raises(NoWorkerError):
        router.migrate("r", PROMPT, exclude=["a", "b"])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"workers": ["a"]}, NoWorkerError),
        ({"worker": "a"}, NoWorkerError),
        ({"exclude": ["b"]}, NoWorkerError),
        ({"required_taints": ["none"]}, NoWorkerError),
        ({"exclude": "b"}, ConfigError),
        ({"workers": "b"}, ConfigError),
        ({"max_tokens": -1}, ConfigError),
        ({"token_ids": [-1]}, HashingError),
    ],
)
def test_nothing_changes_if_it_cannot_be(options, error):
    router = make_router("a", "b")
    router.route(PROMPT, request_id="r", worker="a")
    before, num_before = load_of(router)
    with pytest.raises(error):
        router.migrate("r", **{"token_ids": PROMPT, **options})
    after, num_after = load_of(router)
    np.testing.assert_array_equal(before, after)
    assert num_after == num_before == 1
    assert router.load.request("r").rank_number == 0


def test_the_message_names_the_request_and_the_worker():
    router = make_router("a")
    router.route(PROMPT, request_id="r")
    with pytest.raises(NoWorkerError, match="cannot migrate request 'r' from a: ") as raised:
        router.migrate("r", PROMPT)
    assert raised.value.constraint == "workers"


def test_only_requests_in_flight_migrate():
    clock = Clock()
    router = make_router("a", "b", clock=clock, request_expiry_s=10.0)
    with pytest.raises(UnknownRequestError):
        router.migrate("r", PROMPT)
    router.route(PROMPT, request_id="r", worker="a")
    clock.now_s += 11.0
    with pytest.raises(UnknownRequestError):
        router.migrate("r", PROMPT)
    router.route(PROMPT, request_id="r", worker="a")
    router.remove_worker("a")
    with pytest.raises(UnknownRequestError):
        router.migrate("r", PROMPT)


def test_a_migrated_request_counts_for_the_whole_time_again():
    clock = Clock()
    router = make_router("a", "b", clock=clock, request_expiry_s=10.0)
    router.route(PROMPT, request_id="r", worker="a")
    clock.now_s += 9.0
    router.migrate("r", PROMPT)
    clock.now_s += 9.0
    router.finish("r")


def test_hashes_do_as_tokens_do():
    by_tokens, by_hashes = (make_router("a", "b", "c", "prefill") for _ in range(2))
    prompt = [*PROMPT, 1]
    for router in (by_tokens, by_hashes):
        pool(router, 9, "c")
        router.route(PROMPT, request_id="r", worker="a")
    hashes = by_tokens.index.hasher.sequence_hashes(as_tokens(prompt))
    options = {"exclude": ["prefill"], "max_tokens": 9}
    expected = by_tokens.migrate("r", prompt, **options)
    assert by_hashes.migrate_hashed("r", hashes, len(prompt), **options) == expected
    assert expected.decision.rank == C


def test_hashes_are_of_one_block_size():
    router = make_router("a")
    router.add_worker("b", block_size=8)
    router.route(PROMPT, request_id="r", worker="a")
    with pytest.raises(ConfigError):
        router.migrate_hashed("r", [1, 2], 8)
    migration = router.migrate("r", PROMPT)
    assert (migration.decision.rank, migration.decision.block_size) == (B, 8)


def test_blocks_of_several_sizes_compare_by_tokens():
    router = make_router("a", "c")
    router.add_worker("b", block_size=8)
    stored = BlockStored(block_hashes=(1, 2, 3), token_ids=tuple(PROMPT[:24]), block_size=8)
    router.apply(B, EventBatch(events=(stored,)))
    pool(router, 8, "c", owner="a")  # 32 tokens: b reaches 24 of them in 3 blocks
    busy(router, "c")
    router.route(PROMPT, request_id="r", worker="a")
    migration = router.migrate("r", PROMPT)
    assert migration.cxl_accessible == {C: 8, B: 3}
    assert migration.decision.rank == B


def test_an_observer_is_told():
    class Observer(RouterObserver):
        def __init__(self):
            self.told = []

        def on_decision(self, decision, request):
            self.told.append((decision.request_id, decision.rank))

        def on_moved(self, request_id):
            self.told.append((request_id, None))

    router, observer = make_router("a", "b"), Observer()
    router.set_observer(observer)
    router.route(PROMPT, request_id="r", worker="a")
    router.migrate("r", PROMPT)
    assert observer.told == [("r", A), ("r", None), ("r", B)]


_DEPTHS = st.integers(0, NUM_BLOCKS)


@given(on_device=st.tuples(*[_DEPTHS] * 3), pools=st.tuples(*[st.booleans()] * 3), depth=_DEPTHS)
def test_the_choice_is_of_those_that_come_first(on_device, pools, depth):
    router = make_router("a", "0", "1", "2", "prefill")
    readers = tuple(str(each) for each in range(3) if pools[each])
    if depth:
        pool(router, depth, *readers)
    for worker, num_blocks in enumerate(on_device):
        if num_blocks:
            store(router, str(worker), num_blocks)
    router.route(PROMPT, request_id="r", worker="a")
    migration = router.migrate("r", PROMPT, workers=["a", "0", "1", "2"])

    reached = [max(on_device[each], depth * pools[each]) for each in range(3)]
    by_pool = [reached[each] for each in range(3) if reached[each] > on_device[each]]
    least = max(by_pool, default=0) / 2
    chosen = int(migration.decision.rank.worker)
    assert reached[chosen] >= least
    assert migration.reached_blocks == reached[chosen]
    assert list(migration.cxl_accessible.values()) == reached
    router.index.check()
