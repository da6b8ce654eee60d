"""`make bench-outcome`: what users see with each router, in real time on simulated engines.

usage: python -m tests.benchmarks.outcome [--only NAME[,NAME]] [--seeds N] [--first-seed N]
                                          [--routers NAME[,NAME]] [--traces DIR] [--results DIR]

Each workload (tests/benchmarks/outcome_workloads.py) runs in closed loops, as text and as token
ids, then as text in open loops: Poisson at 50, 80 and 95 % of the best router's closed loop. A case
is named by all of these: docs8_c8, docs8_ids_c8, docs8_p80; --only takes names or their beginnings.
For each seed all routers get the same requests, the same bytes in the same order, in turn; each run
has engines and a router of its own. What is measured is kept in bench-results/outcome.json:

    {case_metric: {"kvplug", "peer": of the best one, "peer_name", "ratio": times better than the
                   peer, "interval": of the ratio, 95 %, "unit"}}
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from rich.console import Console

from examples.launch.errors import LaunchError
from tests.benchmarks.outcome_ideal import ideal_ttft_ms
from tests.benchmarks.outcome_report import Results, best_rps, print_case
from tests.benchmarks.outcome_requests import Ask, Form, tokenize_s_per_byte
from tests.benchmarks.outcome_routers import ROUTERS, Router
from tests.benchmarks.outcome_run import Case, Run, run
from tests.benchmarks.outcome_workloads import Workload, all_workloads
from tests.benchmarks.sides import ROOT

TRACES = ROOT / ".." / "shared" / "traces"
OPEN_LOADS = ("p50", "p80", "p95")

console = Console(width=150)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked for."""

    seeds: Sequence[int]
    routers: Sequence[Router]
    results: Results

    def measure(self, case: Case) -> None:
        """All seeds and routers of a case."""
        self.results.forget(case.name, [router.name for router in self.routers])
        case = replace(case, rate=self._rate_of(case))
        for turn, seed in enumerate(self.seeds):
            self._measure_seed(replace(case, seed=seed), turn)
        self.results.summarize()
        runs = self.results.of(case.name)
        print_case(console, case.name, runs, self._notes(case), self._ideal_ms(case))

    def _measure_seed(self, case: Case, turn: int) -> None:
        asks, digests = case.workload.make(case.seed), set()
        for router in self._in_turn(case, turn):
            done = _run_again_once(case, asks, router)
            digests.add(done.digest)
            self.results.add(done)
            console.print(_line(case.name, done), highlight=False)
        if len(digests) > 1:
            raise SystemExit(f"{case.name}, seed {case.seed}: routers did not get the same bytes")

    def _rate_of(self, case: Case) -> float:
        """Requests per second of an open loop, 0 of a closed one."""
        workload = case.workload
        if case.load not in OPEN_LOADS:
            return 0.0
        if others := self.results.of(case.name):  # of routers that are not measured again
            return others[0].rate
        closed = (Case(workload, f"c{number}", "text").name for number in workload.clients)
        runs = [run for name in closed for run in self.results.of(name)]
        if not runs:
            raise SystemExit(f"{workload.name}: measure its closed loops before its open ones")
        return best_rps(runs) * int(case.load[1:]) / 100

    def _in_turn(self, case: Case, turn: int) -> list[Router]:
        able = [router for router in self.routers if case.form not in router.refuses]
        turn %= max(1, len(able))
        return able[turn:] + able[:turn]

    def _notes(self, case: Case) -> list[str]:
        asks = case.workload.make(self.seeds[0])
        ms = 1e3 * tokenize_s_per_byte() * fmean(len(ask.body("text")) for ask in asks)
        return [
            f"the first {case.workload.num_warm_up} of {len(asks)} requests do not count",
            *([f"tokenizing takes {ms:.1f} ms a prompt"] if case.form == "text" else []),
            *(
                f"{router.name} is missing: {router.refuses[case.form]}"
                for router in self.routers
                if case.form in router.refuses
            ),
        ]

    def _ideal_ms(self, case: Case) -> float | None:
        workload = case.workload
        if not (workload.is_bound and case.rate):
            return None
        return fmean(
            ideal_ttft_ms(
                workload.make(seed),
                num_engines=workload.num_engines,
                num_warm_up=workload.num_warm_up,
                rate=case.rate,
                seed=seed,
            )
            for seed in self.seeds
        )


def main() -> None:
    """Measure, print, write."""
    options = _options()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    plan = Plan(seeds, _chosen_routers(options.routers), Results(options.results))
    workloads, missing = all_workloads(options.traces.resolve())
    cases = [case for workload in workloads for case in cases_of(workload, options.only)]
    if not cases:
        raise SystemExit(f"--only: no case begins with {options.only!r}")
    for sentence in missing:
        console.print(sentence)
    for case in cases:
        plan.measure(case)


def _run_again_once(case: Case, asks: Sequence[Ask], router: Router) -> Run:
    """Hours of measuring should not end because a port was taken."""
    try:
        return run(case, asks, router)
    except LaunchError as error:
        log_tail = "\n".join(getattr(error, "__notes__", ()))
        console.print(f"{case.name} seed {case.seed} {router.name}, once more: {error}\n{log_tail}")
        return run(case, asks, router)


def cases_of(workload: Workload, only: str) -> Iterator[Case]:
    """Closed loops as text, then as token ids, then open loops; `only`: beginnings of names."""
    closed = [f"c{clients}" for clients in workload.clients]
    plan: Sequence[tuple[Form, Sequence[str]]]
    plan = (("text", closed), ("ids", closed), ("text", OPEN_LOADS))
    for form, loads in plan:
        for load in loads:
            case = Case(workload, load, form)
            if any(case.name.startswith(prefix) for prefix in only.split(",")):
                yield case


def _chosen_routers(names: str) -> list[Router]:
    wanted = names.split(",") if names else [router.name for router in ROUTERS]
    unknown = set(wanted) - {router.name for router in ROUTERS}
    if unknown:
        known = ", ".join(router.name for router in ROUTERS)
        raise SystemExit(f"--routers: expected some of {known}; got {', '.join(sorted(unknown))}")
    return [router for router in ROUTERS if router.name in wanted]


def _line(name: str, done: Run) -> str:
    failed = f", {done.failed} FAILED: {done.failure}" if done.failed else ""
    return (
        f"{name} seed {done.seed} {done.router}: {done.rps:.1f} requests/s, TTFT "
        f"{done.ttft_mean:.0f} ms, cached {done.cached:.1%}, {done.wall_s:.1f} s{failed}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.outcome")
    parser.add_argument("--only", default="", metavar="NAME[,NAME]", help="these cases only")
    parser.add_argument("--seeds", type=_positive, default=5, metavar="N", help="how many (5)")
    parser.add_argument("--first-seed", type=int, default=1, metavar="N", help="the others follow")
    parser.add_argument("--routers", default="", metavar="NAME[,NAME]", help="these only")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of Mooncake traces")
    parser.add_argument("--results", type=Path, default=ROOT / "bench-results", metavar="DIR")
    return parser.parse_args()


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    main()
