"""`make bench-thin`: what routing one request costs, beside Dynamo's hashing and matching.

usage: python -m tests.benchmarks.thin

Prints p50 and p99 per case with the spread of the rounds' medians, and writes
bench-results/thin.json: {metric: {"kvplug", "peer", "ratio": times better than the peer, "unit"}}.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.benchmarks.environments import dynamo_python
from tests.benchmarks.sides import ROOT, Side

BLOCK_SIZE, NUM_ROUNDS, CALLS_PER_ROUND = 16, 9, 120
SIZES = [(tokens, workers) for workers in (8, 64) for tokens in (512, 4096, 32768)]
INPUTS = ("list", "array")


def main() -> None:
    """Measure, print, write."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    kvplug = Side("kvplug", [sys.executable, "-m", "tests.benchmarks.thin_kvplug"], env)
    dynamo = Side("dynamo", [str(dynamo_python()), "-m", "tests.benchmarks.thin_dynamo"], env)
    results, table = {}, _table()
    for tokens, workers in SIZES:
        for form in INPUTS:
            rounds = _interleaved(kvplug, dynamo, tokens, workers, form)
            name = f"route_{form}_{tokens}_w{workers}"
            results[name] = _metric(*rounds)
            table.add_row(name, *(_cell(side) for side in rounds), f"{results[name]['ratio']:.2f}")
    for side in (kvplug, dynamo):
        side.close()
    Console(width=120).print(table)
    _write(results, ROOT / "bench-results" / "thin.json")


def _interleaved(
    kvplug: Side, dynamo: Side, tokens: int, workers: int, form: str
) -> tuple[list[list[int]], list[list[int]]]:
    case = {"tokens": tokens, "workers": workers, "block_size": BLOCK_SIZE, "input": form}
    for side in (kvplug, dynamo):
        side.measure({**case, "calls": 10})  # builds the index, warms up
    ours, theirs = [], []
    for _ in range(NUM_ROUNDS):
        ours.append(kvplug.measure({**case, "calls": CALLS_PER_ROUND}))
        theirs.append(dynamo.measure({**case, "calls": CALLS_PER_ROUND}))
    return ours, theirs


def _metric(ours: list[list[int]], theirs: list[list[int]]) -> dict[str, float | str]:
    mine, peer = _p50_us(ours), _p50_us(theirs)
    return {
        "kvplug": round(mine, 2),
        "peer": round(peer, 2),
        "ratio": round(peer / mine, 3),
        "unit": "us, p50",
    }


def _p50_us(rounds: list[list[int]]) -> float:
    return statistics.median(x for r in rounds for x in r) / 1e3


def _cell(rounds: list[list[int]]) -> str:
    everything = sorted(x for r in rounds for x in r)
    p99 = everything[int(0.99 * (len(everything) - 1))] / 1e3
    medians = sorted(statistics.median(r) / 1e3 for r in rounds)
    return f"{_p50_us(rounds):.0f} / {p99:.0f}  ({medians[0]:.0f}-{medians[-1]:.0f})"


def _table() -> Table:
    table = Table(title="routing one request, us: p50 / p99 (spread of the rounds' p50)")
    for column in ("case", "kvplug: hash, match, cost, account", "dynamo 1.6.1: hash, match"):
        table.add_column(column)
    table.add_column("times faster", justify="right")
    return table


def _write(results: dict[str, dict[str, float | str]], path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
