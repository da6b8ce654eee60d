"""What the sweep makes of its cells."""

import pytest

from tests.benchmarks.sim_sweep import overall_ratio, times_kv


def cell(kv, weight, cache_aware):
    """Of two seeds each, whose mean counts."""
    ttft = {"kv": kv, "kv:blocks=1": weight, "cache_aware": cache_aware}
    policies = {policy: {"ttft_mean_ms": [mean - 1.0, mean + 1.0]} for policy, mean in ttft.items()}
    return {"ratio": kv / weight, "best": "kv:blocks=1", "policies": policies}


CELLS = {
    "a, set 1.0, loop 1": cell(10.0, 20.0, 40.0),
    "b, loop 1": cell(10.0, 5.0, 40.0),
    "b, 80%": cell(10.0, 40.0, 90.0),
}


def test_ratios_are_of_all_cells_and_of_each_load():
    overall = overall_ratio(CELLS)
    assert overall["geometric_mean"] == pytest.approx(0.25 ** (1 / 3))
    assert (overall["worst"], overall["num_cells"], overall["num_above_limit"]) == (2.0, 3, 1)
    assert overall["of_load"] == pytest.approx({"loop 1": 1.0, "80%": 0.25})


def test_other_policies_are_compared_with_kv():
    expected = {
        "kv:blocks=1": 4 ** (1 / 3),
        "best weight": 4 ** (1 / 3),
        "cache_aware": 144 ** (1 / 3),
    }
    assert times_kv(CELLS) == pytest.approx(expected)
