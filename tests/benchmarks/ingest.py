"""`make bench-ingest`: from raw frames on a socket to index arrays, stock ones beside Dynamo's
SelectionService, which is fed by the same, and those of kvplug's own stream; how long a newcomer
takes to know all of a large cache; and what ingestion costs a query.

usage: python -m tests.benchmarks.ingest

Prints medians with the spread of the rounds, and writes bench-results/ingest.json:
{metric: {"kvplug", "peer", "ratio": times better than the peer, "unit"}}. Each side runs on one
core, the publisher on the other; Dynamo is also measured on both. Rows of our own stream have the
peer's rate with stock frames of the same events, as there is no other reader. `batched`: as many
events a message as kvplug's publisher puts there when they come faster than it hashes; `single`:
one.
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
RESIDENT_ROUNDS, RESIDENT_BLOCKS = 5, 489 * 2048
BLOCKS_PER_EVENT = (16, 128)
QUERY_ROUNDS, QUERIES = 5, 800
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


class Publisher:
    """One stream in a process of its own; `began` is when it started to send, in ns.

    mode: None for stock frames, else one of ingest_packed. shape: what it printed of its messages.
    """

    def __init__(
        self, seed: int, blocks_per_event: int, num_blocks: int, mode: str | None = None
    ) -> None:
        numbers = (str(n) for n in (seed, blocks_per_event, num_blocks))
        module, more = ("ingest_packed", [mode]) if mode else ("ingest_frames", [])
        command = [sys.executable, "-m", f"tests.benchmarks.{module}", *numbers, *more]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        port, *shape = self._read().split()
        self.port, self.shape = int(port), [float(number) for number in shape]

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
    results: dict[str, Any] = {}
    for blocks_per_event in BLOCKS_PER_EVENT:
        results |= _streams(kvplug, dynamo, blocks_per_event, table)
    results["resident_1M"] = _resident(kvplug, table)
    for blocks_per_event in BLOCKS_PER_EVENT:
        _memory(kvplug, blocks_per_event, table)
    results["query_p99_under_ingest"] = _queries(kvplug, dynamo, table)
    for side in (kvplug, dynamo):
        side.close()
    Console(width=130).print(table)
    path = ROOT / "bench-results" / "ingest.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def _streams(
    kvplug: Side, dynamo: Side, blocks_per_event: int, table: Table
) -> dict[str, dict[str, Any]]:
    cases: list[tuple[str, Side, int, str | None]] = [
        ("stock", kvplug, 1, None),
        ("dynamo", dynamo, 1, None),
        ("dynamo on both", dynamo, 2, None),
        ("packed", kvplug, 1, "batched"),
        ("packed_single", kvplug, 1, "single"),
    ]
    rates: dict[str, list[float]] = {name: [] for name, *_ in cases}
    shapes: dict[str, list[float]] = {}
    for number in range(NUM_ROUNDS + 1):
        for place, (name, side, cores, mode) in enumerate(cases):
            seed = 1000 * blocks_per_event + 10 * number + place
            publisher = Publisher(seed, blocks_per_event, NUM_BLOCKS, mode)
            shapes[name] = publisher.shape
            rate = _rate(publisher, side, seed, cores)
            if number > 0:  # the first warms up
                rates[name].append(rate)
    return _rows(rates, shapes, blocks_per_event, table)


def _rows(
    rates: dict[str, list[float]],
    shapes: dict[str, list[float]],
    blocks_per_event: int,
    table: Table,
) -> dict[str, dict[str, Any]]:
    theirs, rows = statistics.median(rates["dynamo"]), {}
    for name in ("stock", "packed", "packed_single"):
        ours = statistics.median(rates[name])
        num_events, num_bytes = shapes[name]
        what = f"{name}_{blocks_per_event}, M blocks/s"
        peers = ("dynamo", "dynamo on both") if name == "stock" else ()
        cells = [_rate_cell(rates[each]) for each in (name, *peers)]
        cells += [""] * (3 - len(cells))
        shape = f"{num_events:.0f} ev, {num_bytes:.1f} B"
        table.add_row(what, shape, *cells, f"{ours / theirs:.2f}")
        rows[f"{name}_{blocks_per_event}"] = _metric(ours, theirs, ours / theirs, "M blocks/s") | {
            "spread": [round(min(rates[name]), 3), round(max(rates[name]), 3)],
            "events_per_message": round(num_events, 1),
            "bytes_per_block": round(num_bytes, 1),
        }
    return rows


def _rate_cell(rates: list[float]) -> str:
    return f"{statistics.median(rates):.2f}  ({min(rates):.2f}-{max(rates):.2f})"


def _resident(kvplug: Side, table: Table) -> dict[str, Any]:
    """Seconds from the ask to the last block known, of all that an engine holds."""
    took, listed = [], []
    for number in range(RESIDENT_ROUNDS):
        publisher = Publisher(number, 16, RESIDENT_BLOCKS, "resident")
        rate = _rate(publisher, kvplug, number, 1, RESIDENT_BLOCKS)
        took.append((RESIDENT_BLOCKS + 1) / rate / 1e6)
        listed.append(publisher.shape[0])
    seconds, num_bytes = statistics.median(took), publisher.shape[1]
    cell = f"{seconds:.2f}  ({min(took):.2f}-{max(took):.2f})"
    table.add_row("resident set of 1 M blocks, s", f"{num_bytes:.1f} B", cell, "", "", "")
    spread = [round(min(took), 3), round(max(took), 3)]
    more = {"spread": spread, "listed_s": round(statistics.median(listed), 3)}
    return {"kvplug": round(seconds, 3), "unit": "s"} | more


def _memory(kvplug: Side, blocks_per_event: int, table: Table) -> None:
    rates = []
    for number in range(NUM_ROUNDS + 1):
        case = {"what": "memory", "seed": number, "worker": f"m{number}", "blocks": NUM_BLOCKS}
        (elapsed,) = kvplug.measure({**case, "blocks_per_event": blocks_per_event})
        rates.append((NUM_BLOCKS + 1) / elapsed * 1e3)
    del rates[0]  # it warms up
    cell = f"{statistics.median(rates):.2f}  ({min(rates):.2f}-{max(rates):.2f})"
    table.add_row(f"from memory, {blocks_per_event} an event", "", cell, "", "", "")


def _rate(
    publisher: Publisher, side: Side, seed: int, cores: int, num_blocks: int = NUM_BLOCKS
) -> float:
    """Million blocks per second from the first frame sent to the last block known."""
    case = {"what": "stream", "port": publisher.port, "seed": seed, "worker": f"w{seed}"}
    (ended,) = side.measure({**case, "cores": cores, "blocks": num_blocks + 1})
    rate = (num_blocks + 1) / (ended - publisher.began()) * 1e3
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
        table.add_row(f"route 512 blocks, {name}, p99 us", "", _cell(p99s), "", peer_cell, "")
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
    for column in (
        "case",
        "a message",
        "kvplug, one core",
        "dynamo 1.6.1, one core",
        "dynamo, both cores",
    ):
        table.add_column(column)
    table.add_column("times better", justify="right")
    return table


if __name__ == "__main__":
    main()
