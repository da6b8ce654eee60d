"""What a block is worth by where it is, in both costs, and other settings of the cost."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import BlockStored, EngineModel, EventBatch, Rank, Router, RouterConfig
from kvplug.errors import ConfigError, NoWorkerError
from kvplug.events import CxlMetadata, CxlState, MoeLabel, Tier
from kvplug.router.options import MoeQuery, RouterConfigOverride
from tests.router.test_core import Clock

SIZE = 16
TOKENS = tuple(range(10 * SIZE))
MODEL = EngineModel(token_ms=0.5, fixed_ms=2.0, host_ms=0.05, disk_ms=0.1, pool_ms=0.01)
IN_POOL = {"cxl": CxlMetadata(CxlState.CXL_POOLED, 0, ("a",))}
TIERS = {"host": {"tier": Tier.HOST}, "disk": {"tier": Tier.DISK}, "cxl": IN_POOL}


def make_router(*workers, **settings):
    settings = {"block_size": SIZE, "speculative_ttl_s": 0.0, **settings}
    router = Router(RouterConfig(**settings), clock=Clock(), random_=random.Random(0))
    for worker in workers:
        router.add_worker(worker)
        router.set_engine_model(Rank(worker), MODEL)
    return router


def store(router, worker, num_blocks, *, first=0, **where):
    """So many blocks of TOKENS, behind those before them."""
    event = BlockStored(
        block_hashes=tuple(range(first + 1, first + num_blocks + 1)),
        token_ids=TOKENS[SIZE * first : SIZE * (first + num_blocks)],
        block_size=SIZE,
        parent=first or None,
        **where,
    )
    assert router.apply(Rank(worker), EventBatch(events=(event,))).rejected == {}


def cost_of(*, held, **settings):
    """Of a prompt of 10 blocks on a worker that has 4 on its device, and 4 more in a tier."""
    router = make_router("a", **settings)
    store(router, "a", 4)
    if held:
        store(router, "a", 4, first=4, **TIERS[held])
    return router.route(TOKENS).cost


@pytest.mark.parametrize("tier", TIERS)
def test_in_blocks_a_tier_has_its_usual_credit_or_the_one_that_is_set(tier):
    usual = {"host": 0.75, "disk": 0.25, "cxl": 0.9}[tier]
    assert cost_of(held=tier, cost="blocks") == pytest.approx(10 - 4 - 4 * usual + 10)
    is_set = cost_of(held=tier, cost="blocks", **{f"{tier}_credit": 0.5})
    assert is_set == pytest.approx(10 - 4 - 4 * 0.5 + 10)


@pytest.mark.parametrize("tier", TIERS)
def test_in_milliseconds_a_tier_costs_its_loading_time_or_what_its_credit_leaves(tier):
    load_ms = {"host": MODEL.host_ms, "disk": MODEL.disk_ms, "cxl": MODEL.pool_ms}[tier]
    computed_ms = MODEL.fixed_ms + 2 * SIZE * MODEL.token_ms
    assert cost_of(held=tier) == pytest.approx(computed_ms + 4 * SIZE * load_ms)
    is_set = cost_of(held=tier, **{f"{tier}_credit": 0.5})
    assert is_set == pytest.approx(computed_ms + 4 * SIZE * 0.5 * MODEL.token_ms)


@pytest.mark.parametrize("tier", TIERS)
def test_a_credit_stays_when_the_speed_is_learnt_anew(tier):
    router = make_router("a", **{f"{tier}_credit": 0.25})
    router.add_worker("b")
    model = router.engine_model(Rank("b"))
    loading = {"host": model.host_ms, "disk": model.disk_ms, "cxl": model.pool_ms}[tier]
    assert loading == pytest.approx(0.75 * model.token_ms)


@pytest.mark.parametrize(("cost", "block"), [("blocks", 1.0), ("ms", SIZE * MODEL.token_ms)])
def test_a_lower_device_credit_costs_the_rest_of_each_block(cost, block):
    full = cost_of(held=None, cost=cost)
    less = cost_of(held=None, cost=cost, device_credit=0.75)
    assert less - full == pytest.approx(4 * 0.25 * block)


@pytest.mark.parametrize("cost", ["blocks", "ms"])
def test_the_device_credit_decays_with_queued_prefill(cost):
    """By peers' formula, 1 / (1 + decay * queued blocks beyond the least / blocks of the prompt):
    with two prompts of 10 blocks queued on `a` and a decay of 0.5, a block is worth 1 / 2.
    """
    costs = []
    for decay in (0.0, 0.5):
        router = make_router("a", "b", cost=cost, device_credit_decay=decay)
        for number in range(2):
            router.route([900 + number] * len(TOKENS), workers=["a"])
        store(router, "a", 4)
        # Both are candidates, and whichever is chosen, both were costed.
        router.route(TOKENS)
        [arrays] = router._decider._arrays.values()
        costs.append(arrays.costs.tolist())
    assert costs[0][1] == pytest.approx(costs[1][1])
    lost = costs[1][0] - costs[0][0]
    if cost == "blocks":
        assert lost == pytest.approx(4 * 0.5)
    else:
        assert lost >= 4 * 0.5 * SIZE * MODEL.token_ms  # and what computing them delays


@pytest.mark.parametrize(("cost", "block"), [("blocks", 1.0), ("ms", SIZE * MODEL.token_ms)])
def test_each_request_in_flight_costs_its_weight(cost, block):
    costs = []
    for weight in (0.0, 2.5):
        router = make_router("a", cost=cost, request_weight=weight)
        for _ in range(3):
            router.route(TOKENS)
        costs.append(router.route(TOKENS).cost)
    assert costs[1] - costs[0] == pytest.approx(3 * 2.5 * block)


def test_a_stale_rank_is_credited_by_its_confidence_in_both_costs():
    for cost, block in (("blocks", 1.0), ("ms", SIZE * MODEL.token_ms)):
        costs = []
        for confidence in (1.0, 0.5):
            router = make_router("a", cost=cost)
            store(router, "a", 4)
            router.set_confidence(Rank("a"), confidence)
            costs.append(router.route(TOKENS).cost)
        assert costs[1] - costs[0] == pytest.approx(4 * 0.5 * block)


def test_blocks_in_a_pool_count_for_every_worker_that_can_read_it():
    router = make_router("prefill", "near", "far")
    pool = CxlMetadata(CxlState.CXL_POOLED, 0, ("near",))
    store(router, "prefill", 10, cxl=pool)
    decision = router.route(TOKENS, workers=["near", "far"])
    assert (decision.rank, decision.overlap_blocks) == (Rank("near"), 10)
    assert router.route(TOKENS, workers=["far"]).overlap_blocks == 0


@pytest.mark.parametrize("setting", ["host_credit", "disk_credit", "cxl_credit", "device_credit"])
@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, True, "1"])
def test_a_credit_is_a_share(setting, value):
    with pytest.raises(ConfigError, match=f"{setting} must be a number in"):
        RouterConfig(**{setting: value})


settings = st.fixed_dictionaries(
    {
        "cost": st.sampled_from(["ms", "blocks"]),
        "device_credit": st.floats(0, 1),
        "device_credit_decay": st.floats(0, 10),
        "request_weight": st.floats(0, 10),
        "host_credit": st.none() | st.floats(0, 1),
        "cxl_credit": st.none() | st.floats(0, 1),
        "moe_boost": st.floats(0, 10),
        "temperature": st.sampled_from([0.0, 0.7]),
        "active_prefill_tokens_threshold": st.none() | st.integers(0, 500),
    }
)
weights = st.dictionaries(st.sampled_from(["x", "y"]), st.floats(-1e300, 1e300))
steps = st.one_of(
    st.tuples(st.just("route"), weights, st.booleans()),
    st.tuples(st.just("route"), weights, st.booleans()),
    st.tuples(st.just("store"), st.sampled_from("abc"), st.sampled_from([{}, *TIERS.values()])),
    st.tuples(st.just("remove"), st.sampled_from("abc"), st.none()),
    st.tuples(st.just("add"), st.sampled_from("abc"), st.sampled_from([(), ("x",), ("x", "y")])),
    st.tuples(st.just("finish"), st.none(), st.none()),
)


class Fleet:
    """A router that is driven by steps, and the taints of its workers."""

    def __init__(self, settings):
        self.router, self.taints, self.live = make_router(**settings), {}, []
        self.override = RouterConfigOverride(
            moe_query=MoeQuery(layer=1, expert=1), overlap_score_weight=2.0
        )

    def add(self, worker, taints):
        self.router.add_worker(worker, taints=taints)
        self.taints[worker] = set(taints)

    def remove(self, worker, _):
        self.router.remove_worker(worker)
        self.taints.pop(worker, None)

    def store(self, worker, where):
        if worker in self.taints:
            store(self.router, worker, 5, moe=MoeLabel(1, 1), **where)

    def route(self, preferred, is_picky):
        required = {"x"} if is_picky else set()
        able = {worker for worker, its in self.taints.items() if required <= its}
        options = {"required_taints": required, "preferred_taints": preferred}
        if is_picky:
            options["override"] = self.override
        try:
            decision = self.router.route(TOKENS, **options)
        except NoWorkerError as error:
            is_named = error.constraint in ("workers", "required_taints")
            assert error.constraint == "busy" if able else is_named  # noqa: PT017
        else:
            assert decision.rank.worker in able
            assert math.isfinite(decision.cost)
            self.live.append(decision.request_id)

    def finish(self, _, __):
        request_id = self.live.pop() if self.live else None
        if request_id in self.router.load:  # not so if its worker has left
            self.router.finish(request_id)


@given(settings, st.lists(steps, max_size=25))
def test_costs_are_numbers_removed_workers_are_out_and_required_taints_hold(settings, steps):
    fleet = Fleet(settings)
    for step, first, second in steps:
        getattr(fleet, step)(first, second)
    while fleet.live:
        fleet.finish(None, None)
    assert len(fleet.router.load) == len(fleet.router.load.active) == 0
