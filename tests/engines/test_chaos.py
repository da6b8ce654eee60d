"""Faults between real engines and a router: the short form of `make chaos`."""

import pytest

from tests.chaos.engines import SglangEngine, VllmEngine
from tests.chaos.report import defects, row
from tests.chaos.rig import Rig
from tests.chaos.scenarios import scenarios

NUM_MESSAGES = 60
FAULTS = ("all of these", "connection cut", "router killed", "engine killed")


@pytest.fixture(scope="module", params=[VllmEngine, SglangEngine], ids=lambda kind: kind.name)
def engine(request, tmp_path_factory):
    engine = request.param(tmp_path_factory.mktemp("chaos"), buffer_steps=10_000)
    try:
        engine.start()
        yield engine
    finally:
        engine.process.stop()


@pytest.mark.parametrize("scenario", scenarios(FAULTS), ids=lambda scenario: scenario.name)
def test_the_index_ends_equal_to_what_the_engine_holds(engine, scenario, tmp_path):
    with Rig(engine, tmp_path, seed=1, **scenario.rig) as rig:
        outcome = scenario.run(rig, NUM_MESSAGES)
    assert not defects(outcome, scenario.expects), row(engine.name, scenario.name, outcome)
