"""What becomes of the rounds of `make bench-index`: values, ratios, a table, a file.

In:  answers of both sides, round by round.   Out: rows of a table; bench-results/index.json.
"""

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from tests.benchmarks.index_metrics import Metric

Answers = list[dict[str, Any]]


@dataclass
class Row:
    """One metric: what goes into the file, and cells of the table."""

    metric: Metric
    kvplug: float
    peer: float
    ratio: float
    spread: tuple[float, float]
    cells: tuple[str, str]
    details: list[tuple[str, str, str]] = field(default_factory=list)
    also: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The entry in the file."""
        return {
            "kvplug": round(self.kvplug, 3),
            "peer": round(self.peer, 3),
            "ratio": round(self.ratio, 3),
            "target": self.metric.target,
            "unit": self.metric.unit,
            "spread": [round(ratio, 3) for ratio in self.spread],
        }


def row_of(metric: Metric, ours: Answers, theirs: Answers) -> Row:
    """Of the answers of all rounds; a ratio is of the medians, its spread over the rounds."""
    if metric.kind == "memory":
        return _memory_row(metric, ours, theirs)
    value = _rate if metric.kind == "rate" else _p50_of
    mine, peers = [value(a) for a in ours], [value(a) for a in theirs]
    ratios = [_ratio(metric, m, p) for m, p in zip(mine, peers, strict=True)]
    kvplug, peer = statistics.median(mine), statistics.median(peers)
    spread = min(ratios), max(ratios)
    cells = _cell(metric, mine, ours), _cell(metric, peers, theirs)
    row = Row(metric, kvplug, peer, _ratio(metric, kvplug, peer), spread, cells)
    if "events_ns" in ours[0]:
        _add_latencies(row, ours, theirs)
    return row


def _memory_row(metric: Metric, ours: Answers, theirs: Answers) -> Row:
    """The fill with the worst ratio."""
    fills = []
    for case, mine, peer in zip(metric.cases, ours, theirs, strict=True):
        larger = max(mine["table_bytes"], mine["resident_bytes"])
        fills.append((larger / case["blocks"], peer["resident_bytes"] / case["blocks"]))
    ratios = [_ratio(metric, *fill) for fill in fills]
    worst = ratios.index(min(ratios))
    ranges = [_range([fill[side] for fill in fills], ".0f") for side in (0, 1)]
    cells = [f"{v:.1f}  ({r})" for v, r in zip(fills[worst], ranges, strict=True)]
    row = Row(
        metric, *fills[worst], ratios[worst], (min(ratios), max(ratios)), (cells[0], cells[1])
    )
    for case, mine, peer in zip(metric.cases, ours, theirs, strict=True):
        row.details.append(_fill_line(metric.name, case, mine, peer))
    return row


def _fill_line(
    name: str, case: dict[str, Any], mine: dict[str, Any], peer: dict[str, Any]
) -> tuple[str, str, str]:
    blocks = case["blocks"]
    tables, resident, theirs = (
        number / blocks
        for number in (mine["table_bytes"], mine["resident_bytes"], peer["resident_bytes"])
    )
    return (
        f"{name}, {blocks:,} blocks, bytes each",
        f"tables {tables:.1f}, resident {resident:.1f}",
        f"resident {theirs:.1f}",
    )


def _add_latencies(row: Row, ours: Answers, theirs: Answers) -> None:
    for kind, name in (("calls_ns", "find"), ("events_ns", "event")):
        sides = {"kvplug": percentiles(ours, kind), "peer": percentiles(theirs, kind)}
        label = f"{row.metric.name}_{name}"
        row.also[label] = {**sides, "unit": "us"}
        cells = [f"{p['p50']:.1f} / {p['p99']:.1f}" for p in sides.values()]
        row.details.append((f"{label}, us: p50 / p99", cells[0], cells[1]))


def percentiles(answers: Answers, kind: str = "calls_ns") -> dict[str, float]:
    """{"p50", "p99"} of all calls of all rounds, in us."""
    calls = sorted(ns for answer in answers for ns in answer[kind])
    p99 = calls[int(0.99 * (len(calls) - 1))]
    return {"p50": round(statistics.median(calls) / 1e3, 2), "p99": round(p99 / 1e3, 2)}


def _rate(answer: dict[str, Any]) -> float:
    return float(answer["num_blocks"] / answer["elapsed_ns"] * 1e3)


def _p50_of(answer: dict[str, Any]) -> float:
    return float(statistics.median(answer["calls_ns"]) / 1e3)


def _ratio(metric: Metric, kvplug: float, peer: float) -> float:
    """Times better than the peer."""
    return kvplug / peer if metric.kind == "rate" else peer / kvplug


def _cell(metric: Metric, values: list[float], answers: Answers) -> str:
    calls = percentiles(answers)
    p50_p99 = f"{calls['p50']:.1f} / {calls['p99']:.1f}"
    if metric.kind == "latency":
        return f"{p50_p99}  ({_range(values, '.1f')})"
    rate = f"{statistics.median(values):.3f} M/s  ({_range(values, '.3f')})"
    return rate if "events_ns" in answers[0] else f"{rate}  {p50_p99}"


def _range(values: list[float], form: str) -> str:
    return f"{min(values):{form}}-{max(values):{form}}"


def table_of(rows: list[Row]) -> Table:
    """Latencies and calls in us."""
    title = "latencies, us: p50 / p99 (spread of p50s); rates: median (spread), us per call"
    table = Table(title=title)
    for column in ("metric", "kvplug", "dynamo 1.6.1"):
        table.add_column(column)
    for column in ("times better", "to reach", "reached"):
        table.add_column(column, justify="right")
    for row in rows:
        ratio = f"{row.ratio:.2f} ({_range(list(row.spread), '.2f')})"
        reached = "yes" if row.ratio >= row.metric.target else "no"
        table.add_row(row.metric.name, *row.cells, ratio, f"{row.metric.target:g}", reached)
    return table


def details_of(rows: list[Row]) -> Table:
    """What is behind the rows."""
    table = Table("detail", "kvplug", "dynamo 1.6.1")
    for row in rows:
        for line in row.details:
            table.add_row(*line)
    return table


def merged(before: dict[str, Any], rows: list[Row], also: dict[str, Any]) -> dict[str, Any]:
    """The file's content: what was measured now instead of what was there, the rest as it was."""
    seen = dict(before.get("also", {}))
    for row in rows:
        seen |= row.also
    content = {name: entry for name, entry in before.items() if name != "also"}
    content |= {row.metric.name: row.as_json() for row in rows}
    return {**content, "also": {**seen, **also}}


def write(path: Path, rows: list[Row], also: dict[str, Any], *, keep: bool) -> None:
    """Into the file; `keep` what it has of others."""
    before = json.loads(path.read_text()) if keep and path.exists() else {}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(merged(before, rows, also), indent=1) + "\n")
