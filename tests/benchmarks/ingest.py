"""`make bench-ingest`: from raw stock frames on a socket to index arrays, beside Dynamo's
SelectionService, fed by the same frames; and what ingestion costs a query.

usage: python -m tests.benchmarks.ingest

Prints medians with the spread of the rounds, and writes bench-results/ingest.json:
{metric: {"kvplug", "peer", "ratio": times better than the peer, "unit"}}. Each side runs on one
core, the publisher on the other; Dynamo is also measured on both.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.environments import dynamo_python
from tests.benchmarks.sides import ROOT, Side

NUM_ROUNDS, NUM_BLOCKS = 7, 51 * 2048
BLOCKS_PER_EVENT = (16, 128)
QUERY_ROUNDS, QUERIES = 5, 800
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


class Publisher:
    """One stream in a process of its own; `began` is when it started to send, in ns."""

    def __init__(self, seed: int, blocks_per_event: int, num_blocks: int) -> None:
        numbers = (str(n) for n in (seed, blocks_per_event, num_blocks))
        command = [sys.executable, "-m", "tests.benchmarks.ingest_frames", *numbers]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self._read())

    def began(self) -> int:
        """Waits until everything is sent."""
        return int(self._read())

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=30)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def main() -> None:
    """Measure, print, write."""
    kvplug = Side("kvplug", [sys.executable, "-m", "tests.benchmarks.ingest_kvplug"], ENV)
    dynamo = Side("dynamo", [str(dynamo_python()), "-m", "tests.benchmarks.ingest_dynamo"], ENV)
    table = _table()
    results = {f"stock_{n}": _streams(kvplug, dynamo, n, table) for n in BLOCKS_PER_EVENT}
    for blocks_per_event in BLOCKS_PER_EVENT:
        _memory(kvplug, blocks_per_event, table)
    results["query_p99_under_ingest"] = _queries(kvplug, dynamo, table)
    for side in (kvplug, dynamo):
        side.close()
    Console(width=110).print(table)
    path = ROOT / "bench-results" / "ingest.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def _streams(kvplug: Side, dynamo: Side, blocks_per_event: int, table: Table) -> dict[str, Any]:
    rates: list[list[float]] = [[], [], []]
    sides = ((kvplug, 1), (dynamo, 1), (dynamo, 2))
    for number in range(NUM_ROUNDS + 1):
        for place, (side, cores) in enumerate(sides):
            rate = _rate(
                side, 1000 * blocks_per_event + 10 * number + place, blocks_per_event, cores
            )
            if number > 0:  # the first warms up
                rates[place].append(rate)
    ours, theirs, _ = medians = [statistics.median(each) for each in rates]
    cells = (f"{m:.2f}  ({min(r):.2f}-{max(r):.2f})" for m, r in zip(medians, rates, strict=True))
    table.add_row(f"stock_{blocks_per_event}, M blocks/s", *cells, f"{ours / theirs:.2f}")
    return _metric(ours, theirs, ours / theirs, "M blocks/s")


def _memory(kvplug: Side, blocks_per_event: int, table: Table) -> None:
    rates = []
    for number in range(NUM_ROUNDS + 1):
        case = {"what": "memory", "seed": number, "worker": f"m{number}", "blocks": NUM_BLOCKS}
        (elapsed,) = kvplug.measure({**case, "blocks_per_event": blocks_per_event})
        rates.append((NUM_BLOCKS + 1) / elapsed * 1e3)
    del rates[0]  # it warms up
    cell = f"{statistics.median(rates):.2f}  ({min(rates):.2f}-{max(rates):.2f})"
    table.add_row(f"from memory, {blocks_per_event} an event", cell, "", "", "")


def _rate(side: Side, seed: int, blocks_per_event: int, cores: int) -> float:
    """Million blocks per second from the first frame sent to the last block known."""
    publisher = Publisher(seed, blocks_per_event, NUM_BLOCKS)
    case = {"what": "stream", "port": publisher.port, "seed": seed, "worker": f"w{seed}"}
    (ended,) = side.measure({**case, "cores": cores, "blocks": NUM_BLOCKS + 1})
    rate = (NUM_BLOCKS + 1) / (ended - publisher.began()) * 1e3
    publisher.close()
    return rate


def _queries(kvplug: Side, dynamo: Side, table: Table) -> dict[str, Any]:
    samples: dict[str, list[list[int]]] = {"idle": [], "ours": [], "theirs": []}
    case = {"what": "queries", "calls": QUERIES, "blocks_per_event": 16}
    for number in range(QUERY_ROUNDS):
        samples["idle"].append(kvplug.measure({**case, "ingest": False}))
        samples["ours"].append(kvplug.measure({**case, "ingest": True}))
        publisher = Publisher(number, 16, 200 * 2048)
        theirs = {**case, "port": publisher.port, "seed": number}
        samples["theirs"].append(dynamo.measure(theirs))
        publisher.close()
    idle, ours, theirs = ([_p99(r) for r in samples[name]] for name in samples)
    for name, p99s in (("idle", idle), ("under ingest", ours)):
        peer_cell = _cell(theirs) if p99s is ours else ""
        table.add_row(f"route 512 blocks, {name}, p99 us", _cell(p99s), "", peer_cell, "")
    mine, peer = statistics.median(ours), statistics.median(theirs)
    metric = _metric(mine, peer, peer / mine, "us, p99")
    return {**metric, "idle": round(statistics.median(idle), 1)}


def _p99(latencies: list[int]) -> float:
    return sorted(latencies)[int(0.99 * (len(latencies) - 1))] / 1e3


def _cell(values: list[float]) -> str:
    return f"{statistics.median(values):.0f}  ({min(values):.0f}-{max(values):.0f})"


def _metric(ours: float, theirs: float, ratio: float, unit: str) -> dict[str, Any]:
    rounded = {"kvplug": round(ours, 3), "peer": round(theirs, 3), "ratio": round(ratio, 3)}
    return {**rounded, "unit": unit}


def _table() -> Table:
    table = Table(title="ingestion: median (spread of the rounds)")
    for column in ("case", "kvplug, one core", "dynamo 1.6.1, one core", "dynamo, both cores"):
        table.add_column(column)
    table.add_column("times better", justify="right")
    return table


if __name__ == "__main__":
    main()
