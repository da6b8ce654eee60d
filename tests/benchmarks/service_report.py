"""What `make bench-service` keeps and prints: medians of the rounds, and kvplug beside its peers.

In:  the numbers of each router and round.   Out: bench-results/service.json, tables.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from tests.benchmarks.service_routers import CONTESTANTS, DIRECT, Contestant
from tests.benchmarks.service_run import PERCENTILES, Measured

RESULT: Final = "service.json"
COLUMNS: Final = (
    ("cached_share", "cached share", ".3f"),
    ("ttft_p90", "TTFT p90, ms", ".0f"),
    ("added_p50_text4k", "added p50 text 4k, ms", ".2f"),
    ("added_p50_ids", "added p50 ids 4k, ms", ".2f"),
    ("rps_per_cpu_s", "requests / CPU-s", ",.0f"),
    ("chunks_per_cpu_s", "chunks / CPU-s", ",.0f"),
    ("many_rps_per_cpu_s", "at most: requests / CPU-s", ",.0f"),
    ("many_chunks_per_cpu_s", "at most: chunks / CPU-s", ",.0f"),
    ("many_rps_per_s", "most requests/s", ",.0f"),
    ("many_chunks_per_s", "most chunks/s", ",.0f"),
    ("memory_mb", "memory, MB", ".0f"),
)
DETAILS: Final = tuple(
    f"{part}_{percent}"
    for part in ("ttft", "text4k", "ids")
    for percent in (f"p{each}" for each in PERCENTILES)
)


@dataclass(frozen=True, slots=True)
class Target:
    """kvplug's number is to be at least (at most, if `lower_is_better`) `limit` times that of the
    best of `peers`; best of all is a limit of 1.
    """

    metric: str
    contestant: str
    peers: Sequence[str]
    limit: float
    lower_is_better: bool = False

    def row(self, summary: Mapping[str, Mapping[str, float]]) -> dict[str, Any] | None:
        """How it came out; None where a number is missing."""
        ours = summary.get(self.contestant, {}).get(self.metric)
        known = {
            peer: value
            for peer in self.peers
            if (value := summary.get(peer, {}).get(self.metric)) is not None
        }
        if ours is None or not known:
            return None
        best = (min if self.lower_is_better else max)(known, key=lambda peer: known[peer])
        ratio = ours / known[best] if known[best] else math.inf
        met = ratio <= self.limit if self.lower_is_better else ratio >= self.limit
        return {
            "metric": self.metric,
            "contestant": self.contestant,
            "kvplug": round(ours, 4),
            "peer": round(known[best], 4),
            "peer_name": best,
            "ratio": round(ratio, 3),
            "limit": self.limit,
            "met": met,
        }


def _peers(mode: str) -> list[str]:
    return [each.name for each in CONTESTANTS if each.is_peer and each.mode == mode]


def _targets() -> Iterable[Target]:
    for ours, mode in (("kvplug_kv", "kv"), ("kvplug_round_robin", "round_robin")):
        peers = _peers(mode)
        yield Target("added_p50_ids", ours, peers, 1.5, lower_is_better=True)
        for rate in ("", "many_"):
            yield Target(f"{rate}rps_per_cpu_s", ours, peers, 0.5)
            yield Target(f"{rate}chunks_per_cpu_s", ours, peers, 0.5)
    everybody = [each.name for each in CONTESTANTS if each.is_peer]
    yield Target("cached_share", "kvplug_kv", everybody, 1.0)
    yield Target("ttft_p90", "kvplug_kv", everybody, 1.0, lower_is_better=True)
    yield Target("added_p50_text4k", "kvplug_kv", ["vllm_kv_aware"], 1.5, lower_is_better=True)


TARGETS: Final = tuple(_targets())


class Results:
    """The rounds so far."""

    def __init__(self, folder: Path, tokenize_ms: Mapping[str, float]) -> None:
        self._path = folder / RESULT
        self._tokenize_ms = tokenize_ms
        self._rounds: dict[str, list[dict[str, float]]] = {}
        self.failed: dict[str, int] = {}

    def add(self, name: str, measured: Measured) -> None:
        """One router's round."""
        self._rounds.setdefault(name, []).append(measured.numbers)
        self.failed[name] = self.failed.get(name, 0) + measured.failed

    def rounds(self, name: str) -> list[dict[str, float]]:
        """Of one router, without what it adds."""
        return self._rounds[name]

    def summary(self) -> dict[str, dict[str, float]]:
        """Medians over the rounds, with what each router adds to the client's own turns."""
        rounds = {name: self._with_added(each) for name, each in self._rounds.items()}
        return {name: _over(each, median) for name, each in rounds.items()}

    def targets(self) -> list[dict[str, Any]]:
        """Of those that can be judged."""
        summary = self.summary()
        return [row for target in TARGETS if (row := target.row(summary)) is not None]

    def write(self, about: Mapping[str, Any]) -> None:
        """All of it."""
        rounds = {name: self._with_added(each) for name, each in self._rounds.items()}
        routers = {
            name: {
                metric: {"value": value, "low": low[metric], "high": high[metric]}
                for metric, value in _over(each, median).items()
            }
            | {"failed": self.failed[name]}
            for name, each in rounds.items()
            for low, high in [(_over(each, min), _over(each, max))]
        }
        content = {
            **about,
            "tokenize_ms_text4k": dict(self._tokenize_ms),
            "routers": routers,
            "targets": self.targets(),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(_rounded(content), indent=1) + "\n")

    def _with_added(self, rounds: Sequence[dict[str, float]]) -> list[dict[str, float]]:
        """Each beside the direct round of its time: the machine's speed drifts."""
        return [
            each | _added(each, direct)
            for each, direct in zip(rounds, self._rounds.get(DIRECT, []), strict=False)
        ]


def _added(numbers: Mapping[str, float], direct: Mapping[str, float]) -> dict[str, float]:
    return {
        f"added_p{percent}_{part}": numbers[key] - direct[key]
        for part in ("text4k", "ids")
        for percent in PERCENTILES
        if (key := f"{part}_p{percent}") in numbers
    }


def _over(
    rounds: Sequence[Mapping[str, float]], choose: Callable[[list[float]], float]
) -> dict[str, float]:
    return {key: choose([each[key] for each in rounds]) for key in (rounds[0] if rounds else ())}


def _rounded(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _rounded(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_rounded(each) for each in content]
    return float(f"{content:.5g}") if isinstance(content, float) else content


def print_results(console: Console, results: Results, contestants: Sequence[Contestant]) -> None:
    """A row for each router, percentiles, and the targets."""
    summary = results.summary()
    rows = [each.name for each in contestants if each.name in summary]
    _print_table(console, "", COLUMNS, rows, summary, results.failed)
    details = [(name, name.replace("_", " ") + ", ms", ".1f") for name in DETAILS]
    _print_table(console, "percentiles, of TTFT", details, rows, summary, results.failed)
    for row in results.targets():
        verdict = "met   " if row["met"] else "MISSED"
        console.print(
            f"{verdict} {row['contestant']} {row['metric']}: {row['kvplug']:,.4g}, "
            f"{row['peer_name']} {row['peer']:,.4g}: {row['ratio']:.2f} x (limit {row['limit']:g})",
            highlight=False,
        )


def _print_table(
    console: Console,
    title: str,
    columns: Sequence[tuple[str, str, str]],
    rows: Sequence[str],
    summary: Mapping[str, Mapping[str, float]],
    failed: Mapping[str, int],
) -> None:
    table = Table("router", *(label for _, label, _ in columns), "failed", title=title)
    for name in rows:
        numbers = summary[name]
        cells = [format(numbers[key], form) if key in numbers else "-" for key, _, form in columns]
        table.add_row(name, *cells, str(failed[name]))
    console.print(table)
