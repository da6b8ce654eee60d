"""`make bench-router`: what routing one request costs, beside Dynamo's `select_and_reserve`.

usage: python -m tests.benchmarks.router [--only NAME[,NAME]] [--rounds N] [--cores N]

Both sides hash, match, cost, choose and account, in process, over the same fleet: blocks of 16
tokens, 1 M blocks besides the prompts, every rank holds another part of each prompt (see
router_workload.py). kvplug is `Router` as it comes, told each cache's capacity; Dynamo is
`SelectionService` of ai-dynamo-runtime 1.6.1. kvplug is asked with arrays and Dynamo with lists,
as its binding takes nothing else. After each call, and outside of its time, the request gets its
first token and ends. Python collects garbage as it does by default: in time, if it comes to that.

Two processes take turns, one waits while the other works; rounds alternate, and a first one warms
up. `features_*` are `full_*` with what a fleet may use: credits, busy thresholds, taints, a model
(router_kvplug.py). Each has one core, on which Dynamo is a little faster than on two. p50 is of all
calls, p99 the median of the rounds' p99; the spread is that of the rounds' medians. `kernel` is the
median time of the one compiled call in it, in rounds of its own.

Prints a table and writes bench-results/router.json, in us per request:

    {metric: {"kvplug", "peer", "ratio": times faster, "p99", "peer_p99", "unit", "target", "met"},
     "also": {metric: the same without a target, "kernel": {metric: us}}}
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.environments import dynamo_python
from tests.benchmarks.sides import ROOT, Side

RESULTS = ROOT / "bench-results" / "router.json"
FLEETS, NUM_ROUNDS = (8, 64, 512), 9
FULL_P50_US = {512: 10, 4096: 15, 32768: 50}
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}

console = Console(width=175, highlight=False)

Rounds = list[list[float]]


@dataclass(frozen=True, slots=True)
class Metric:
    """What is asked of a fleet, and what is to be reached: p50 in us, p99 in p50s, times faster."""

    name: str
    num_ranks: int
    case: dict[str, Any]
    target: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """Latencies in ns, by rounds: of kvplug, of its kernel alone, of Dynamo."""

    metric: Metric
    kvplug: Rounds
    kernel: Rounds
    peer: Rounds

    @property
    def ratio(self) -> float:
        """Times faster, by p50."""
        return p50_us(self.peer) / p50_us(self.kvplug)

    @property
    def is_met(self) -> bool:
        """Whether everything that is to be reached is."""
        target, p50 = self.metric.target, p50_us(self.kvplug)
        p99_in_p50s = p99_us(self.kvplug) / p50
        return (
            p50 <= target.get("p50", p50)
            and p99_in_p50s <= target.get("p99_in_p50s", p99_in_p50s)
            and self.ratio >= target.get("ratio", self.ratio)
        )

    def as_json(self) -> dict[str, Any]:
        """The entry in the file."""
        entry: dict[str, Any] = {
            "kvplug": round(p50_us(self.kvplug), 2),
            "peer": round(p50_us(self.peer), 2),
            "ratio": round(self.ratio, 2),
            "p99": round(p99_us(self.kvplug), 2),
            "peer_p99": round(p99_us(self.peer), 2),
            "unit": "us",
        }
        if self.metric.target:
            entry |= {"target": self.metric.target, "met": self.is_met}
        return entry


class Sides:
    """A fleet of so many ranks, on both sides."""

    def __init__(self, num_ranks: int, num_cores: int) -> None:
        self.kvplug = Side("kvplug", [sys.executable, "-m", "tests.benchmarks.router_kvplug"], ENV)
        self.dynamo = Side(
            "dynamo", [str(dynamo_python()), "-m", "tests.benchmarks.router_dynamo"], ENV
        )
        case = {"what": "build", "ranks": num_ranks, "cores": num_cores}
        num_blocks = self.kvplug.measure(case)
        num_copies = _feed(self.dynamo, case)
        console.print(
            f"{num_ranks} ranks: {num_blocks:,} blocks in kvplug's index; {num_copies:,} sent to "
            "Dynamo, every copy counted"
        )

    def rounds(self, case: dict[str, Any], num_rounds: int) -> tuple[Rounds, Rounds, Rounds]:
        """Of kvplug, of its kernel, of Dynamo."""
        ours, kernel, theirs = [], [], []
        # The peer has no such settings: it decides about the same prompts without.
        of_peer = {**case, "what": "full"} if case["what"] == "features" else case
        for _ in range(num_rounds + 1):
            ours.append(self.kvplug.measure(case))
            kernel.append(self.kvplug.measure({**case, "kernel": True}))
            theirs.append(self.dynamo.measure(of_peer))
        return ours[1:], kernel[1:], theirs[1:]

    def close(self) -> None:
        """End the processes."""
        self.kvplug.close()
        self.dynamo.close()


def _feed(dynamo: Side, case: dict[str, Any]) -> int:
    """Publish to Dynamo until it knows everything; how many blocks that were."""
    command = [sys.executable, "-m", "tests.benchmarks.router_publisher", str(case["ranks"])]
    publisher = subprocess.Popen(
        command, cwd=ROOT, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert publisher.stdout is not None
    dynamo.measure({**case, "ports": json.loads(publisher.stdout.readline())})
    num_blocks = int(publisher.stdout.readline())
    publisher.communicate(timeout=30)
    return num_blocks


def all_metrics() -> list[Metric]:
    """Fleet by fleet; those without a target at the end of each."""
    metrics = []
    for num_ranks in FLEETS:
        for num_tokens, p50 in FULL_P50_US.items():
            target = {"p50": p50, "p99_in_p50s": 4, "ratio": 10}
            name = f"full_{num_tokens}_w{num_ranks}"
            metrics.append(Metric(name, num_ranks, _full(num_tokens), target))
        if num_ranks < 512:
            name, target = f"features_512_w{num_ranks}", {"p50": 10, "p99_in_p50s": 4, "ratio": 10}
            metrics.append(Metric(name, num_ranks, _featured(), target))
        if num_ranks == 64:
            metrics += _of_64()
    return metrics


def _of_64() -> list[Metric]:
    cold = {"what": "cold", "tokens": 32768, "calls": 100}
    many = {"what": "many", "tokens": 4096, "requests": 64, "calls": 50}
    return [
        Metric("cold_32768_w64", 64, cold, {"p50": 150, "ratio": 10}),
        Metric("many64_4096_w64", 64, many, {"ratio": 10}),
        *(Metric(f"list_{n}_w64", 64, {**_full(n), "lists": True}) for n in FULL_P50_US),
    ]


def _full(num_tokens: int) -> dict[str, Any]:
    calls = 400 if num_tokens == 32768 else 1000
    return {"what": "full", "tokens": num_tokens, "calls": calls}


def _featured() -> dict[str, Any]:
    return {**_full(512), "what": "features"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = _options(arguments)
    metrics = all_metrics()
    only = set(options.only.split(",")) if options.only else {metric.name for metric in metrics}
    unknown = only - {metric.name for metric in metrics}
    if unknown:
        raise SystemExit(f"there is no metric {', '.join(sorted(unknown))}")
    rows = []
    for num_ranks in FLEETS:
        chosen = [m for m in metrics if m.num_ranks == num_ranks and m.name in only]
        rows += _rows(num_ranks, chosen, options) if chosen else []
    console.print(table_of(rows))
    before = json.loads(RESULTS.read_text()) if options.only and RESULTS.exists() else {}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(before | content_of(rows), indent=1) + "\n")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.router")
    parser.add_argument("--only", default="", metavar="NAME[,NAME]", help="measure these only")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, metavar="N", help="of each")
    parser.add_argument("--cores", type=int, default=1, metavar="N", help="of each side (1)")
    return parser.parse_args(arguments)


def _rows(num_ranks: int, metrics: list[Metric], options: argparse.Namespace) -> list[Row]:
    sides = Sides(num_ranks, options.cores)
    rows = []
    for metric in metrics:
        rows.append(Row(metric, *sides.rounds(metric.case, options.rounds)))
        console.print(f"  {metric.name}: {rows[-1].ratio:.1f} times faster")
    sides.close()
    return rows


def p50_us(rounds: Rounds) -> float:
    """The median of all calls."""
    return statistics.median(ns for each in rounds for ns in each) / 1e3


def p99_us(rounds: Rounds) -> float:
    """The median of the rounds' p99."""
    return statistics.median(sorted(each)[int(0.99 * (len(each) - 1))] for each in rounds) / 1e3


def content_of(rows: list[Row]) -> dict[str, Any]:
    """Of the file."""
    content: dict[str, Any] = {row.metric.name: row.as_json() for row in rows if row.metric.target}
    also: dict[str, Any] = {row.metric.name: row.as_json() for row in rows if not row.metric.target}
    also["kernel"] = {row.metric.name: round(p50_us(row.kernel), 2) for row in rows}
    return {**content, "also": also}


def table_of(rows: list[Row]) -> Table:
    """A row per metric."""
    table = Table(title="one request, us: p50 / p99 (spread of the rounds' p50)")
    for column in ("metric", "kvplug", "kernel", "dynamo 1.6.1"):
        table.add_column(column)
    table.add_column("times faster (spread)", justify="right")
    table.add_column("to reach: p50, p99 / p50, times")
    table.add_column("met", justify="right")
    for row in rows:
        table.add_row(
            row.metric.name, _cell(row.kvplug), _kernel_cell(row), _cell(row.peer),
            _ratio_cell(row), _target_cell(row.metric.target),
            ("yes" if row.is_met else "no") if row.metric.target else "",
        )  # fmt: skip
    return table


def _cell(rounds: Rounds) -> str:
    medians = [statistics.median(each) / 1e3 for each in rounds]
    spread = f"({min(medians):.1f}-{max(medians):.1f})"
    return f"{p50_us(rounds):.1f} / {p99_us(rounds):.1f}  {spread}"


def _kernel_cell(row: Row) -> str:
    kernel = p50_us(row.kernel)
    return f"{kernel:.1f}  ({100 * kernel / p50_us(row.kvplug):.0f} %)"


def _ratio_cell(row: Row) -> str:
    ratios = [
        statistics.median(peer) / statistics.median(mine)
        for mine, peer in zip(row.kvplug, row.peer, strict=True)
    ]
    return f"{row.ratio:.1f} ({min(ratios):.1f}-{max(ratios):.1f})"


def _target_cell(target: dict[str, float]) -> str:
    if not target:
        return ""
    p50, p99 = (f"{target[key]:g}" if key in target else "-" for key in ("p50", "p99_in_p50s"))
    return f"{p50}, {p99}, {target['ratio']:g}"


if __name__ == "__main__":
    main()
