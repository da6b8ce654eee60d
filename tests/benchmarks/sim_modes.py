"""`make sim-modes`: every router mode and credit in virtual time, a row each.

usage: python -m tests.benchmarks.sim_modes [--only NAME[,NAME]] [--seeds N]

The router itself decides, on engines that replay requests (kvplug/sim/replay). Chats, documents and
unrelated prompts are those of bench-outcome, in a closed loop; a session is a chat or a document.
`unrelated_open` has these prompts at random times, at 80 % of the throughput of the loop. `speeds`
has the documents on engines of which two are half as fast. `small` has them on engines with half
the cache, `host` on the same with host memory, which has room for all of them and loads a block in
a fifth of the time to compute it. tests/benchmarks/sim_labels.py adds pools, labels and taints.

Prints a table for each workload: means over seeds, and TTFT from seed to seed. Writes
bench-results/sim-modes.json:

    {WORKLOAD: {policy: {"mean", "seeds", "against_first": kv}}, "labels": {NAME: [row, ...]}}
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from kvplug.sim.replay.engine import EngineSpec
from kvplug.sim.replay.fleet import Arrivals
from kvplug.sim.replay.report import Summaries, as_json, markdown, means_of
from kvplug.sim.replay.study import Cell, run_cells
from kvplug.sim.replay.workload import Workload
from tests.benchmarks import sim_labels
from tests.benchmarks.outcome_requests import BLOCK_SIZE, Ask
from tests.benchmarks.outcome_workloads import TIME_MODEL
from tests.benchmarks.sides import ROOT
from tests.benchmarks.sim_outcome import Asks, request_of

RESULTS = ROOT / "bench-results" / "sim-modes.json"
_NO_TRACES = Path()
_PROMPT_OF_SESSION = 64

MODES: Final = (
    "kv",
    *(f"kv:mode={mode}" for mode in ("round_robin", "random", "least_loaded", "power_of_two")),
    *(f"kv:mode={mode}" for mode in ("rendezvous_hash", "direct")),
)
COSTS: Final = (
    *("kv:events=off", "kv:temperature=0.3"),
    *("kv:device_credit=0.5", "kv:device_credit_decay=1", "kv:request_weight=1"),
    *("kv:blocks=1", "kv:blocks=1:device_credit_decay=1", "kv:blocks=1:request_weight=8"),
)
HOST: Final = (
    *("kv", "kv:host_credit=0", "kv:host_credit=0.75", "kv:host_credit=1"),
    *("kv:blocks=1", "kv:blocks=1:host_credit=0", "kv:mode=round_robin"),
)
_SMALL: Final = ("kv", "kv:blocks=1", "kv:mode=round_robin")

console = Console(width=150, highlight=False)


@dataclass(frozen=True, slots=True)
class Sessions:
    """The requests of a workload of bench-outcome, each with the name of its session."""

    name: str

    def make(self, seed: int) -> Workload:
        """Prompts and answers as blocks."""
        requests = []
        for ask in Asks(self.name, _NO_TRACES).of().make(seed):
            request = request_of(ask)
            request.session = session_of(ask)
            requests.append(request)
        return Workload(name=self.name, block_size=BLOCK_SIZE, requests=requests)


def session_of(ask: Ask) -> str:
    """A chat by its first question; else by how the prompt begins."""
    if isinstance(ask.text, str):
        return str(ask.tokens[:_PROMPT_OF_SESSION])
    return next(message["content"] for message in ask.text if message["role"] == "user")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A workload of bench-outcome, on engines that may be of other speeds, or have host memory."""

    name: str
    workload: str
    policies: Sequence[str] = (*MODES, *COSTS)
    speeds: Sequence[float] = ()
    rate: float = 0.0
    cache_share: float = 1.0
    host_blocks: int = 0

    def cells(self, num_seeds: int) -> list[Cell]:
        """Seed by seed."""
        workload = Asks(self.workload, _NO_TRACES).of()
        loop = Arrivals(clients=max(workload.clients))
        arrivals = Arrivals(rate=self.rate) if self.rate else loop
        return [
            Cell(
                workload=Sessions(self.workload), specs=self.specs(), policy=policy,
                arrivals=arrivals, seed=seed, warm=workload.num_warm_up / len(workload.make(seed)),
            )
            for seed in range(1, num_seeds + 1)
            for policy in self.policies
        ]  # fmt: skip

    def specs(self) -> tuple[EngineSpec, ...]:
        """An engine each."""
        workload = Asks(self.workload, _NO_TRACES).of()
        tokens_per_s = TIME_MODEL.prefill_tokens_per_s
        spec = EngineSpec(
            num_blocks=int(self.cache_share * workload.cache_tokens) // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            host_blocks=self.host_blocks,
            host_load_s=0.2 * BLOCK_SIZE / tokens_per_s if self.host_blocks else 0.0,
            time_model=TIME_MODEL,
        )
        speeds = self.speeds or (1.0,) * workload.num_engines
        return tuple(replace(spec, time_model=_at_speed(speed)) for speed in speeds)


def _at_speed(speed: float) -> Any:
    return replace(
        TIME_MODEL,
        prefill_tokens_per_s=speed * TIME_MODEL.prefill_tokens_per_s,
        decode_base_s=TIME_MODEL.decode_base_s / speed,
        decode_per_sequence_s=TIME_MODEL.decode_per_sequence_s / speed,
        step_overhead_s=TIME_MODEL.step_overhead_s / speed,
    )


SCENARIOS: Final = (
    Scenario(name="chats", workload="conversations"),
    Scenario(name="documents", workload="docs32_short"),
    Scenario(name="unrelated", workload="unshared"),
    Scenario(name="unrelated_open", workload="unshared", rate=13.0),
    Scenario(name="speeds", workload="docs32_short", speeds=(1.0, 1.0, 0.5, 0.5)),
    Scenario(name="small", workload="docs32_short", policies=_SMALL, cache_share=0.5),
    Scenario(
        name="host", workload="docs32_short", policies=HOST, cache_share=0.5, host_blocks=4608
    ),
)


def main() -> None:
    """Run, print, write."""
    options = _options()
    only = options.only.split(",") if options.only else [*(s.name for s in SCENARIOS), "labels"]
    content: dict[str, Any] = {}
    for scenario in (each for each in SCENARIOS if each.name in only):
        results = run_scenario(scenario, options.seeds)
        console.print(f"\n{scenario.name}\n\n{table_of(results)}")
        content[scenario.name] = as_json(results)
    if "labels" in only:
        content["labels"] = sim_labels.run(options.seeds)
        console.print(f"\n{sim_labels.tables_of(content['labels'])}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"\nwrote {RESULTS.relative_to(ROOT)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.sim_modes")
    parser.add_argument("--only", default="", help="names of workloads, or labels")
    parser.add_argument("--seeds", type=int, default=3, help="how many (3)")
    return parser.parse_args()


def run_scenario(scenario: Scenario, num_seeds: int, num_processes: int | None = None) -> Summaries:
    """{policy: summaries of the seeds}."""
    cells = scenario.cells(num_seeds)
    summaries = run_cells(cells, num_processes, show_progress=sys.stderr.isatty())
    number = len(scenario.policies)
    return {policy: summaries[at::number] for at, policy in enumerate(scenario.policies)}


def table_of(results: Summaries) -> str:
    """A row per policy."""
    rows = []
    for policy, summaries in results.items():
        mean = means_of(summaries)
        seeds = [summary.ttft_mean_ms for summary in summaries]
        rows.append([
            policy, f"{mean['hit_share']:.1%}", f"{mean['ttft_mean_ms']:,.0f}",
            f"{min(seeds):,.0f}-{max(seeds):,.0f}", f"{mean['ttft_p90_ms']:,.0f}",
            f"{mean['requests_per_s']:.1f}",
        ])  # fmt: skip
    header = ["policy", "cached", "TTFT mean, ms", "seed by seed", "p90", "requests/s"]
    return markdown(header, rows)


if __name__ == "__main__":
    main()
