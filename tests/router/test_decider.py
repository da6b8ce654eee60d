"""Many requests in one call, prompts that are hashed already, and what narrows the choice."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import BlockStored, EngineModel, EventBatch, Rank, Router, RouterConfig
from kvplug.errors import ConfigError, HashingError, NoWorkerError
from kvplug.kernels import costing

PROMPT = list(range(64))
prompts = st.lists(st.integers(0, 2), max_size=12)


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


def make_router(*workers, **settings):
    settings = {"block_size": 4, **settings}
    router = Router(RouterConfig(**settings), clock=Clock(), random_=random.Random(0))
    for worker in workers:
        router.add_worker(worker)
    return router


def store(router, worker, tokens, block_size=4):
    names = tuple(range(1, len(tokens) // block_size + 1))
    event = BlockStored(block_hashes=names, token_ids=tuple(tokens), block_size=block_size)
    router.apply(Rank(worker), EventBatch(events=(event,)))


def seen(decision):
    """All but the id."""
    return (
        decision.rank, decision.overlap_blocks, decision.cached_tokens, decision.prompt_blocks,
        round(decision.cost, 6), round(decision.predicted_ttft_ms, 6),
    )  # fmt: skip


@pytest.mark.parametrize("cost", ["ms", "blocks"])
@given(batch=st.lists(prompts, max_size=8))
def test_many_at_once_are_routed_as_one_after_the_other(cost, batch):
    routers = [make_router("a", cost=cost), make_router("a", cost=cost)]
    for router in routers:
        store(router, "a", [0] * 12)
    together = routers[0].route_many(batch, max_tokens=7)
    singly = [routers[1].route(prompt, max_tokens=7) for prompt in batch]
    assert [seen(decision) for decision in together] == [seen(decision) for decision in singly]
    np.testing.assert_allclose(routers[0].load.ranks, routers[1].load.ranks)
    for decision in together:
        routers[0].finish(decision.request_id)
    assert len(routers[0].load) == len(routers[0].load.active) == 0


def test_many_are_spread_over_the_fleet_and_each_knows_of_those_before_it():
    router = make_router("a", "b", "c", "d")
    decisions = router.route_many([[number] * 64 for number in range(40)])
    picked = [decision.rank.worker for decision in decisions]
    assert {worker: picked.count(worker) for worker in "abcd"} == dict.fromkeys("abcd", 10)
    assert len({decision.request_id for decision in decisions}) == 40


def test_arrays_that_have_to_grow_meanwhile_lose_nothing():
    router = make_router("a", "b")
    batch = [np.arange(4000, dtype=np.uint32) + 5000 * number for number in range(30)]
    decisions = router.route_many(batch)
    active = router.load.ranks[:, costing.ACTIVE_BLOCKS]
    assert active.sum() == 30 * 1000
    again = router.route_many(batch)
    assert [decision.overlap_blocks for decision in again] == [1000] * 30
    for decision in (*decisions, *again):
        router.finish(decision.request_id)
    router.load.forecast.check()
    router.index.check()
    assert router.load.ranks[:, costing.ACTIVE_BLOCKS].tolist() == [0, 0]


def test_nothing_of_many_is_routed_if_one_cannot_be():
    router = make_router("a")
    with pytest.raises(HashingError):
        router.route_many([[1, 2], [-1]])
    with pytest.raises(NoWorkerError):
        router.route_many([[1, 2]], workers=["b"])
    assert len(router.load) == 0
    assert router.route_many([]) == []


def test_many_are_routed_over_several_indexes_too():
    router = make_router("fine", block_size=None)
    router.add_worker("coarse")
    store(router, "fine", PROMPT[:32], 4), store(router, "coarse", [7] * 64, 16)
    decisions = router.route_many([PROMPT, [7] * 64])
    assert [decision.rank.worker for decision in decisions] == ["fine", "coarse"]


@given(prompts, prompts)
def test_hashes_do_as_well_as_tokens(held, tokens):
    by_tokens, by_hashes = make_router("a", "b"), make_router("a", "b")
    for router in (by_tokens, by_hashes):
        if len(held) >= 4:
            store(router, "b", held)
    array = np.array(tokens, dtype=np.uint32)
    hashes = by_hashes.index.hasher.sequence_hashes(array)
    decision = by_hashes.route_hashed(hashes, len(tokens))
    assert seen(decision) == seen(by_tokens.route(tokens))


@pytest.mark.parametrize("use_kv_events", [True, False])
def test_the_less_busy_rank_gets_a_new_prompt_though_no_capacity_is_known(use_kv_events):
    router = make_router("a", "b", use_kv_events=use_kv_events)
    for worker in "ab":
        router.set_engine_model(Rank(worker), EngineModel())
    prompts = iter(np.arange(6400).reshape(-1, 64))

    def decode(worker):
        decision = router.route(next(prompts), workers=[worker])
        router.first_token(decision.request_id)
        return decision.request_id

    answered = decode("a")
    router._clock.now_s += 0.3
    router.finish(answered, 50)
    for _ in range(10):
        decode("a")
    decode("b")
    assert router.route(next(prompts)).rank == Rank("b")


def test_hashes_are_rejected_where_block_sizes_differ():
    router = make_router("a", block_size=None)
    router.add_worker("b", block_size=16)
    store(router, "a", PROMPT, 4)
    with pytest.raises(ConfigError, match="cannot look up hashes: expected a fleet with one"):
        router.route_hashed([1, 2], 8)


@pytest.mark.parametrize("num_tokens", [-1, 1.5, "8", 10_000_001, 2**63, 10**400])
def test_hashes_of_no_number_of_tokens_are_rejected(num_tokens):
    with pytest.raises(ConfigError, match="expected num_tokens to be a whole number of tokens"):
        make_router("a").route_hashed([1, 2], num_tokens)


def test_more_hashes_than_full_blocks_are_rejected():
    router = make_router("a", block_size=None)
    with pytest.raises(ConfigError, match="at most 1, the full blocks of a token or more in 1 tok"):
        router.route_hashed([1, 2], 1)
    router.route_hashed([1, 2], 8)  # nobody knows yet that blocks have 4 tokens
    store(router, "a", PROMPT, 4)
    router.route_hashed([1, 2], 8)
    with pytest.raises(
        ConfigError, match="2 hashes: expected at most 1, the full blocks of 4 tokens in 7"
    ):
        router.route_hashed([1, 2], 7)
    assert len(router.load) == 2


@pytest.mark.parametrize(("slo", "worker"), [(None, "a"), (30.0, "a"), (15.0, "b")])
def test_a_rank_that_would_miss_the_objective_comes_last(slo, worker):
    router = make_router("a", "b", ttft_slo_ms=slo, speculative_ttl_s=0.0)
    store(router, "a", range(100, 140))
    store(router, "b", range(200, 600))
    router.set_cache_capacity(Rank("b"), 100)  # it is full: to go there evicts
    router.route([9] * 100, workers=["a"])  # 20 ms of prefill
    assert router.route(range(100, 140)).rank.worker == worker


@pytest.mark.parametrize("block_size", [4, None])  # without one, workers have indexes of their own
def test_no_temperature_sends_requests_where_the_objective_is_missed(block_size):
    router = make_router(temperature=1.0, ttft_slo_ms=15.0, block_size=block_size)
    for worker, size in (("a", 4), ("b", 4), ("c", block_size or 8)):
        router.add_worker(worker, block_size=size)
    router.route([9] * 100, workers=["a"])  # 20 ms of prefill
    decisions = [router.route([1, 2, 3, 4]) for _ in range(50)]
    assert {decision.rank.worker for decision in decisions} == {"b", "c"}


def test_all_ranks_that_miss_the_objective_are_as_good_as_without_it():
    router = make_router("a", "b", ttft_slo_ms=0.001)
    store(router, "a", PROMPT)
    assert router.route(PROMPT).rank == Rank("a")
