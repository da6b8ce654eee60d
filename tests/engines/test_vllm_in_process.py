"""Real vLLM against the index: the same blocks, the same cached tokens."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from examples.launch.ports import free_ports

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=["zmq", "kvplug"])
def result(request, vllm_python, tiny_model, tmp_path_factory):
    """Run the workload once, in vLLM's interpreter, with that environment's numba."""
    cache = tmp_path_factory.mktemp("numba-cache")
    run = subprocess.run(
        [
            *(vllm_python, "-m", "tests.engines.vllm_in_process"),
            *(tiny_model, str(free_ports(1)[0]), request.param),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_the_index_has_what_the_engine_has(result):
    assert result["num_in_engine"] > 20
    assert result["num_missing_in_index"] == 0
    assert result["num_extra_in_index"] == 0
    assert result["incomplete"] is None
    assert result["skipped"] == {}


def test_the_workload_had_evictions_duplicates_and_resets(result):
    assert result["num_removed"] > 100
    assert result["most_copies"] > 1
    assert result["num_events"]["AllBlocksCleared"] == 2


def test_predicted_cached_tokens_are_what_the_engine_reports(result):
    assert all(expected == reported for expected, reported in result["predictions"])
    assert len({reported for _, reported in result["predictions"]}) > 3


def test_it_ran_with_the_numba_that_vllm_pins(result):
    assert (result["vllm"], result["numba"]) == ("0.32.0", "0.65.0")
