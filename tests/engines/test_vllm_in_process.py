"""Real vLLM against the index: the same blocks, the same cached tokens."""

import json
import os
from pathlib import Path

import pytest

from examples.launch.engine_env import ensure_tiny_model, ensure_vllm
from examples.launch.ports import free_ports
from tests.engines.engine_pool import Recipe, uses
from tests.engines.program import Program

ROOT = Path(__file__).parents[2]


class WorkloadInVllm(Program):
    """One run of the workload, in vLLM's interpreter, with that environment's numba."""

    def __init__(self, publisher, folder):
        python, self._result = ensure_vllm(), folder / "result.json"
        [port] = free_ports(1)
        arguments = (ensure_tiny_model(python), port, publisher, self._result)
        super().__init__(
            publisher,
            (python, "-m", "tests.engines.vllm_in_process", *arguments),
            folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(folder / "numba")},
        )

    def result(self):
        return json.loads(self._result.read_text())


STOCK = Recipe("zmq", lambda folder: WorkloadInVllm("zmq", folder))
RECORDED = Recipe("kvplug", lambda folder: WorkloadInVllm("kvplug", folder))
PUBLISHERS = [pytest.param(each, id=each.name, marks=uses(each)) for each in (STOCK, RECORDED)]


@pytest.fixture(scope="module", params=PUBLISHERS)
def result(request, engine_pool):
    return engine_pool.get(request.param).result()


def test_the_index_has_what_the_engine_has(result):
    assert result["num_in_engine"] > 20
    assert result["num_missing_in_index"] == 0
    assert result["num_extra_in_index"] == 0
    assert result["incomplete"] is None
    # On a busy machine the follower asks for messages that are on their way, and has them twice.
    assert result["skipped"].keys() <= {"duplicate"}


def test_the_workload_had_evictions_duplicates_and_resets(result):
    assert result["num_removed"] > 100
    assert result["most_copies"] > 1
    assert result["num_events"]["AllBlocksCleared"] == 2


def test_predicted_cached_tokens_are_what_the_engine_reports(result):
    assert all(expected == reported for expected, reported in result["predictions"])
    assert len({reported for _, reported in result["predictions"]}) > 3


def test_it_ran_with_the_numba_that_vllm_pins(result):
    assert (result["vllm"], result["numba"]) == ("0.32.0", "0.65.0")


@uses(STOCK, RECORDED)
def test_recorded_it_does_what_it_does_without(engines):
    stock, recorded = (each.result() for each in engines)
    assert (stock["is_recorded"], recorded["is_recorded"]) == (False, True)
    for name in ("outputs", "predictions", "num_events", "num_in_engine"):
        assert recorded[name] == stock[name]
