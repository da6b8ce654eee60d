"""Faults between a simulated engine and a router: the index ends equal to the engine's cache."""

import pytest

from tests.chaos.engines import SimEngine
from tests.chaos.report import defects, row
from tests.chaos.rig import Rig
from tests.chaos.scenarios import SCENARIOS

NUM_MESSAGES = 60


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_index_ends_equal_to_the_cache(scenario, tmp_path):
    engine = SimEngine(tmp_path, buffer_steps=scenario.buffer_steps)
    try:
        engine.start()
        with Rig(engine, tmp_path, seed=1, **scenario.rig) as rig:
            outcome = scenario.run(rig, NUM_MESSAGES)
    finally:
        engine.process.stop()
    assert not defects(outcome, scenario.expects), row("simulated", scenario.name, outcome)
