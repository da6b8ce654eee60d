"""Faults between a simulated engine and a router: the index ends equal to the engine's cache.

The faults that differ most; `python -m tests.chaos --engine sim` has them all.
"""

import pytest

from tests.chaos.engines import SimEngine
from tests.chaos.report import defects, row
from tests.chaos.rig import Rig
from tests.chaos.scenarios import scenarios

pytestmark = pytest.mark.slow

NUM_MESSAGES = 60
FAULTS = (
    "all of these",
    "silence after a loss",
    "connection cut",
    "router killed",
    "killed and passed, a broker between",
    "gap, no replay endpoint",
    "gap beyond the buffer, cache emptied",
)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Started when first asked for, one for each size of the replay buffer and wire."""
    started = {}

    def engine(buffer_steps, wire):
        if (buffer_steps, wire) not in started:
            folder = tmp_path_factory.mktemp("engine")
            made = started[buffer_steps, wire] = SimEngine(
                folder, buffer_steps=buffer_steps, wire=wire
            )
            made.start()
            made.wait_ready()
        return started[buffer_steps, wire]

    yield engine
    for each in started.values():
        each.process.stop()


@pytest.mark.parametrize("wire", ["vllm", "kvplug"])
@pytest.mark.parametrize("scenario", scenarios(FAULTS), ids=lambda scenario: scenario.name)
def test_the_index_ends_equal_to_the_cache(engines, scenario, wire, tmp_path):
    engine = engines(scenario.buffer_steps, wire)
    with Rig(engine, tmp_path, seed=1, **scenario.rig) as rig:
        outcome = scenario.run(rig, NUM_MESSAGES)
    assert not defects(outcome, scenario.expects_on(wire)), row(engine.name, scenario.name, outcome)
