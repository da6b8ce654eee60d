"""The benchmark of the cluster in its shortest form: it measures, and its paper adds up."""

import pytest

from tests.benchmarks import cluster_latency, cluster_rate, cluster_restore, cluster_server
from tests.benchmarks.cluster_model import Costs, Fleet, at, of_direct, of_stream

COSTS = Costs(
    store={100: 100.0, 10_000: 20.0}, consumer={1000: 5.0}, replica={1000: 10.0},
    direct={1000: 20.0}, message_bytes=1000.0, beat_bytes=200.0,
)  # fmt: skip


@pytest.mark.slow
def test_latencies_are_measured():
    ways = ("zmq", "r1")
    rows = cluster_latency.measure((500,), num_rounds=1, round_s=0.2, ways=ways)
    assert rows.keys() == {f"{way}@500" for way in ways}
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in rows.values())


@pytest.mark.slow
def test_a_replica_takes_blocks_from_the_stream():
    rows = cluster_rate.measure(1, (cluster_rate.Shape(64, 16, 50),))
    assert rows["64 events of 16 blocks"]["M_blocks_per_cpu_s"] > 0.1


@pytest.mark.slow
def test_a_snapshot_is_made_and_restored():
    case = cluster_restore.Case(50_000, 2, shared=False)
    row = cluster_restore.measure(1, (case,))[str(case)]
    assert row["bytes_a_block"] > 16
    assert 0 < row["pause_s"] < row["made_s"]
    assert row["ready_s"] > 0


@pytest.mark.slow
def test_what_consumers_cost_the_server_is_measured():
    rows = cluster_server.measure((2000,), 1, 0.5, consumers=(0, 8), nodes=(1,))
    assert rows["r1@2000, 8 consumers"]["server_us"] > 0
    assert rows.keys() >= {"r1@2000"}


def test_costs_lie_between_those_that_were_measured():
    assert at(COSTS.store, 100) == 100.0
    assert at(COSTS.store, 1000) == pytest.approx(60.0)
    assert at(COSTS.store, 10**6) == 20.0


def test_a_fleet_asks_for_the_sum_of_its_messages():
    fleet = Fleet(num_ranks=500, num_replicas=4, messages_per_s=20.0, num_copies=3)
    demand = of_stream(fleet, COSTS)
    assert demand.messages_per_s == 10_250
    assert demand.in_mb_s == pytest.approx(10.0 + 0.05)
    assert demand.out_mb_s == pytest.approx(4 * demand.in_mb_s)
    assert demand.kept_gb == pytest.approx(108.0)
    assert demand.server_cores == pytest.approx(0.2 + 4 * 10_250 * 5e-6)
    assert demand.replica_cores == pytest.approx(0.1025)


def test_events_that_go_directly_cost_servers_only_snapshots():
    demand = of_direct(Fleet(num_ranks=500, num_replicas=4), COSTS, snapshot_bytes=1.8e9)
    assert (demand.messages_per_s, demand.server_cores) == (0.0, 0.0)
    assert demand.in_mb_s == pytest.approx(1.0)
    assert demand.replica_cores == pytest.approx(0.205)
