"""What `make bench-router` is made of; none of it needs the peer."""

import pytest

from tests.benchmarks.router import Metric, Row, all_metrics, content_of
from tests.benchmarks.router_kvplug import Fleet
from tests.benchmarks.router_publisher import payloads
from tests.benchmarks.router_workload import NUM_PROMPTS, cache_blocks, held_blocks

TARGET = {"p50": 10, "p99_in_p50s": 4, "ratio": 10}


def row(kvplug, peer, target=TARGET):
    """Of rounds in us."""
    mine, theirs = ([[us * 1e3 for us in each] for each in side] for side in (kvplug, peer))
    return Row(Metric("full_512_w8", 8, {}, target), mine, mine, theirs)


@pytest.fixture(scope="module")
def fleet():
    fleet = Fleet()
    fleet.num_blocks = fleet.measure({"what": "build", "ranks": 4, "cores": 1, "blocks": 4000})
    return fleet


class TestTargets:
    def test_all_of_them_have_to_be_reached(self):
        calm = [[10.0] * 100, [10.0] * 100]
        assert row(calm, [[100.0], [100.0]]).is_met
        assert not row(calm, [[99.0], [99.0]]).is_met
        assert not row([[10.1] * 100] * 2, [[200.0]] * 2).is_met
        assert not row([[10.0] * 90 + [41.0] * 10] * 2, [[200.0]] * 2).is_met

    def test_one_noisy_round_does_not_make_the_p99(self):
        rounds = [[5.0] * 100, [5.0] * 90 + [90.0] * 10, [5.0] * 100]
        assert row(rounds, [[100.0]] * 3).as_json()["p99"] == 5.0

    def test_what_has_none_is_listed_apart(self):
        plain = row([[5.0]], [[20.0]], target={})
        content = content_of([row([[5.0]], [[60.0]]), plain])
        assert content["full_512_w8"]["met"] is True
        assert content["also"]["full_512_w8"]["ratio"] == 4.0
        assert "met" not in content["also"]["full_512_w8"]

    def test_the_metrics_have_names_of_their_own(self):
        names = [metric.name for metric in all_metrics()]
        assert len(set(names)) == len(names)
        assert {"full_32768_w512", "cold_32768_w64", "many64_4096_w64"} <= set(names)


class TestSides:
    @pytest.mark.parametrize("is_kernel", [False, True])
    @pytest.mark.parametrize(
        "case",
        [
            {"what": "full", "tokens": 512},
            {"what": "full", "tokens": 512, "lists": True},
            {"what": "features", "tokens": 512},
            {"what": "cold", "tokens": 32768},
            {"what": "many", "tokens": 4096, "requests": 8},
        ],
    )
    def test_kvplug_times_every_call_and_leaves_nothing_in_flight(self, fleet, case, is_kernel):
        times = fleet.measure({**case, "calls": 3, "kernel": is_kernel})
        assert len(times) == 3
        assert min(times) > 0
        assert len(fleet.router.load) == 0

    def test_both_hold_the_same_blocks(self, fleet):
        warm = sum(count * tokens // 16 for tokens, count in NUM_PROMPTS.items())
        assert fleet.num_blocks == 4000 + warm

    def test_the_last_rank_publishes_whole_prompts_and_all_a_marker(self):
        sizes = [blocks for blocks, _ in payloads(7, 8)]
        assert sum(sizes) == cache_blocks(8)
        assert sizes[-1] == 1
        assert held_blocks(512, 7, 8) == 32
        assert held_blocks(512, 0, 8) == 4
