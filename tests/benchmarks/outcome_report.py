"""What `make bench-outcome` prints and keeps.

In:  runs.   Out: a table per case; bench-results/outcome.json, and all runs in outcome-runs.json.

Both files keep what earlier commands measured, but for the cases that are measured again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.outcome_routers import ROUTERS
from tests.benchmarks.outcome_run import Run, case_name
from tests.benchmarks.outcome_stats import JUDGED, UNITS, Comparison, compare, num_failed

RUNS, SUMMARY = "outcome-runs.json", "outcome.json"
MOST_CORES = 0.85
TARGET, OF_IDEAL = 1.3, 1.1
"""In open loops at 80 and 95 % where caches are short: times better than the best peer, or of what
ideal hits would give."""


class Results:
    """The runs so far, by case, router and seed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[tuple[str, str, int], Run] = {}
        path = folder / RUNS
        for entry in json.loads(path.read_text()) if path.exists() else []:
            self._put(Run(**entry))

    def add(self, run: Run) -> None:
        """Keep a run, on disk, too."""
        self._put(run)
        self._write(RUNS, [run.as_json() for run in self._runs.values()])

    def forget(self, case: str, routers: Iterable[str]) -> None:
        """A case is measured anew: numbers of today and of yesterday must not be paired."""
        for key in [key for key in self._runs if key[0] == case and key[1] in set(routers)]:
            del self._runs[key]

    def summarize(self) -> None:
        """Write how kvplug compares."""
        self._write(SUMMARY, self._summary())

    def of(self, case: str) -> list[Run]:
        """The runs of a case."""
        return [run for (name, _, _), run in self._runs.items() if name == case]

    def _put(self, run: Run) -> None:
        self._runs[case_name(run.workload, run.form, run.load), run.router, run.seed] = run

    def _write(self, name: str, content: object) -> None:
        self._folder.mkdir(exist_ok=True, parents=True)
        (self._folder / name).write_text(json.dumps(content, indent=1) + "\n")

    def _summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = {}
        for case in dict.fromkeys(case for case, _, _ in self._runs):
            runs = self.of(case)
            for comparison in filter(None, (compare(runs, metric) for metric in UNITS)):
                summary[f"{case}_{comparison.metric}"] = comparison.as_json()
        return summary


def best_rps(runs: Iterable[Run]) -> float:
    """Of closed loops: the best router's mean over the seeds; 0 without runs."""
    by_router: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        by_router.setdefault((run.load, run.router), []).append(run.rps)
    return max(map(fmean, by_router.values()), default=0.0)


def print_case(
    console: Console, case: str, runs: Sequence[Run], notes: Sequence[str], ideal_ms: float | None
) -> None:
    """A row per router, how kvplug compares, and what is to be known."""
    console.print(_table(case, runs))
    for metric in UNITS:
        comparison = compare(runs, metric)
        if comparison is not None:
            judged = f": {comparison.verdict}" if metric in JUDGED else ""
            console.print(f"  {_sentence(comparison)}{judged}", highlight=False)
    if ideal_ms is not None:
        console.print(f"  {_ideal_sentence(runs, ideal_ms)}", highlight=False)
    for note in (*notes, *_warnings(runs)):
        console.print(f"  {note}", highlight=False)


def _warnings(runs: Sequence[Run]) -> list[str]:
    limit = MOST_CORES * (os.cpu_count() or 1)
    busy = {run.router: sum(run.cores.values()) for run in runs}
    return [
        f"with {router} all cores were busy ({cores:.1f}): its numbers are those of this machine"
        for router, cores in busy.items()
        if cores > limit
    ]


def _table(case: str, runs: Sequence[Run]) -> Table:
    seeds = len({run.seed for run in runs})
    rate = f", {runs[0].rate:.1f} requests/s" if runs[0].rate else ""
    table = Table(title=f"{case}{rate}: means of {seeds} seeds (spread)")
    columns = ("requests/s", "TTFT mean, ms", "p90", "whole, ms", "cached", "failed")
    for name in ("router", *columns, "cores: router, engines, client", "late, ms"):
        table.add_column(name, justify="left" if name == "router" else "right")
    for router in (router.name for router in ROUTERS):
        if of_router := [run for run in runs if run.router == router]:
            table.add_row(router, *_cells(of_router))
    return table


def _cells(runs: Sequence[Run]) -> list[str]:
    cores = [fmean(run.cores[part] for run in runs) for part in ("router", "engines", "client")]
    return [
        _spread([run.rps for run in runs], ".1f"),
        _spread([run.ttft_mean for run in runs], ".0f"),
        f"{fmean(run.ttft_p90 for run in runs):.0f}",
        f"{fmean(run.total_mean for run in runs):.0f}",
        f"{fmean(run.cached for run in runs):.1%}",
        str(num_failed(runs, runs[0].router)),
        ", ".join(f"{number:.2f}" for number in cores),
        f"{fmean(run.late_ms for run in runs):.1f}",
    ]


def _spread(values: Sequence[float], form: str) -> str:
    return f"{fmean(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def _sentence(comparison: Comparison) -> str:
    low, high = comparison.interval
    return (
        f"{comparison.metric}: {comparison.ratio:.2f} times better than {comparison.peer_name} "
        f"({low:.2f} to {high:.2f})"
    )


def _ideal_sentence(runs: Sequence[Run], ideal_ms: float) -> str:
    comparison = compare(runs, "ttft_mean")
    if comparison is None:
        return f"ideal hits would give a mean TTFT of {ideal_ms:.0f} ms in simulation"
    is_reached = comparison.ratio >= TARGET or comparison.kvplug <= OF_IDEAL * ideal_ms
    return (
        f"ideal hits would give a mean TTFT of {ideal_ms:.0f} ms in simulation; kvplug has "
        f"{comparison.kvplug:.0f}; {TARGET} times better than the best peer, or within "
        f"{OF_IDEAL - 1:.0%} of ideal: {'reached' if is_reached else 'MISSED'}"
    )
