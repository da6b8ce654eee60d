import random
from collections import Counter

import numpy as np
import pytest

from kvplug.kernels.scoring import LAST_RESORT
from kvplug.router.policies import RoundRobin, pick_cheapest, pick_softmax

CANDIDATES = np.array([2, 5, 7])


def test_the_lowest_cost_is_taken_and_ties_are_broken_at_random():
    rng = random.Random(1)
    assert pick_cheapest(CANDIDATES, np.array([3.0, 1.0, 2.0]), rng) == 5
    picks = Counter(pick_cheapest(CANDIDATES, np.array([1.0, 4.0, 1.0]), rng) for _ in range(1000))
    assert set(picks) == {2, 7}
    assert min(picks.values()) > 400


def test_softmax_prefers_the_cheaper_by_the_formula():
    rng, costs = random.Random(1), np.array([10.0, 20.0, 30.0])
    picks = Counter(pick_softmax(CANDIDATES, costs, 1.0, rng) for _ in range(20_000))
    # Costs are rescaled to 0, 0.5, 1: at temperature 1 the best is e times likelier than the worst.
    assert picks[2] / picks[7] == pytest.approx(np.e, rel=0.1)


def test_softmax_copes_with_equal_costs_and_tiny_temperatures():
    rng = random.Random(1)
    equal = Counter(pick_softmax(CANDIDATES, np.full(3, 7.0), 0.5, rng) for _ in range(3000))
    assert min(equal.values()) > 800
    for temperature in (1e-9, 1e-300):
        assert pick_softmax(CANDIDATES, np.array([1.0, 1.25, 1.5]), temperature, rng) == 2


def test_softmax_never_picks_who_misses_an_objective_while_another_does_not():
    costs = np.array([LAST_RESORT + 1.0, 10.0, 20.0])
    rng = random.Random(1)
    picks = Counter(pick_softmax(CANDIDATES, costs, 1.0, rng) for _ in range(3000))
    assert set(picks) == {5, 7}
    assert picks[5] / picks[7] == pytest.approx(np.e, rel=0.2)


def test_round_robin_takes_turns_and_survives_changes():
    turns = RoundRobin()
    assert [turns.pick(CANDIDATES) for _ in range(4)] == [2, 5, 7, 2]
    assert turns.pick(np.array([7])) == 7
    assert turns.pick(CANDIDATES) == 2
