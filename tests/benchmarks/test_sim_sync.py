"""Small forms of the rows of `make sim-sync`."""

from dataclasses import replace

import pytest

from kvplug.sim.replay.policies import make_policy
from kvplug.sim.replay.report import means_of
from tests.benchmarks.sim_sync import LATE, SCENARIOS, SPEC, WORTH, run_scenario, table_of


@pytest.mark.parametrize("policy", [policy for _, policy in (*WORTH, *LATE)])
def test_every_row_is_a_policy(policy):
    make_policy(policy, [SPEC], 1)


@pytest.mark.slow
def test_sync_is_worth_most_of_what_several_routers_lose():
    rows = (WORTH[0], WORTH[3], WORTH[4], LATE[3])
    documents = replace(SCENARIOS[0], rows=rows)
    results = run_scenario(documents, 1, 600, num_processes=1)
    ttft = {name: means_of(each)["ttft_mean_ms"] for name, each in results.items()}
    lost = ttft["4, no sync"] - ttft["one router"]
    assert ttft["4, 1 ms late"] - ttft["one router"] < 0.3 * lost
    assert ttft["4, 1 ms, 10 % lost"] < ttft["4, no sync"]
    assert table_of(results).count("\n") == len(rows) + 1
