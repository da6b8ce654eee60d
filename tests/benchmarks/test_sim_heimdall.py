"""The calibration of `make sim-heimdall`, and what its tables are made of."""

import numpy as np
import pytest

from tests.benchmarks import heimdall_fit
from tests.benchmarks.heimdall_fit import GREATEST_RATE, LEAST_RATE, RANDOM_S, error_of, solve
from tests.benchmarks.heimdall_report import (
    Interval,
    differences,
    differences_table,
    policies_table,
    ratio,
    ratios,
    saturated,
    save_plot,
    stages_by_load,
)
from tests.benchmarks.heimdall_run import RATES, Job, Result, Setting, make_workload, run
from tests.benchmarks.sim_heimdall import range_line

SMALL = Setting(cache_tokens=600_000, requests_per_stage=20)


def result(ttft_s, answered=1.0):
    """One request a stage, and one of the warm-up."""
    stage = np.arange(len(RATES) + 1)
    times = np.full(len(stage), ttft_s)
    return Result(times, times + 10, stage, 0.5, np.full(len(stage), answered))


class TestCalibration:
    @pytest.mark.parametrize("true_rate", [6_000.0, 21_000.0, 80_000.0])
    def test_the_rate_behind_the_published_row_is_found(self, true_rate):
        rate, percentiles_s, steps = solve(lambda r: RANDOM_S * (true_rate / r) ** 1.7, 8)
        assert rate == pytest.approx(true_rate, rel=0.03)
        assert error_of(percentiles_s) < 0.03
        assert steps <= 8

    def test_another_shape_is_met_in_the_middle(self):
        rate, percentiles_s, _ = solve(lambda r: RANDOM_S * [1.2, 1, 1 / 1.2] * 2e4 / r, 8)
        assert rate == pytest.approx(2e4, rel=0.03)
        assert error_of(percentiles_s) == pytest.approx(0.16, abs=0.02)

    def test_what_no_rate_explains_ends_at_the_nearest_one(self):
        rate, percentiles_s, steps = solve(lambda r: RANDOM_S * 1e9 / r, 6)
        assert LEAST_RATE < rate < GREATEST_RATE
        assert rate > 0.9 * GREATEST_RATE
        assert error_of(percentiles_s) > 100
        assert steps == 6

    @pytest.mark.slow
    def test_rates_come_from_replays_under_random_routing_alone(self, monkeypatch):
        jobs = []

        def recorded(job):
            jobs.append(job)
            return run(job)

        monkeypatch.setattr(heimdall_fit, "run", recorded)
        fit = heimdall_fit.fit(SMALL, num_steps=2)
        assert {job.policy for job in jobs} == {"random"}
        assert fit.setting.prefill_tokens_per_s in {j.setting.prefill_tokens_per_s for j in jobs}


class TestWorkload:
    def test_every_prompt_comes_once_in_the_warm_up(self):
        requests = make_workload(SMALL, 1, 320).requests
        assert len(requests) == 1150 + 20 * len(RATES)
        warm = [request.blocks.tobytes() for request in requests[:1150]]
        assert len(set(warm)) == 1150
        assert len({blocks[: 8 * 25] for blocks in warm}) == 230

    @pytest.mark.parametrize("block_size", [32, 320])
    def test_the_blocks_hold_prompt_and_answer(self, block_size):
        request = make_workload(SMALL, 1, block_size).requests[0]
        assert len(request.blocks) == 9000 // block_size
        assert len(request.blocks) + len(request.answer_blocks) == 10_000 // block_size

    def test_a_stage_begins_when_the_one_before_is_over_or_at_once(self):
        at_once = Setting(cache_tokens=600_000, requests_per_stage=20, pauses=False)
        with_pauses, without = (make_workload(s, 1, 320).requests for s in (SMALL, at_once))
        assert with_pauses[1150].arrival_s - with_pauses[1149].arrival_s > 3600
        assert without[1150].arrival_s - without[1149].arrival_s < 60

    @pytest.mark.slow
    def test_a_slow_fleet_does_not_answer_in_time(self):
        slow, fast = (
            run(Job(setting=SMALL.with_rate(rate), policy="least_loaded", seed=1))
            for rate in (8_000.0, 200_000.0)
        )
        assert slow.answered[-1] < fast.answered[-1]
        assert (slow.percentiles_s() > fast.percentiles_s()).all()


class TestReport:
    def test_ratios_are_of_pairs(self):
        found = ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
        assert (found.mean, found.low, found.high) == pytest.approx((2, 2, 2))
        results = {"random": [result(4.0), result(5.0)], "kv": [result(0.2), result(0.25)]}
        assert ratios(results, "kv")[0].mean == pytest.approx(20)

    def test_loads_part_where_random_routing_falls_behind(self):
        some = result(1.0)
        some.answered[6:] = 0.5
        results = {"random": [some, some]}
        assert saturated(results["random"]).tolist() == [False] * 6 + [True] * 6
        assert stages_by_load(results)["unsaturated"].tolist() == [1, 2, 3, 4, 5]
        assert stages_by_load(results)["saturated"].tolist() == [6, 7, 8, 9, 10, 11]

    def test_worse_is_what_is_worse_in_every_pair(self):
        loads = [1.0, 1.2, 0.8]
        results = {
            "least_loaded": [result(t) for t in loads],
            "kv": [result(t + d) for t, d in zip(loads, (0.1, 0.11, 0.09), strict=True)],
            "kv:blocks=1": [result(t + d) for t, d in zip(loads, (0.1, -0.2, 0.15), strict=True)],
        }
        assert all(each.is_worse for each in differences(results, ["kv"]))
        found = differences(results, ["kv:blocks=1"])
        assert not any(each.is_worse for each in found)
        assert differences_table(found).row_count == len(RATES) + 1

    def test_the_range_of_predictions_is_told(self):
        predicted = {0: [Interval(20.0, 19, 21)], 8: [Interval(87.4, 80, 95)]}
        assert "20.0 to 87.4 times sooner at P50 (published: 20.5)" in range_line(predicted)

    @pytest.mark.slow
    def test_it_is_drawn_and_tabled(self, tmp_path):
        results = {name: [result(1.0), result(1.1)] for name in ("random", "kv")}
        save_plot(results, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").stat().st_size > 1000
        assert policies_table(results).row_count == 4
