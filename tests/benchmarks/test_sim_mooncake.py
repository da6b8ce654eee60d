"""What the study of Mooncake's traces makes of its cells."""

import dataclasses
import json
from functools import partial

import pytest

from kvplug.sim.replay import study
from kvplug.sim.replay.fleet import Arrivals
from kvplug.sim.replay.study import Summary
from kvplug.sim.replay.traces import MOONCAKE_TOKENS, LogWindow
from tests.benchmarks import sim_mooncake
from tests.benchmarks.sim_mooncake import POLICIES, Setting, verdicts

SETTING = Setting("conversation", 400_000, 0.8)


def summaries(ttft_ms, requests_per_s=10.0):
    """Of three seeds."""
    rest = {field.name: 1.0 for field in dataclasses.fields(Summary)}
    return [
        Summary(**rest | {"ttft_mean_ms": ttft_ms + seed, "requests_per_s": requests_per_s + seed})
        for seed in range(3)
    ]


def test_where_kv_is_worse_than_another_policy_is_named():
    results = {SETTING: {policy: summaries(100.0) for policy in POLICIES}}
    results[SETTING]["random"] = summaries(90.0)  # better by ten in each seed
    results[SETTING]["round_robin"] = summaries(110.0, requests_per_s=12.0)
    lines = verdicts(results)
    assert "kv worse than least_loaded beyond the interval: 0 of 4 comparisons" in lines
    assert "kv worse than random beyond the interval: 1 of 4 comparisons" in lines
    assert f"    {SETTING} (ttft_mean_ms +10 ± 0)" in lines
    assert f"    {SETTING} (requests_per_s -2 ± 0)" in lines


@pytest.fixture
def window(tmp_path):
    lines = [
        {"timestamp": 100 * at, "input_length": 700, "output_length": 5, "hash_ids": [at % 4, 9]}
        for at in range(60)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return LogWindow(path=path, kind="mooncake", block_size=MOONCAKE_TOKENS, num_requests=50)


def test_loads_are_shares_of_the_best_policys_throughput(window):
    saturated = {"kv": summaries(1.0, 20.0), "random": summaries(1.0, 5.0)}
    requests = window.make(0).requests
    rate = len(requests) / requests[-1].arrival_s
    first, *_ = sim_mooncake._arrivals(window, saturated, 0.5)
    assert first == Arrivals(speed=pytest.approx(0.5 * 20.0 / rate))


def test_a_small_study_has_all_its_settings(window, monkeypatch):
    monkeypatch.setattr(sim_mooncake, "CACHE_TOKENS", (20_480,))
    monkeypatch.setattr(sim_mooncake, "POLICIES", ("least_loaded", "kv"))
    here = partial(study.run_cells, num_processes=1)
    monkeypatch.setattr(sim_mooncake, "run_cells", here)
    results = sim_mooncake.results_of("conversation", window, 2)
    assert [setting.load for setting in results] == ["50%", "80%", "95%", "saturated"]
    assert all(len(of["kv"]) == len(of["least_loaded"]) == 2 for of in results.values())
