"""Faults of a cluster whose engine is real vLLM: the short form of `make chaos-cluster`."""

import pytest

from tests.chaos_cluster.engines import VllmEngine
from tests.chaos_cluster.report import defects, row
from tests.chaos_cluster.rig import Rig
from tests.chaos_cluster.scenarios import scenarios

FAULTS = ("server killed", "engine killed")


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    with Rig(VllmEngine, tmp_path_factory.mktemp("rig"), num_engines=1) as rig:
        yield rig


@pytest.mark.parametrize("scenario", scenarios(FAULTS), ids=lambda scenario: scenario.name)
def test_every_replica_ends_equal_to_vllm(rig, scenario):
    outcome = scenario.run(rig)
    assert not defects(outcome), row("vLLM", scenario.name, outcome)
