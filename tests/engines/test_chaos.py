"""Faults between real engines and a router: the short form of `make chaos`."""

import pytest

from tests.chaos.engines import SglangEngine, VllmEngine
from tests.chaos.report import defects, row
from tests.chaos.rig import Rig
from tests.chaos.scenarios import scenarios
from tests.engines.engine_pool import Recipe, uses

NUM_MESSAGES = 60
FAULTS = ("all of these", "connection cut", "router killed", "engine killed")


def with_large_buffer(kind, wire):
    name = f"{kind.name}, {wire}"
    recipe = Recipe(name, lambda folder: kind(folder, buffer_steps=10_000, wire=wire))
    return pytest.param(recipe, id=name, marks=uses(recipe))


@pytest.fixture(
    scope="module",
    params=[
        with_large_buffer(kind, wire)
        for kind in (VllmEngine, SglangEngine)
        for wire in ("vllm", "kvplug")
    ],
)
def engine(request, engine_pool):
    return engine_pool.get(request.param)


@pytest.mark.parametrize("scenario", scenarios(FAULTS), ids=lambda scenario: scenario.name)
def test_the_index_ends_equal_to_what_the_engine_holds(engine, scenario, tmp_path):
    with Rig(engine, tmp_path, seed=1, **scenario.rig) as rig:
        outcome = scenario.run(rig, NUM_MESSAGES)
    expected = scenario.expects_on(engine.wire)
    assert not defects(outcome, expected), row(engine.name, scenario.name, outcome)
