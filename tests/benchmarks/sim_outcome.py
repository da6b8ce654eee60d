"""`make sim-outcome`: the requests of `make bench-outcome` in virtual time.

usage: python -m tests.benchmarks.sim_outcome [--only NAME[,NAME]] [--seeds N] [--first-seed N]
                                              [--traces DIR] [--results DIR]

The same prompts, engines and loads, but policies instead of routers, neither HTTP nor tokenizing.
This shows what the decisions are worth; bench-outcome adds what Python and the machine take. An
open loop has the rate at which bench-outcome ran it; those of which --results has no run in
outcome-runs.json are named and skipped.

Prints mean TTFTs. Writes bench-results/sim-outcome.json:

    {CASE: {policy: {"mean", "seeds", "against_first": kv}}}
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console

from kvplug.hashing import BlockHasher, as_tokens
from kvplug.sim.replay.engine import EngineSpec
from kvplug.sim.replay.fleet import Arrivals
from kvplug.sim.replay.report import Summaries, as_json, markdown
from kvplug.sim.replay.study import Cell, run_cells
from kvplug.sim.replay.workload import Request, Workload
from tests.benchmarks import outcome_workloads
from tests.benchmarks.outcome import OPEN_LOADS, TRACES, cases_of
from tests.benchmarks.outcome_report import Results
from tests.benchmarks.outcome_requests import BLOCK_SIZE, Ask
from tests.benchmarks.outcome_run import Case
from tests.benchmarks.outcome_workloads import TIME_MODEL
from tests.benchmarks.sides import ROOT

RESULTS = ROOT / "bench-results"
POLICIES = (
    *("kv", "kv:events=off", "kv:capacity=0", "kv:capacity=0.5", "kv:capacity=2"),
    *("cache_aware", "least_loaded", "round_robin"),
)

console = Console(width=150, highlight=False)


@dataclass(frozen=True, slots=True)
class Asks:
    """The requests of a workload, by its name: small enough to be sent to another process."""

    name: str
    traces: Path

    def of(self) -> outcome_workloads.Workload:
        """The workload itself."""
        found, _ = outcome_workloads.all_workloads(self.traces)
        return next(workload for workload in found if workload.name == self.name)

    def make(self, seed: int) -> Workload:
        """Prompts and answers as blocks."""
        requests = list(map(request_of, self.of().make(seed)))
        return Workload(name=self.name, block_size=BLOCK_SIZE, requests=requests)


_HASHER = BlockHasher(BLOCK_SIZE)


def request_of(ask: Ask) -> Request:
    """As blocks."""
    hashes = _HASHER.sequence_hashes(as_tokens([*ask.tokens, *ask.answer]), 1)
    num_prompt = len(ask.tokens) // BLOCK_SIZE
    num_all = (len(ask.tokens) + ask.max_tokens) // BLOCK_SIZE
    answer_blocks = hashes[num_prompt:num_all]
    return Request(hashes[:num_prompt], len(ask.tokens), ask.max_tokens, answer_blocks)


def main() -> None:
    """Run, print, write."""
    options = _options()
    traces = options.traces.resolve()
    workloads, missing = outcome_workloads.all_workloads(traces)
    for sentence in missing:
        console.print(sentence)
    results = {}
    for case in (case for workload in workloads for case in cases_of(workload, options.only)):
        if case.form == "ids":  # the same in virtual time
            continue
        if arrivals := _arrivals(case, options.results):
            seeds = range(options.first_seed, options.first_seed + options.seeds)
            results[case.name] = run_case(case, arrivals, traces, seeds)
        else:
            console.print(f"{case.name} is skipped: {options.results} has no run of it")
    if results:
        _print(results)
        _write(results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.sim_outcome")
    parser.add_argument("--only", default="", help="cases whose names begin so")
    parser.add_argument("--seeds", type=int, default=5, help="how many (5)")
    parser.add_argument("--first-seed", type=int, default=1, help="N and up (1)")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of Mooncake's traces")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of bench-outcome's")
    return parser.parse_args()


def _arrivals(case: Case, folder: Path) -> Arrivals | None:
    """None for an open loop that has no rate yet."""
    if case.load not in OPEN_LOADS:
        return Arrivals(clients=int(case.load[1:]))
    runs = Results(folder).of(case.name)
    clients, num_warm_up = max(case.workload.clients), case.workload.num_warm_up
    return Arrivals(clients=clients, rate=runs[-1].rate, num_closed=num_warm_up) if runs else None


def run_case(case: Case, arrivals: Arrivals, traces: Path, seeds: Sequence[int]) -> Summaries:
    """{policy: summaries of the seeds}."""
    workload = case.workload
    num_blocks = workload.cache_tokens // BLOCK_SIZE
    spec = EngineSpec(num_blocks=num_blocks, block_size=BLOCK_SIZE, time_model=TIME_MODEL)
    cells = [
        Cell(
            workload=Asks(workload.name, traces), specs=(spec,) * workload.num_engines,
            policy=policy, arrivals=arrivals, seed=seed,
            warm=workload.num_warm_up / len(workload.make(seed)),
        )
        for seed in seeds
        for policy in POLICIES
    ]  # fmt: skip
    summaries = run_cells(cells, show_progress=sys.stderr.isatty())
    return {policy: summaries[at :: len(POLICIES)] for at, policy in enumerate(POLICIES)}


def _print(results: dict[str, Summaries]) -> None:
    rows = []
    for name, of_policy in results.items():
        means = {policy: fmean(s.ttft_mean_ms for s in of_policy[policy]) for policy in POLICIES}
        cells = [f"{mean:.1f}" for mean in means.values()]
        kv = [summary.ttft_mean_ms for summary in of_policy["kv"]]
        cached = fmean(summary.hit_share for summary in of_policy["kv"])
        rows.append([name, *cells, f"{min(kv):.0f}-{max(kv):.0f}", f"{cached:.1%}"])
    header = ["mean TTFT, ms", *POLICIES, "kv, seed by seed", "kv, cached"]
    console.print(markdown(header, rows))


def _write(results: dict[str, Summaries]) -> None:
    path = RESULTS / "sim-outcome.json"
    path.parent.mkdir(exist_ok=True)
    content = {name: as_json(of_policy) for name, of_policy in results.items()}
    path.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
