"""What the default must not do: thrash, herd, starve, fall into one of two states, need a number
that nobody gave it. Small fleets in virtual time; `make sim-sweep` and `make sim-outcome` have
larger ones.
"""

from functools import lru_cache
from statistics import fmean

import numpy as np
import pytest

from kvplug.sim.engine_config import TimeModel
from kvplug.sim.replay.engine import EngineSpec
from kvplug.sim.replay.fleet import Arrivals, replay
from kvplug.sim.replay.policies import Kv, make_policy
from kvplug.sim.replay.study import Cell, run_cell
from kvplug.sim.replay.workload import Documents, Unshared

pytestmark = pytest.mark.slow

DOCUMENT, BLOCKS = 1600, 100
FOUR_DOCUMENTS = EngineSpec(num_blocks=5 * BLOCKS)  # with their questions and answers


def documents(count, num_requests, **more):
    return Documents(
        num_documents=count, num_requests=num_requests, document=DOCUMENT, own=(16, 64),
        **{"answer": 8} | more,
    )  # fmt: skip


@lru_cache
def run(recipe, specs, arrivals, policy="kv", seed=3):
    return replay(recipe.make(seed), specs, make_policy(policy, specs, seed), arrivals, seed=seed)


@lru_cache
def ttft_ms(recipe, specs, arrivals, policy="kv"):
    """The mean behind the first quarter, over two seeds."""
    cells = (
        Cell(
            workload=recipe, specs=specs, policy=policy, arrivals=arrivals, seed=seed, warm=0.25
        )
        for seed in (3, 4)
    )  # fmt: skip
    return fmean(run_cell(cell).ttft_mean_ms for cell in cells)


def share_of(outcome, engine, first=0):
    return float(np.mean(outcome.engine[first:] == engine))


def copies(outcome, first=0):
    """How often a document was computed, from request `first` on."""
    computed = outcome.prompt_tokens[first:] - outcome.hit_tokens[first:]
    return int(np.sum(computed > DOCUMENT))


@pytest.mark.parametrize("clients", [3, 9])
def test_documents_that_fit_if_each_has_its_place_are_not_moved_for_ever(clients):
    specs = (FOUR_DOCUMENTS,) * 3
    outcome = run(documents(11, 400), specs, Arrivals(clients=clients))
    assert copies(outcome, 200) <= 10
    assert copies(run(documents(11, 400), specs, Arrivals(clients=3), "random")) > 99


def test_a_hot_prefix_gets_as_many_places_as_its_load_needs():
    specs = (FOUR_DOCUMENTS,) * 4
    rare = run(documents(1, 150), specs, Arrivals(rate=2.0))
    assert copies(rare, 10) <= 1
    often = run(documents(1, 600, answer=64), specs, Arrivals(rate=150.0))
    assert copies(often) <= 8
    assert all(0.15 < share_of(often, engine, 200) < 0.35 for engine in range(4))


class BackLater(Kv):
    """Engine 0 is away for the first requests, and comes back empty."""

    def choose(self, number, request, now):
        workers = None if number >= 150 else [rank.worker for rank in self._ranks[1:]]
        self._now = now
        decision = self.router.route_hashed(request.blocks, request.num_tokens, workers=workers)
        self._ids[number] = decision.request_id
        return self._engine_of[decision.rank]


@pytest.mark.parametrize(
    "recipe", [documents(8, 400), Unshared(num_requests=400, prompt=1000, answer=8)]
)
def test_an_engine_that_comes_back_empty_gets_its_share(recipe):
    specs = [FOUR_DOCUMENTS] * 3
    kv = make_policy("kv", specs, 1)
    policy = BackLater(specs, 1, kv.router.config)
    outcome = replay(recipe.make(1), specs, policy, Arrivals(clients=9), seed=1)
    assert share_of(outcome, 0, 250) > 0.15
    always = replay(recipe.make(1), specs, kv, Arrivals(clients=9), seed=1)
    assert fmean(outcome.ttft_s[250:]) < 1.5 * fmean(always.ttft_s[250:])


def test_the_faster_of_unequal_engines_gets_more_to_do():
    specs = tuple(
        EngineSpec(num_blocks=500, time_model=TimeModel(prefill_tokens_per_s=20_000 * speed))
        for speed in (4.0, 1.0, 1.0)
    )
    recipe, arrivals = Unshared(num_requests=200, prompt=1500, answer=8), Arrivals(rate=50.0)
    outcome = run(recipe, specs, arrivals)
    assert share_of(outcome, 0, 100) > 0.5
    assert ttft_ms(recipe, specs, arrivals) < ttft_ms(recipe, specs, arrivals, "least_loaded")


@pytest.mark.parametrize("option", ["events=off", "capacity=0", "capacity=0.5", "capacity=2"])
def test_what_nobody_tells_or_tells_wrong_costs_little(option):
    recipe, specs, arrivals = documents(11, 300), (FOUR_DOCUMENTS,) * 3, Arrivals(clients=6)
    as_told, otherwise = (
        ttft_ms(recipe, specs, arrivals, policy) for policy in ("kv", f"kv:{option}")
    )
    assert otherwise < 1.3 * as_told
    assert otherwise < 0.7 * ttft_ms(recipe, specs, arrivals, "least_loaded")


def test_more_than_the_fleet_can_take_is_no_worse_than_by_load_alone():
    specs = (FOUR_DOCUMENTS,) * 2
    recipe, arrivals = documents(30, 200), Arrivals(rate=60.0)
    kv, least = (ttft_ms(recipe, specs, arrivals, policy) for policy in ("kv", "least_loaded"))
    assert kv < 1.05 * least


def test_equal_requests_have_equal_times_however_ties_fall():
    cells = [
        Cell(
            workload=documents(11, 120), specs=(FOUR_DOCUMENTS,) * 3, policy="kv", seed=2,
            arrivals=Arrivals(rate=40.0), warm=0.25, policy_seed=policy_seed,
        )
        for policy_seed in range(10)
    ]  # fmt: skip
    means = [run_cell(cell).ttft_mean_ms for cell in cells]
    assert max(means) < 1.5 * min(means)
