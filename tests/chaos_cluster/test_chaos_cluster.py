"""Faults of a cluster of three replicas: each ends equal to the engines.

The faults that differ most; `python -m tests.chaos_cluster --engine sim` has them all.
"""

import pytest

from tests.chaos_cluster.engines import PublishingEngine
from tests.chaos_cluster.report import defects, row
from tests.chaos_cluster.rig import Rig
from tests.chaos_cluster.scenarios import scenarios

pytestmark = pytest.mark.slow

FAULTS = ("server killed", "replica partitioned", "all replicas killed", "stream purged")


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    with Rig(PublishingEngine, tmp_path_factory.mktemp("rig")) as rig:
        yield rig


@pytest.mark.parametrize("scenario", scenarios(FAULTS), ids=lambda scenario: scenario.name)
def test_every_replica_ends_equal_to_every_engine(rig, scenario):
    outcome = scenario.run(rig)
    assert not defects(outcome), row("sim", scenario.name, outcome)
