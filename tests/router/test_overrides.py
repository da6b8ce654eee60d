"""Settings for one request: weight, temperature, the expert that it will use."""

import random
from collections import Counter

import numpy as np
import pytest

from kvplug import BlockStored, EventBatch, Rank, Router, RouterConfig
from kvplug.errors import ConfigError, NoWorkerError
from kvplug.events import CxlMetadata, CxlState, MoeLabel
from kvplug.router.options import MoeQuery, RouterConfigOverride
from tests.router.test_core import Clock

PROMPT = list(range(64))
LABEL = MoeLabel(layer=3, expert=7, group=1)
QUERY = MoeQuery(layer=3, expert=7, group=1)


def make_router(*workers, **settings):
    settings = {"block_size": 4, "speculative_ttl_s": 0.0, **settings}
    router = Router(RouterConfig(**settings), clock=Clock(), random_=random.Random(0))
    for worker in workers:
        router.add_worker(worker)
    return router


def store(router, worker, tokens, **more):
    names = tuple(range(1, len(tokens) // 4 + 1))
    event = BlockStored(block_hashes=names, token_ids=tuple(tokens), block_size=4, **more)
    assert not router.apply(Rank(worker), EventBatch(events=(event,))).rejected


@pytest.mark.parametrize("cost", ["ms", "blocks"])
@pytest.mark.parametrize("weight", [0.0, 1.0, 2.5])
def test_a_weight_of_one_request_is_that_of_the_cost_in_blocks(cost, weight):
    router, expected = make_router("a", cost=cost), make_router("a", overlap_score_weight=1.0)
    other = make_router("a", overlap_score_weight=weight)
    for each in (router, expected):
        store(each, "a", PROMPT[:32])
    if weight:
        store(other, "a", PROMPT[:32])
    override = RouterConfigOverride(overlap_score_weight=weight)
    decision = router.route(PROMPT, override=override)
    assert decision.cost == other.route(PROMPT).cost == weight * (8 if weight else 16) + 16
    # The next one is costed as configured, with the first in its load.
    twin = make_router("a", cost=cost)
    store(twin, "a", PROMPT[:32])
    twin.route(PROMPT)
    assert router.route(PROMPT).cost == pytest.approx(twin.route(PROMPT).cost)
    router.load.forecast.check()


def test_a_temperature_of_one_request_spreads_it():
    router = make_router("a", "b")
    store(router, "a", PROMPT)
    override = RouterConfigOverride(router_temperature=20.0)

    def picks(**options):
        counts = Counter()
        for _ in range(60):
            decision = router.route(PROMPT, **options)
            router.finish(decision.request_id)
            counts[decision.rank.worker] += 1
        return counts

    assert set(picks(override=override)) == {"a", "b"}
    assert set(picks()) == {"a"}


def test_a_temperature_counts_where_the_fleet_has_several_indexes_too():
    router = make_router("a", block_size=None)
    router.add_worker("b", block_size=8)
    store(router, "a", PROMPT)
    override = RouterConfigOverride(router_temperature=20.0)
    picks = {router.route(PROMPT, override=override).rank.worker for _ in range(60)}
    assert picks == {"a", "b"}


@pytest.mark.parametrize("cost", ["ms", "blocks"])
def test_labelled_blocks_are_preferred_among_equals(cost):
    router = make_router("a", "b", "c", cost=cost)
    for worker in "abc":
        store(router, worker, PROMPT, **({"moe": LABEL} if worker == "b" else {}))
    override = RouterConfigOverride(moe_query=QUERY)
    for _ in range(5):
        decision = router.route(PROMPT, override=override)
        assert decision.rank == Rank("b")
        router.finish(decision.request_id)
    assert router.route(PROMPT, workers=["b"], override=override).overlap_blocks == 16


@pytest.mark.parametrize(("cost", "block"), [("blocks", 1.0), ("ms", None)])
def test_each_labelled_block_is_worth_the_boost(cost, block):
    label = {"moe": LABEL}
    routers = [make_router("a", cost=cost, moe_boost=2.0) for _ in range(2)]
    for router in routers:
        store(router, "a", PROMPT[:32], **label)
    plain = routers[0].route(PROMPT).cost
    boosted = routers[1].route(PROMPT, override=RouterConfigOverride(moe_query=QUERY)).cost
    if block is None:  # milliseconds to compute it, as nobody is behind the first request
        block = 4 * routers[1].engine_model(Rank("a")).token_ms
    assert plain - boosted == pytest.approx(2.0 * 8 * block)


def test_without_fallback_only_labelled_ranks_are_left():
    router = make_router("a", "b")
    store(router, "a", PROMPT)
    store(router, "b", PROMPT[:4], moe=LABEL)
    query = MoeQuery(layer=3, expert=7, group=1, fallback_to_unlabeled=False)
    override = RouterConfigOverride(moe_query=query)
    assert router.route(PROMPT).rank == Rank("a")
    assert router.route(PROMPT, override=override).rank == Rank("b")


def test_labels_count_where_the_fleet_has_several_indexes_too():
    router = make_router("a", block_size=None)
    router.add_worker("b", block_size=8)
    store(router, "a", PROMPT, moe=LABEL)
    event = BlockStored(block_hashes=(1,), token_ids=tuple(range(8)), block_size=8)
    router.apply(Rank("b"), EventBatch(events=(event,)))
    query = MoeQuery(layer=3, expert=7, group=1, fallback_to_unlabeled=False)
    override = RouterConfigOverride(moe_query=query)
    assert router.route(PROMPT, override=override).rank == Rank("a")


@pytest.mark.parametrize(
    "override",
    [RouterConfigOverride(overlap_score_weight=1.0), RouterConfigOverride(moe_query=QUERY)],
)
def test_an_override_that_needs_an_index_is_refused_where_there_is_none(override):
    router = make_router("a", overlap_score_weight=0.0)
    with pytest.raises(ConfigError, match="this one has 0 and builds no index"):
        router.route(PROMPT, override=override)
    assert len(router.load) == 0
    assert router.route(PROMPT, override=RouterConfigOverride(overlap_score_weight=0.0))


def test_weight_0_builds_no_index():
    router = make_router("a", overlap_score_weight=0.0, speculative_ttl_s=2.0)
    event = BlockStored(block_hashes=(1,), token_ids=(1, 2, 3, 4), block_size=4)
    with pytest.raises(ConfigError, match="cannot apply events of a: expected a router with an"):
        router.apply(Rank("a"), EventBatch(events=(event,)))
    assert router.route(PROMPT).overlap_blocks == router.route(PROMPT).overlap_blocks == 0
    assert len(router.index) == 0
    assert np.isfinite(router.route(PROMPT).cost)


@pytest.mark.parametrize("cost", ["ms", "blocks"])
def test_labels_of_blocks_in_a_pool_count_for_those_that_read_it(cost):
    router = make_router("prefill", "near", "far", cost=cost)
    store(router, "far", PROMPT)
    pool = CxlMetadata(CxlState.CXL_POOLED, 0, ("near",))
    store(router, "prefill", PROMPT, moe=LABEL, cxl=pool)
    query = MoeQuery(layer=3, expert=7, group=1, fallback_to_unlabeled=False)
    override = RouterConfigOverride(moe_query=query)
    workers = ["near", "far"]
    assert router.route(PROMPT, workers=workers, override=override).rank == Rank("near")
    other = MoeQuery(layer=3, expert=8, fallback_to_unlabeled=False)
    with pytest.raises(NoWorkerError):
        router.route(PROMPT, override=RouterConfigOverride(moe_query=other))


def test_a_fleet_that_grows_or_shrinks_keeps_nothing_of_a_preference():
    router = make_router("a", "b")
    preferred = {"preferred_taints": {"x": 1.0}}
    decision = router.route(PROMPT, **preferred)
    for change in (lambda: router.add_worker("c"), lambda: router.remove_worker("b")):
        change()
        assert router.finish(decision.request_id, 10) in (True, False)
        decision = router.route(PROMPT)
        assert len(router.get_potential_loads(PROMPT)) == len(router.ranks)
        router.finish(decision.request_id)
        decision = router.route(PROMPT, **preferred)


def test_an_adjusted_request_may_need_larger_arrays():
    router = make_router("a", "b")
    router.add_worker("c", taints=["x"])
    long = np.arange(40_000, dtype=np.uint32)
    assert router.route(long, preferred_taints={"x": 5.0}).rank == Rank("c")
    costs = {router.route([7] * 8, workers=[worker]).cost for worker in "ab"}
    assert len(costs) == 1


def test_many_have_what_one_has():
    router = make_router("a", "b")
    assert router.route_many([], override=RouterConfigOverride(moe_query=QUERY)) == []
    [decision] = router.route_many([PROMPT], num_ranked=2)
    assert len(decision.ranked) == 2


def test_heavy_weights_leave_costs_finite():
    router = make_router("a", block_size=None)
    router.add_worker("b", block_size=8)
    store(router, "a", PROMPT)
    override = RouterConfigOverride(overlap_score_weight=1e9, router_temperature=1e-320)
    assert np.isfinite(router.route(PROMPT, override=override).cost)
