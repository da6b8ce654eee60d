"""Processes of `make bench-cluster`, as context managers.

In:  the name of a program, tests/benchmarks/cluster_NAME.py.   Out: a Side; it is told to close
what it has opened, and ends with the block.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.benchmarks.sides import ROOT, Side

ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


@contextmanager
def side(name: str) -> Iterator[Side]:
    """Publishers, a fleet, a replica or readers."""
    process = Side(name, [sys.executable, "-m", f"tests.benchmarks.cluster_{name}"], ENV)
    try:
        yield process
        process.measure({"what": "close"})
    finally:
        process.close()
