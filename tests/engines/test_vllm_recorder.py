"""What the recorder of vLLM's block pool says is what vLLM says, byte by byte; what is not known is
left to vLLM. `make test-releases` runs this with every release that the recorder knows.
"""

import json
import os
from pathlib import Path

import pytest

from examples.launch.engine_env import VLLM_VERSION, ensure_tiny_model, ensure_vllm
from examples.launch.ports import free_ports
from kvplug.engines.vllm_guard import KNOWN_VERSIONS
from tests.engines.engine_pool import Recipe, uses
from tests.engines.program import Program

ROOT = Path(__file__).parents[2]
RELEASES = os.environ.get("KVPLUG_TEST_VLLM", VLLM_VERSION).split()


class InVllm(Program):
    """A program that writes its result to a file, in vLLM's interpreter."""

    def __init__(self, release, module, folder, *arguments, needs_model=False, **environment):
        python, self._result = ensure_vllm(release), folder / "result.json"
        model = [ensure_tiny_model(python)] if needs_model else []
        super().__init__(
            module,
            (python, "-m", f"tests.engines.{module}", *model, *arguments, self._result),
            folder,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "NUMBA_CACHE_DIR": str(folder / "numba"),
                **environment,
            },
        )

    def result(self):
        return json.loads(self._result.read_text())


def params(make, values):
    recipes = {
        each: Recipe(" ".join(each), lambda folder, e=each: make(folder, *e)) for each in values
    }
    return [
        pytest.param(recipe, id="-".join(each), marks=uses(recipe))
        for each, recipe in recipes.items()
    ]


def pools(folder, release, int_hashes):
    variables = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": int_hashes}
    return InVllm(release, "vllm_recorded_pools", folder, **variables)


def doctored(folder, release):
    return InVllm(release, "vllm_doctored", folder)


def in_process(folder, release):
    arguments = (*map(str, free_ports(1)), "kvplug")
    return InVllm(release, "vllm_in_process", folder, *arguments, needs_model=True)


@pytest.fixture(scope="module")
def compared(request, engine_pool):
    return engine_pool.get(request.param).result()


HASHES = [(release, int_hashes) for release in RELEASES for int_hashes in ("1", "0")]
POOLS = params(pools, HASHES)


@pytest.mark.parametrize("compared", POOLS, indirect=True)
def test_each_batch_is_the_bytes_that_vllm_writes(compared):
    differences = {name: each["difference"] for name, each in compared["workloads"].items()}
    assert set(differences.values()) == {""}, differences
    assert compared["vllm"].partition("+")[0] in KNOWN_VERSIONS
    assert compared["guard"] == ""


@pytest.mark.parametrize("compared", POOLS, indirect=True)
def test_the_workloads_have_every_kind_of_event(compared):
    workloads = compared["workloads"]
    for name in ("random_operations", "random_operations hybrid", "random_operations two sizes"):
        assert min(workloads[name]["events"]) > 3
        assert workloads[name]["batches"] > 100


@pytest.mark.parametrize(
    "compared", params(doctored, [(release,) for release in RELEASES]), indirect=True
)
def test_what_the_recorder_does_not_know_is_left_to_vllm(compared):
    assert compared["as it is"] == [True, []]
    assert compared["off"] == [False, []]
    causes = {
        "unknown version": "got 0.99.0",
        "other events": "expected BlockStored.block_size 5, got 4",
        "raising": "RuntimeError: not as it was",
        "other pool": "got KVCacheManager and SharedPool",
    }
    for name, cause in causes.items():
        is_recorded, [line] = compared[name]
        assert not is_recorded
        assert line.endswith(cause)


@pytest.mark.parametrize(
    "compared",
    params(in_process, [(release,) for release in RELEASES if release != VLLM_VERSION]),
    indirect=True,
)
def test_the_index_has_what_an_engine_of_this_release_has(compared):
    assert compared["is_recorded"]
    assert compared["num_in_engine"] > 20
    assert compared["num_missing_in_index"] == compared["num_extra_in_index"] == 0
    assert compared["incomplete"] is None
    # On a busy machine the follower asks for messages that are on their way, and has them twice.
    assert compared["skipped"].keys() <= {"duplicate"}
    assert all(expected == reported for expected, reported in compared["predictions"])


def test_the_release_of_the_other_tests_is_known():
    assert VLLM_VERSION in KNOWN_VERSIONS
