"""Who may take a request, and the constraint that is named when nobody may."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import BlockStored, EventBatch, Rank, Router, RouterConfig
from kvplug.errors import ConfigError, NoWorkerError
from kvplug.events import MoeLabel
from kvplug.router.options import MoeQuery, RouterConfigOverride
from tests.router.test_core import Clock

PROMPT = list(range(64))
TAINTS = {"a": {"h100", "zone-1"}, "b": {"h100"}, "c": set()}


def make_router(**settings):
    settings = {"block_size": 4, "speculative_ttl_s": 0.0, **settings}
    router = Router(RouterConfig(**settings), clock=Clock(), random_=random.Random(0))
    for worker, taints in TAINTS.items():
        router.add_worker(worker, dp_size=2, model="m", taints=taints)
    return router


def store(router, rank, tokens, **more):
    names = tuple(range(1, len(tokens) // 4 + 1))
    event = BlockStored(block_hashes=names, token_ids=tuple(tokens), block_size=4, **more)
    router.apply(rank, EventBatch(events=(event,)))


def test_a_worker_and_a_rank_can_be_pinned():
    router = make_router()
    store(router, Rank("a"), PROMPT)
    assert {router.route(PROMPT, worker="b").rank for _ in range(9)} == {Rank("b"), Rank("b", 1)}
    assert router.route(PROMPT, worker="c", dp_rank=1).rank == Rank("c", 1)


@given(
    st.sets(st.sampled_from(["h100", "zone-1"])),
    st.dictionaries(st.sampled_from(["h100", "zone-1"]), st.floats(-5, 5)),
)
def test_required_taints_are_never_broken(required, preferred):
    router = make_router()
    for _ in range(4):
        rank = router.route(PROMPT, required_taints=required, preferred_taints=preferred).rank
        assert required <= TAINTS[rank.worker]


@pytest.mark.parametrize("cost", ["ms", "blocks"])
@pytest.mark.parametrize("weights", [{"h100": 0.5}, {"h100": 0.5, "zone-1": 1.0}, {"h100": -1.0}])
def test_a_preferred_taint_scales_the_cost(cost, weights):
    for worker, taints in TAINTS.items():
        plain = make_router(cost=cost).route(PROMPT, worker=worker).cost
        cost_of = make_router(cost=cost).route(PROMPT, worker=worker, preferred_taints=weights).cost
        total = sum(weight for taint, weight in weights.items() if taint in taints)
        assert cost_of == pytest.approx(plain * math.exp(-math.tanh(total)))


@pytest.mark.parametrize("cost", ["ms", "blocks"])
def test_a_preferred_taint_decides_among_equals_and_leaves_no_trace(cost):
    router = make_router(cost=cost)
    for _ in range(5):
        decision = router.route(PROMPT, preferred_taints={"zone-1": 0.3})
        assert decision.rank.worker == "a"
        router.finish(decision.request_id)
    assert len({router.route(PROMPT).rank.worker for _ in range(6)}) == 3


def test_taints_are_replaced_not_added_to():
    router = make_router()
    router.add_worker("c", taints={"h100"})
    assert router.route(PROMPT, required_taints=["h100"], workers=["c"]).rank.worker == "c"
    router.add_worker("c", model="m")
    assert router.route(PROMPT, required_taints=["h100"], workers=["c"]).rank.worker == "c"
    router.add_worker("c", taints=())
    with pytest.raises(NoWorkerError):
        router.route(PROMPT, required_taints=["h100"], workers=["c"])


MOE = RouterConfigOverride(moe_query=MoeQuery(layer=1, expert=2, fallback_to_unlabeled=False))


@pytest.mark.parametrize(
    ("options", "constraint", "text"),
    [
        ({"model": "x"}, "model", "expected one that serves model 'x'"),
        ({"workers": ["x"]}, "workers", "expected one of workers ['x']"),
        ({"worker": "x"}, "worker", "expected worker 'x'"),
        ({"worker": "a", "dp_rank": 2}, "dp_rank", "expected data-parallel rank 2"),
        ({"required_taints": ["h200"]}, "required_taints", "with the taints ['h200']"),
        (
            {"workers": ["c"], "required_taints": ["h100"]},
            "required_taints",
            "['h100'] among c, c#1",
        ),
        ({"override": MOE}, "moe_query", "labelled MoeLabel(layer=1, expert=2, group=0)"),
    ],
)
def test_the_constraint_that_left_nobody_is_named(options, constraint, text):
    router = make_router()
    with pytest.raises(NoWorkerError) as rejected:
        router.route(PROMPT, **options)
    assert rejected.value.constraint == constraint
    assert text in str(rejected.value)
    assert "known workers: a, a#1, b, b#1, c, c#1" in str(rejected.value)
    assert len(router.load) == 0


def test_an_empty_fleet_says_so():
    with pytest.raises(NoWorkerError, match="the fleet has none; known workers: none"):
        Router().route(PROMPT)


def test_a_rank_beyond_a_threshold_of_prefill_is_busy_until_its_first_token():
    router = make_router(active_prefill_tokens_threshold=100)
    for rank in router.ranks:
        for _ in range(2):
            router.route(PROMPT, worker=rank.worker, dp_rank=rank.dp_rank)
    with pytest.raises(NoWorkerError, match="beyond them") as rejected:
        router.route(PROMPT)
    assert rejected.value.constraint == "busy"
    router.first_token(next(iter(router.load._requests)))
    assert router.route(PROMPT).rank == Rank("a")


def test_a_rank_beyond_a_share_of_its_cache_is_busy_if_its_capacity_is_known():
    router = make_router(active_decode_blocks_threshold=0.5)
    router.set_cache_capacity(Rank("a"), 20)
    first = router.route(PROMPT, worker="a", dp_rank=0)
    with pytest.raises(NoWorkerError):
        router.route(PROMPT, worker="a", dp_rank=0)
    assert router.route(PROMPT, worker="a").rank == Rank("a", 1)
    router.finish(first.request_id)
    assert router.route(PROMPT, worker="a", dp_rank=0).rank == Rank("a")


def test_nothing_of_many_is_routed_if_one_has_no_aligned_block():
    router = make_router()
    store(router, Rank("a"), PROMPT, moe=MoeLabel(1, 2))
    with pytest.raises(NoWorkerError):
        router.route_many([PROMPT, [9] * 64], override=MOE)
    assert len(router.load) == 0
    assert [d.rank for d in router.route_many([PROMPT, PROMPT], override=MOE)] == [Rank("a")] * 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"workers": "ab"}, "workers must be a collection of names, got 'ab'"),
        ({"required_taints": "a"}, "required_taints must be a collection of names, got 'a'"),
        ({"worker": 7}, "worker must be a name, got 7"),
        ({"session": b"s"}, "session must be a name, got b's'"),
        ({"dp_rank": -1}, "dp_rank must be a whole number in [0, 1023], got -1"),
        ({"dp_rank": True}, "dp_rank must be a whole number in [0, 1023], got True"),
        ({"reports_first_token": 1}, "reports_first_token must be True or False, got 1"),
        ({"preferred_taints": {"a": math.nan}},
         "preferred_taints must have a weight, a finite number, by name, got {'a': nan}"),
        ({"preferred_taints": ["a"]},
         "preferred_taints must have a weight, a finite number, by name, got ['a']"),
        ({"override": {"overlap_score_weight": 1}},
         "override must be a RouterConfigOverride, got {'overlap_score_weight': 1}"),
        ({"override": RouterConfigOverride(overlap_score_weight=-1.0)},
         "overlap_score_weight must be a number in [0, 1e9], got -1.0"),
        ({"override": RouterConfigOverride(router_temperature=math.inf)},
         "router_temperature must be a number in [0, 1e9], got inf"),
        ({"override": RouterConfigOverride(moe_query=MoeQuery(layer=1, expert=-2))},
         "expert must be a whole number of at least 0, got -2"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_get_one_sentence_and_lose_nothing(options, sentence):
    router = make_router()
    with pytest.raises(ConfigError) as rejected:
        router.route(PROMPT, **options)
    assert str(rejected.value) == sentence
    assert len(router.load) == 0


def test_an_option_that_there_is_not_is_refused_by_name():
    with pytest.raises(TypeError, match="only_workers"):
        make_router().route(PROMPT, only_workers=["a"])


@pytest.mark.parametrize("option", ["workers", "required_taints"])
@pytest.mark.parametrize("names", [(name for name in "a"), frozenset({1, "a"}), 5, b"a"])
def test_names_that_cannot_be_looked_at_twice_are_refused(option, names):
    with pytest.raises(ConfigError, match=f"{option} must be a collection of names"):
        make_router().route(PROMPT, **{option: names})


def test_only_so_many_demands_are_remembered():
    router = make_router()
    for number in range(600):
        router.finish(router.route(PROMPT, workers=("a", "b", str(number))).request_id)
    assert len(router._decider._constraints._candidates) <= 256
