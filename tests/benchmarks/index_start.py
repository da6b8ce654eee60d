"""What is printed beside the ratios of `make bench-index`: start-up times, and the snapshot's.

In:  nothing.   Out: {name: {"best", "median", "target", "unit"} or {"skipped": why}}.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from tests.benchmarks.sides import ROOT

NUM_STARTS = 5
PUBLISHED_M_BLOCKS_S = 16.43
"""Dynamo's own figure for its index on an EPYC 7702P with 64 cores (CKF_CRTC_CROSSOVER.md)."""

IMPORT = """
import time
began = time.perf_counter()
import kvplug
print(time.perf_counter() - began)
"""

# The clock is the same in all processes; its start is when the process is asked for.
FIRST_ROUTE = """
import time
from kvplug import BlockStored, EventBatch, Rank, Router, RouterConfig
router = Router(RouterConfig(block_size=16))
router.add_worker("a")
event = BlockStored(block_hashes=(1, 2), token_ids=tuple(range(32)), block_size=16)
router.apply(Rank("a"), EventBatch(events=(event,)))
assert router.route(range(64)).overlap_blocks == 2
print(time.monotonic())
"""


def also(names: set[str]) -> dict[str, dict[str, Any]]:
    """Those of them that are asked for."""
    return {name: measure() for name, measure in MEASURES.items() if name in names}


def import_seconds() -> dict[str, Any]:
    """Of `import kvplug` in a fresh process, without the interpreter's own start."""
    return _times([_printed(IMPORT) for _ in range(NUM_STARTS)], target_s=0.1)


def first_route_warm() -> dict[str, Any]:
    """From the start of a process to its first answer, kernels being in Numba's cache."""
    starts = [_first_route() for _ in range(NUM_STARTS + 1)]
    return _times(starts[1:], target_s=1.0)  # the first one may have to fill the cache


def first_route_cold() -> dict[str, Any]:
    """As warm, but kernels have to be compiled."""
    with tempfile.TemporaryDirectory() as folder:
        return _times([_first_route(NUMBA_CACHE_DIR=folder)], target_s=10.0)


def snapshot_seconds() -> dict[str, Any]:
    """Of saving and restoring a large index: what index_snapshot.py prints."""
    if importlib.util.find_spec("kvplug.index.snapshot") is None:
        return {"skipped": "there is no kvplug.index.snapshot"}
    command = [sys.executable, "-m", "tests.benchmarks.index_snapshot"]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    times: dict[str, Any] = json.loads(run.stdout)
    return times


def one_thread(rates: dict[str, float]) -> dict[str, Any]:
    """Replay rates of one thread of kvplug beside what Dynamo publishes of 64 cores."""
    published = {"peer_64_cores": PUBLISHED_M_BLOCKS_S, "unit": "M blocks/s"}
    return {
        f"{name}_one_thread": {"kvplug": round(rate, 3), **published}
        for name, rate in rates.items()
    }


MEASURES: dict[str, Callable[[], dict[str, Any]]] = {
    "import_kvplug": import_seconds,
    "first_route_warm": first_route_warm,
    "first_route_cold": first_route_cold,
    "snapshot": snapshot_seconds,
}


def _first_route(**env: str) -> float:
    began = time.monotonic()
    return _printed(FIRST_ROUTE, **env) - began


def _printed(program: str, **env: str) -> float:
    command = [sys.executable, "-c", program]
    environment = {**os.environ, **env}
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    return float(run.stdout)


def _times(seconds: list[float], target_s: float) -> dict[str, Any]:
    best, median = round(min(seconds), 4), round(statistics.median(seconds), 4)
    return {"best": best, "median": median, "target": target_s, "unit": "s"}
