"""Many replays: the same numbers in any process, and what a summary says of them."""

import dataclasses
import math

import numpy as np
import pytest

from kvplug.errors import ConfigError
from kvplug.sim.replay.engine import EngineSpec
from kvplug.sim.replay.fleet import Arrivals, replay
from kvplug.sim.replay.policies import make_policy
from kvplug.sim.replay.study import Cell, paired_interval, run_cell, run_cells
from kvplug.sim.replay.workload import Documents, Unshared

RECIPE = Documents(num_requests=80, num_documents=5, document=600, own=(10, 60), answer=(1, 9))
SPECS = (EngineSpec(num_blocks=120),) * 2
CELL = Cell(
    workload=RECIPE, specs=SPECS, policy="kv", arrivals=Arrivals(clients=4), seed=1, warm=0.25
)


@pytest.mark.slow
def test_cells_come_back_in_order_and_equal_from_any_process(monkeypatch):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # of the processes: they start sooner
    cells = [
        dataclasses.replace(CELL, policy=policy, seed=seed)
        for seed in range(2)
        for policy in ("kv", "random")
    ]
    here = run_cells(cells, num_processes=1)
    assert run_cells(cells, num_processes=2) == here == [run_cell(cell) for cell in cells]
    assert len(set(here)) == 4


def test_a_summary_is_of_the_requests_that_count():
    summary = run_cell(CELL)
    outcome = replay(RECIPE.make(1), SPECS, make_policy("kv", SPECS, 1), CELL.arrivals, seed=1)
    ttft_ms = outcome.ttft_s[20:] * 1e3
    assert summary.num_requests == 60
    assert summary.ttft_mean_ms == pytest.approx(ttft_ms.mean())
    assert summary.ttft_p50_ms == pytest.approx(np.median(ttft_ms))
    assert summary.ttft_p50_ms < summary.ttft_p90_ms < summary.ttft_p99_ms <= ttft_ms.max()
    assert summary.total_mean_ms == pytest.approx(outcome.total_s[20:].mean() * 1e3)
    ends_s = outcome.arrived_s + outcome.total_s
    assert summary.span_s == pytest.approx(ends_s[20:].max() - outcome.arrived_s[20])
    assert summary.requests_per_s == pytest.approx(60 / summary.span_s)
    assert summary.hit_share == pytest.approx(
        outcome.hit_tokens[20:].sum() / outcome.prompt_tokens[20:].sum()
    )
    assert summary.hits_of_ideal == pytest.approx(summary.hit_share / summary.ideal_share)


def test_with_one_endless_cache_all_that_can_be_found_is():
    cell = dataclasses.replace(CELL, specs=(EngineSpec(num_blocks=9_999),), warm=0.0)
    summary = run_cell(dataclasses.replace(cell, arrivals=Arrivals(clients=1)))
    assert summary.hit_share == summary.ideal_share > 0.5
    assert summary.imbalance == 1.0


def test_imbalance_is_the_busiest_engine_over_the_mean():
    workload = Unshared(num_requests=9, prompt=1000, answer=1)
    cell = dataclasses.replace(CELL, workload=workload, policy="round_robin", warm=0.0)
    # Of nine prompts five go to the first of two engines: 5 / 4.5.
    assert run_cell(cell).imbalance == pytest.approx(5 / 4.5)


def test_what_cannot_run_is_rejected_and_not_waited_for():
    small = dataclasses.replace(CELL, specs=(EngineSpec(num_blocks=30), *SPECS))
    with pytest.raises(ConfigError, match=r"needs 4[12] blocks.*smallest cache has 30"):
        run_cell(small)
    other = dataclasses.replace(CELL, specs=(EngineSpec(num_blocks=999, block_size=32),))
    with pytest.raises(ConfigError, match=r"blocks of 16 tokens.*blocks of 32"):
        run_cell(other)


def test_a_paired_interval_is_students():
    # Differences 1, 2, 3, 4: mean 2.5, deviation 1.29, and t for three degrees is 3.182.
    mean, half_width = paired_interval([2, 4, 6, 8], [1, 2, 3, 4])
    assert mean == 2.5
    assert half_width == pytest.approx(3.1824 * math.sqrt(5 / 3) / 2, rel=1e-4)


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.706), (9, 2.2622), (100, 1.9840)])
def test_quantiles_are_those_of_the_tables(degrees, quantile):
    values = np.tile([0.0, 1.0], degrees)[: degrees + 1]
    _, half_width = paired_interval(values, np.zeros(degrees + 1))
    assert half_width == pytest.approx(
        quantile * values.std(ddof=1) / math.sqrt(degrees + 1), rel=1e-4
    )


def test_intervals_hold_the_truth_in_19_of_20_cases():
    random = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        mean, half_width = paired_interval(random.normal(1.0, 2.0, 5), random.normal(0.0, 1.0, 5))
        held += abs(mean - 1.0) <= half_width
    assert held / 400 == pytest.approx(0.95, abs=0.03)


def test_one_pair_says_nothing_about_chance():
    assert paired_interval([3.0], [1.0]) == (2.0, math.inf)


def test_a_bar_says_how_many_there_are(capsys):
    run_cells([CELL, CELL], 1, show_progress=True)
    assert "0/2" in capsys.readouterr().err  # it is not drawn again within a tenth of a second
