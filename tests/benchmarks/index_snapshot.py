"""How long an index of ten million memberships takes to be saved, and to be there again.

usage: python -m tests.benchmarks.index_snapshot

Prints {"save", "restore", "memberships", "unit"} as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.benchmarks.index_kvplug import Kvplug
from tests.benchmarks.index_workload import fill

NUM_WORKERS, NUM_BLOCKS = 8, 1_250_000


def main() -> None:
    """Fill, save, restore, print."""
    snapshot: Any = import_module("kvplug.index.snapshot")
    library = Kvplug(NUM_WORKERS)
    for events in fill(NUM_BLOCKS, NUM_WORKERS):
        for call in Kvplug.calls(events, 64):
            library.apply(*call)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        save, _ = timed_s(snapshot.save, library.index, path)
        restore, index = timed_s(snapshot.restore, path)
    assert len(index) == NUM_BLOCKS
    times = {"save": save, "restore": restore, "memberships": NUM_BLOCKS * NUM_WORKERS, "unit": "s"}
    sys.stdout.write(json.dumps(times) + "\n")


def timed_s(call: Callable[..., Any], *arguments: object) -> tuple[float, Any]:
    """Seconds, and what it returned."""
    began = time.perf_counter()
    result = call(*arguments)
    return round(time.perf_counter() - began, 3), result


if __name__ == "__main__":
    main()
