"""`make sim-sync`: what replica sync is worth, in virtual time.

usage: python -m tests.benchmarks.sim_sync [--only NAME[,NAME]] [--seeds N] [--requests N]

One fleet of eight simulated engines, requests at random times, each to one of several routers by
chance (kvplug/sim/replay/replicas.py). One router (`kv`) is the ideal. Routers exchange load by the
code that runs over NATS, with messages that take so long and are lost so often. `cut off`: nobody
hears anybody from 5 s on, and own load counts for all.

Prints a table for each workload, means over seeds, TTFT against the ideal with its 95 % interval,
seed by seed. Writes bench-results/sim-sync.json:

    {WORKLOAD: {policy: {"mean", "seeds", "against_first": kv}}}
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from typing import Any, Final

from rich.console import Console

from kvplug.sim.replay.engine import EngineSpec
from kvplug.sim.replay.fleet import Arrivals
from kvplug.sim.replay.report import Summaries, against, as_json, markdown, means_of
from kvplug.sim.replay.study import Cell, run_cells
from kvplug.sim.replay.workload import Conversations, Documents, Unshared, WorkloadSpec
from tests.benchmarks.sides import ROOT

RESULTS = ROOT / "bench-results" / "sim-sync.json"
NUM_ENGINES: Final = 8
SPEC: Final = EngineSpec(num_blocks=8000)

# What it is called, and the policy.
IDEAL: Final = ("one router", "kv")
WORTH: Final = (
    IDEAL,
    ("2, no sync", "kv:routers=2"),
    ("2, 1 ms late", "kv:routers=2:sync_ms=1"),
    ("4, no sync", "kv:routers=4"),
    ("4, 1 ms late", "kv:routers=4:sync_ms=1"),
)
LATE: Final = (
    ("4, 5 ms late", "kv:routers=4:sync_ms=5"),
    ("4, 20 ms late", "kv:routers=4:sync_ms=20"),
    ("4, 50 ms late", "kv:routers=4:sync_ms=50"),
    ("4, 1 ms, 10 % lost", "kv:routers=4:sync_ms=1:sync_loss=0.1"),
    ("4, cut off", "kv:routers=4:sync_ms=1:sync_s=5"),
)

console = Console(width=150, highlight=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Requests at a rate that eight engines can serve, four fifths of it or so."""

    name: str
    workload: WorkloadSpec
    rate: float
    rows: tuple[tuple[str, str], ...] = WORTH

    def cells(self, num_seeds: int, num_requests: int) -> list[Cell]:
        """Seed by seed."""
        return [
            Cell(
                workload=replace(self.workload, num_requests=num_requests),
                specs=(SPEC,) * NUM_ENGINES, policy=policy,
                arrivals=Arrivals(rate=self.rate), seed=seed, warm=0.2,
            )
            for seed in range(1, num_seeds + 1)
            for _, policy in self.rows
        ]  # fmt: skip


SCENARIOS: Final = (
    Scenario(
        name="documents",
        workload=Documents(
            num_documents=150, document=(4000, 8000), own=(100, 400), answer=(50, 300), zipf=0.8
        ),
        rate=45.0,
        rows=(*WORTH, *LATE),
    ),
    Scenario(
        name="unrelated",
        workload=Unshared(prompt=(500, 4000), answer=(50, 300)),
        rate=45.0,
        rows=(*WORTH, *LATE),
    ),
    Scenario(
        name="chats",
        workload=Conversations(num_live=200, num_turns=8, turn=500, answer=200, system=1000),
        rate=60.0,
    ),
)


def main() -> None:
    """Run, print, write."""
    options = _options()
    only = options.only.split(",") if options.only else [each.name for each in SCENARIOS]
    content: dict[str, Any] = _written_before() if options.only else {}
    for scenario in (each for each in SCENARIOS if each.name in only):
        results = run_scenario(scenario, options.seeds, options.requests)
        console.print(f"\n{scenario.name}, {scenario.rate:g} requests/s\n\n{table_of(results)}")
        content[scenario.name] = as_json(results)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"\nwrote {RESULTS.relative_to(ROOT)}")


def _written_before() -> dict[str, Any]:
    """Of other workloads."""
    content: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return content


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.sim_sync")
    parser.add_argument("--only", default="", help="names of workloads")
    parser.add_argument("--seeds", type=int, default=3, help="how many (3)")
    parser.add_argument("--requests", type=int, default=1500, help="of each replay (1500)")
    return parser.parse_args()


def run_scenario(
    scenario: Scenario, num_seeds: int, num_requests: int, num_processes: int | None = None
) -> Summaries:
    """{row: summaries of the seeds}."""
    cells = scenario.cells(num_seeds, num_requests)
    summaries = run_cells(cells, num_processes, show_progress=sys.stderr.isatty())
    number = len(scenario.rows)
    return {name: summaries[at::number] for at, (name, _) in enumerate(scenario.rows)}


def table_of(results: Summaries) -> str:
    """A row for each."""
    ideal, rows = results[IDEAL[0]], []
    for name, summaries in results.items():
        mean = means_of(summaries)
        more, half = against("ttft_mean_ms", summaries, ideal)
        rows.append([
            name, f"{mean['ttft_mean_ms']:,.0f}", "" if summaries is ideal else f"{more:+,.0f}"
            f" ± {half:,.0f}", f"{mean['ttft_p99_ms']:,.0f}", f"{mean['total_mean_ms']:,.0f}",
            f"{mean['hit_share']:.1%}", f"{mean['imbalance']:.2f}", f"{mean['requests_per_s']:.1f}",
        ])  # fmt: skip
    header = [
        "routers", "TTFT mean, ms", "against one", "p99", "to the last token", "cached",
        "imbalance", "requests/s",
    ]  # fmt: skip
    return markdown(header, rows)


if __name__ == "__main__":
    main()
