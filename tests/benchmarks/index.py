"""`make bench-index`: the index beside Dynamo's, on the same work; ratios to reach.

usage: python -m tests.benchmarks.index [--only NAME[,NAME]] [--rounds N] [--cores N] [--traces DIR]

Two processes take turns, one waits while the other works. Each has one core: the peer, a thread
behind a channel, is up to six times faster so than on two, where calls wake another core.
Both start from input of their own that is made before timing; their answers have to be equal.
Prints a table and writes bench-results/index.json:

    {metric: {"kvplug", "peer", "ratio": times better than the peer, "target", "unit",
              "spread": [lowest, highest ratio of a round]},
     "also": {what has no peer, or no target}}
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.benchmarks import index_start
from tests.benchmarks.environments import dynamo_python
from tests.benchmarks.index_metrics import Metric, all_metrics
from tests.benchmarks.index_report import Row, details_of, row_of, table_of, write
from tests.benchmarks.index_trace import EXPECTED
from tests.benchmarks.sides import ROOT, Side

RESULTS = ROOT / "bench-results" / "index.json"
TRACES = ROOT / ".." / "shared" / "traces"

console = Console(width=170)


class Sides:
    """kvplug's process and Dynamo's."""

    def __init__(self, num_cores: int) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "BENCH_CORES": str(num_cores)}
        command = [sys.executable, "-m", "tests.benchmarks.index_kvplug"]
        self.kvplug = Side("kvplug", command, env)
        command = [str(dynamo_python()), "-m", "tests.benchmarks.index_dynamo"]
        self.dynamo = Side("dynamo", command, env)

    def measure(self, case: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """One round of both."""
        return self.kvplug.measure(case), self.dynamo.measure(case)

    def close(self) -> None:
        """End the processes."""
        self.kvplug.close()
        self.dynamo.close()


def main() -> None:
    """Measure, print, write."""
    options = _options()
    metrics = all_metrics(options.traces.resolve())
    only = set(options.only.split(",")) if options.only else {*metrics, *index_start.MEASURES}
    _reject_unknown(only - {*metrics, *index_start.MEASURES})
    chosen = measurable([metric for name, metric in metrics.items() if name in only])
    rows = _rows(chosen, options)
    also = index_start.also(only)
    rates = {r.metric.name: r.kvplug for r in rows if r.metric.name.startswith("replay")}
    if rates:
        also |= index_start.one_thread(rates)
    write(RESULTS, rows, also, keep=bool(options.only))
    _print(rows, also)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.index")
    parser.add_argument("--only", default="", metavar="NAME[,NAME]", help="measure these only")
    parser.add_argument("--rounds", type=int, metavar="N", help="of each metric, instead of 3 to 9")
    parser.add_argument("--cores", type=int, default=1, metavar="N", help="of each side (1)")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of Mooncake traces")
    return parser.parse_args()


def _reject_unknown(names: set[str]) -> None:
    if names:
        raise SystemExit(f"there is no metric {', '.join(sorted(names))}")


def measurable(metrics: list[Metric]) -> list[Metric]:
    """Without those whose trace is not there."""
    result = []
    for metric in metrics:
        path = Path(metric.cases[0].get("path", ROOT))
        if path.exists():
            result.append(metric)
        else:
            console.print(f"skipped {metric.name}: there is no {path.name} in {path.parent}")
    return result


def _rows(metrics: list[Metric], options: argparse.Namespace) -> list[Row]:
    rows = []
    sides = Sides(options.cores)
    for metric in metrics:
        if metric.kind == "memory":
            ours, theirs = _fills(metric, options.cores)
        else:
            ours, theirs = _rounds(metric, sides, options.rounds or metric.num_rounds)
        rows.append(row_of(metric, ours, theirs))
        console.print(f"{metric.name}: {rows[-1].ratio:.2f} times better", highlight=False)
    sides.close()
    return rows


def _rounds(metric: Metric, sides: Sides, num_rounds: int) -> tuple[list[Any], list[Any]]:
    """The answers of each side; one more round is not looked at: it prepares and warms up."""
    (case,) = metric.cases
    answers = [sides.measure(case) for _ in range(num_rounds + 1)]
    for ours, theirs in answers:
        agree(metric, ours["check"], theirs["check"])
    return [ours for ours, _ in answers[1:]], [theirs for _, theirs in answers[1:]]


def _fills(metric: Metric, num_cores: int) -> tuple[list[Any], list[Any]]:
    """As _rounds, a fill each, in fresh processes."""
    answers = []
    for case in metric.cases:
        sides = Sides(num_cores)
        answers.append(sides.measure(case))
        sides.close()
    return [ours for ours, _ in answers], [theirs for _, theirs in answers]


def agree(metric: Metric, ours: Any, theirs: Any) -> None:
    """Both sides answered the same, and what is known of a trace."""
    expected = EXPECTED.get(metric.name.removeprefix("replay_"), theirs)
    if not ours == theirs == expected:
        named = f"kvplug {ours}, dynamo {theirs}, expected {expected}"
        raise SystemExit(f"{metric.name}: the answers are not the same: {named}")


def _print(rows: list[Row], also: dict[str, Any]) -> None:
    if rows:
        console.print(table_of(rows))
    if any(row.details for row in rows):
        console.print(details_of(rows))
    for name, entry in also.items():
        console.print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in entry.items()))


if __name__ == "__main__":
    main()
