"""Looking before a decision: nothing that is asked changes what comes next."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvplug import BlockStored, EventBatch, Namespace, Rank, Router, RouterConfig
from kvplug.errors import ConfigError, HashingError, NoWorkerError
from kvplug.events import MoeLabel, Tier
from kvplug.router.options import MoeQuery

PROMPT = list(range(64))


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


def make_router(*workers, block_size=4, **settings):
    config = RouterConfig(block_size=block_size, **settings)
    router = Router(config, clock=Clock(), random_=random.Random(0))
    for worker in workers:
        router.add_worker(worker)
    return router


def store(router, worker, tokens, *, first=1, block_size=4, **more):
    names = tuple(range(first, first + len(tokens) // block_size))
    event = BlockStored(block_hashes=names, token_ids=tuple(tokens), block_size=block_size, **more)
    router.apply(Rank(worker), EventBatch(events=(event,)))


def state_of(router):
    """All that a decision could have changed."""
    arrays = list(router._decider._arrays.values())
    learnt = [each.traffic[:11].tolist() for each in arrays]  # the rest is of the request at hand
    load = router.load
    tables = [load.ranks, load.active.slots, load.popular_keys, load.popular_counts]
    tables += load.forecast.arrays
    tables += [each for group in router.fleet_index.groups for each in group.index.speculative.ring]
    return learnt, [each.tolist() for each in tables], len(load)


SETTINGS = [{}, {"cost": "blocks"}, {"use_kv_events": False}, {"mode": "round_robin"}]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_peek_is_what_route_would_decide_and_leaves_no_trace(settings):
    router = make_router("a", "b", "c", **settings)
    if settings.get("use_kv_events", True):
        store(router, "b", PROMPT[:32])
    else:
        router.finish(router.route(PROMPT[:32], workers=["b"]).request_id)
    router.route([5] * 40)
    router.peek(PROMPT)  # arrays grow
    before = state_of(router)
    seen = router.peek(PROMPT, num_ranked=3)
    assert state_of(router) == before
    decided = router.route(PROMPT, num_ranked=3)
    assert seen == structs.replace(decided, request_id="")


def test_a_peek_in_a_fleet_with_several_indexes():
    router = make_router("a")
    router.add_worker("b", block_size=8)
    store(router, "b", PROMPT, block_size=8)
    seen = router.peek(PROMPT, num_ranked=2)
    assert (seen.rank, seen.overlap_blocks, seen.cached_tokens) == (Rank("b"), 8, 64)
    assert [each.rank for each in seen.ranked] == [Rank("b"), Rank("a")]
    decided = router.route(PROMPT, num_ranked=2)
    assert seen == structs.replace(decided, request_id="")


def test_a_peek_refuses_what_route_refuses():
    router = make_router("a")
    for ask, error in [
        (lambda: router.peek(PROMPT, workers=["z"]), NoWorkerError),
        (lambda: router.peek([-1]), HashingError),
        (lambda: router.peek(PROMPT, num_ranked=-1), ConfigError),
        (lambda: router.peek(PROMPT, max_tokens=-1), ConfigError),
    ]:
        with pytest.raises(error):
            ask()


def test_the_best_worker_with_what_it_holds():
    router = make_router("a", "b")
    store(router, "b", PROMPT[:32])
    assert router.best_worker_id(PROMPT) == ("b", 8)
    assert router.best_worker_id(PROMPT, workers=["a"]) == ("a", 0)
    assert len(router.load) == 0


def test_candidates_are_ranked_on_demand():
    router = make_router("a", "b", "c")
    store(router, "b", PROMPT[:32])
    store(router, "c", PROMPT[:48])
    assert router.route(PROMPT, request_id="r").ranked == ()
    router.finish("r")
    decision = router.route(PROMPT, num_ranked=2)
    assert [each.rank for each in decision.ranked] == [decision.rank, Rank("b")]
    costs = [each.cost for each in decision.ranked]
    assert costs == sorted(costs)
    assert costs[0] == decision.cost
    everybody = router.peek(PROMPT, num_ranked=9).ranked
    assert {each.rank for each in everybody} == {Rank("a"), Rank("b"), Rank("c")}


def test_a_rank_that_was_sampled_comes_first():
    router = make_router("a", "b", temperature=1000.0, speculative_ttl_s=0.0)
    store(router, "b", PROMPT[:32])
    for _ in range(20):
        decision = router.route(PROMPT, num_ranked=2)
        assert decision.ranked[0].rank == decision.rank
        assert len(decision.ranked) == 2
        router.finish(decision.request_id)


def test_potential_loads_are_those_of_dynamo():
    router = make_router("a", "b", block_size=16, speculative_ttl_s=0.0)
    router.route(range(128), workers=["a"])
    router.route([*range(96), *range(1000, 1032)], workers=["a"])
    loads = {
        each.rank.worker: (each.potential_prefill_tokens, each.potential_decode_blocks)
        for each in router.get_potential_loads(range(130))
    }
    assert loads == {"a": (256 + 130, 10), "b": (130, 8)}


prompts = st.lists(st.integers(1, 2), min_size=1, max_size=40)


@given(st.lists(prompts, max_size=5), prompts, st.sampled_from(["a", "b"]))
def test_potential_loads_are_what_a_request_makes_of_them(earlier, prompt, worker):
    router = make_router("a", "b")
    store(router, "a", [1] * 16)
    for each in earlier:
        router.first_token(router.route(each).request_id)
        router.route(each)
    expected = {each.rank.worker: each for each in router.get_potential_loads(prompt)}
    assert router.get_potential_loads(prompt) == [expected["a"], expected["b"]]
    router.route(prompt, workers=[worker])
    nothing = {each.rank.worker: each for each in router.get_potential_loads([])}
    assert nothing[worker] == expected[worker]


def test_potential_loads_of_a_fleet_with_two_block_sizes():
    router = make_router("a")
    router.add_worker("b", block_size=8, dp_size=2)
    loads = router.get_potential_loads(PROMPT)
    assert [(str(each.rank), each.potential_decode_blocks) for each in loads] == [
        ("a", 16),
        ("b", 8),
        ("b#1", 8),
    ]
    assert Router().get_potential_loads(PROMPT) == []


def test_matches_are_named_by_rank():
    router = make_router("a", "b")
    router.add_worker("c", model="other")
    store(router, "a", PROMPT[:16], first=1)
    store(router, "a", PROMPT[:32], first=1, tier=Tier.HOST)
    store(router, "b", PROMPT[:24], first=1, moe=MoeLabel(3, 7))
    found = router.find_matches_for_request(PROMPT)
    a, b, c = Rank("a"), Rank("b"), Rank("c")
    assert found.scores == {a: 8, b: 6, c: 0}
    assert (found.device, found.host) == ({a: 4, b: 6, c: 0}, {a: 8, b: 6, c: 0})
    assert found.disk == found.host
    assert found.cxl_accessible_scores == found.device
    assert found.moe_scores == {}
    found = router.find_matches_for_request(PROMPT, moe_query=MoeLabel(3, 7), model="other")
    assert set(found.scores) == {c, a, b}  # workers without a model serve any
    assert found.moe_scores == {a: 0, b: 6, c: 0}
    same = router.find_matches_for_request(PROMPT, moe_query=MoeQuery(layer=3, expert=7))
    assert same.moe_scores[b] == 6
    with pytest.raises(ConfigError, match="moe_query must be a MoeLabel or a MoeQuery, got 7"):
        router.find_matches_for_request(PROMPT, moe_query=7)
    salted = router.find_matches_for_request(PROMPT, namespace=Namespace(salt="x"))
    assert set(salted.scores.values()) == {0}


def test_matches_in_a_fleet_with_several_indexes():
    router = make_router("a")
    router.add_worker("b", block_size=8, model="m")
    store(router, "a", PROMPT[:16])
    store(router, "b", PROMPT[:16], block_size=8)
    assert router.find_matches_for_request(PROMPT).scores == {Rank("a"): 4, Rank("b"): 2}
    label = MoeLabel(1, 1)
    assert router.find_matches_for_request(PROMPT, moe_query=label).moe_scores == {
        Rank("a"): 0,
        Rank("b"): 0,
    }
