"""`make sim-sweep`: is kv, as it comes, beaten by its cost in blocks with the best weight?

usage: python -m tests.benchmarks.sim_sweep [--only PART,PART] [--seeds N] [--requests N]

Scenarios x loads, in virtual time. Loads: closed loops of 1, 4 and 12 clients per engine, then
requests at random times at 50, 80 and 95 % of the best throughput that any policy reached in a
loop. The ratio of a cell is kv's mean TTFT, a mean over seeds, over that of the best of WEIGHTS,
which is chosen cell by cell and with hindsight. The default was developed with other seeds of these
scenarios; those whose names begin with HELD_OUT were written down afterwards, and are apart.

Prints ratios, every cell above LIMIT, geometric means by policy and by load, how much runs differ
from seed to seed, and how much equal requests at equal times differ with how ties fall. Writes
bench-results/sim-sweep.json; a part (--only, of names of scenarios) to sim-sweep-part.json:

    {"cells": {"SCENARIO, LOAD": {"ratio", "best": policy, "difference_ms": [mean, half interval],
                                  "policies": {policy: {metric: [of each seed]}}}},
     "ratio": {"geometric_mean", "worst", "num_cells", "num_above_limit",
               "of_load": {LOAD: geometric mean}}, "ratio_held_out": the same of the others,
     "times_kv": {policy or "best weight": geometric mean of its mean TTFT over kv's},
     "spread": {"SCENARIO, LOAD": {policy: greatest over least mean TTFT of NUM_SPREAD_SEEDS}},
     "spread_of_ties": the same of NUM_SPREAD_SEEDS ways in which ties fall}
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, geometric_mean
from typing import Any

from rich.console import Console

from kvplug.sim.engine_config import TimeModel
from kvplug.sim.replay.engine import EngineSpec
from kvplug.sim.replay.fleet import Arrivals
from kvplug.sim.replay.report import Summaries, markdown
from kvplug.sim.replay.study import Cell, paired_interval, run_cells
from kvplug.sim.replay.workload import Conversations, Documents, Unshared, WorkloadSpec
from tests.benchmarks.sides import ROOT

RESULTS = ROOT / "bench-results" / "sim-sweep.json"
WEIGHTS = tuple(f"kv:blocks={weight}" for weight in ("0.5", "1", "2", "4", "8", "16", "32"))
POLICIES = ("kv", *WEIGHTS, "cache_aware", "least_loaded")
LOOPS, SHARES = (1, 4, 12), (0.5, 0.8, 0.95)
LIMIT, WARM, NUM_SPREAD_SEEDS = 1.05, 0.2, 10
METRICS = ("ttft_mean_ms", "ttft_p90_ms", "total_mean_ms", "requests_per_s", "hit_share")
SPREAD_OF = ("long documents, set 1.0", "documents, set 1.0", "zipf documents, set 1.0")
TIES_OF = (
    *SPREAD_OF,
    *("20 chats", "16 agents", "hot document, 60% of requests"),
    *("caches 4:2:1:1, set 1.0", "speeds 4:2:1:1, set 0.8"),
)
TIES_POLICIES = ("kv", "kv:blocks=1", "kv:blocks=4", "cache_aware")
HELD_OUT = "held out"
SPREAD_POLICIES = (
    "kv",
    "kv:blocks=1",
    "kv:blocks=4",
    "kv:blocks=16",
    "cache_aware",
    "least_loaded",
)

console = Console(width=170, highlight=False)

Fleet = tuple[EngineSpec, ...]


def fleet(*caches: int, speeds: Sequence[float] = ()) -> Fleet:
    """Engines with caches of as many blocks, 20,000 prompt tokens/s times their speed."""
    return tuple(
        EngineSpec(num_blocks=num_blocks, time_model=TimeModel(prefill_tokens_per_s=20_000 * speed))
        for num_blocks, speed in zip(caches, speeds or [1.0] * len(caches), strict=True)
    )


FOUR, LONG = fleet(*[1000] * 4), fleet(2000, 2000)
EIGHT, UNEQUAL = fleet(*[1500] * 8), fleet(2000, 1000, 500, 500)
UNEVEN = fleet(*[1000] * 4, speeds=(2.0, 1.0, 0.5, 0.5))


def documents(engines: Fleet, working_set: float, tokens: int, **more: Any) -> Documents:
    """As many documents as fill `working_set` times the fleet's cache."""
    capacity = sum(spec.num_blocks * spec.block_size for spec in engines)
    count = max(1, round(working_set * capacity / tokens))
    lengths: dict[str, Any] = {"document": tokens, "own": (16, 64), "answer": 8, **more}
    return Documents(num_documents=count, **lengths)


def scenarios() -> dict[str, tuple[Fleet, WorkloadSpec]]:
    """{name: (engines, requests)}."""
    developed_with = {
        **_of_documents(), **_of_chats(), **_of_one_prefix(), **_of_unequal_engines()
    }  # fmt: skip
    held_out = {f"{HELD_OUT}: {name}": each for name, each in _held_out().items()}
    return {**developed_with, **held_out}


def _of_documents() -> dict[str, tuple[Fleet, WorkloadSpec]]:
    found: dict[str, tuple[Fleet, WorkloadSpec]] = {}
    for size in (0.5, 0.8, 1.0, 1.5, 2.0, 3.0):
        found[f"documents, set {size}"] = FOUR, documents(FOUR, size, 2000)
    for size in (0.5, 1.0, 2.0):
        long_answer = documents(FOUR, size, 2000, answer=(32, 128))
        found[f"documents, long answers, set {size}"] = FOUR, long_answer
        found[f"long documents, set {size}"] = LONG, documents(LONG, size, 6000, answer=1)
    for size in (1.0, 2.0):
        found[f"zipf documents, set {size}"] = FOUR, documents(FOUR, size, 2000, zipf=1.0)
    found["short documents, set 1.0"] = FOUR, documents(FOUR, 1.0, 400, own=(100, 300), answer=32)
    mixed: dict[str, Any] = {"document": (500, 4500), "own": (16, 400), "answer": (1, 100)}
    for size in (0.7, 1.4):
        recipe = documents(EIGHT, size, 2500, zipf=0.7, system=320, **mixed)
        found[f"mixed documents on eight engines, set {size}"] = EIGHT, recipe
    return found


def _of_chats() -> dict[str, tuple[Fleet, WorkloadSpec]]:
    """With more clients than chats, a turn may come before the answer of the last."""
    chats = {
        f"{live} chats": Conversations(num_live=live, num_turns=10, turn=250, answer=60, system=480)
        for live in (10, 20, 40, 80)
    }
    agents = Conversations(num_live=16, num_turns=25, turn=120, answer=24, system=1600)
    return {name: (FOUR, chat) for name, chat in {**chats, "16 agents": agents}.items()}


def _of_one_prefix() -> dict[str, tuple[Fleet, WorkloadSpec]]:
    hot = {
        f"hot document, {share:.0%} of requests": Documents(
            num_documents=30, document=2000, own=(100, 300), answer=16, hot_share=share
        )
        for share in (0.3, 0.6, 0.95)
    }
    one = Documents(num_documents=1, document=2000, own=(200, 600), answer=16)
    unshared = {
        "unshared": Unshared(prompt=1500, answer=32),
        "unshared, mixed lengths": Unshared(prompt=(100, 5000), answer=(1, 100)),
    }
    every: dict[str, WorkloadSpec] = {**hot, "one prefix": one, **unshared}
    return {name: (FOUR, recipe) for name, recipe in every.items()}


def _of_unequal_engines() -> dict[str, tuple[Fleet, WorkloadSpec]]:
    return {
        "caches 4:2:1:1, set 0.6": (UNEQUAL, documents(UNEQUAL, 0.6, 2000)),
        "caches 4:2:1:1, set 1.0": (UNEQUAL, documents(UNEQUAL, 1.0, 2000)),
        "speeds 4:2:1:1, set 0.8": (UNEVEN, documents(UNEVEN, 0.8, 2000)),
        "speeds 4:2:1:1, unshared": (UNEVEN, Unshared(prompt=1500, answer=32)),
    }


def _held_out() -> dict[str, tuple[Fleet, WorkloadSpec]]:
    three, six = fleet(*[1200] * 3), fleet(*[800] * 6)
    caches, speeds = fleet(1800, 600), fleet(*[1000] * 3, speeds=(3.0, 1.0, 1.0))
    chats = Conversations(num_live=30, num_turns=6, turn=400, answer=100, system=200)
    agents = Conversations(num_live=24, num_turns=20, turn=150, answer=50, system=800)
    hot = Documents(num_documents=50, document=1500, own=(50, 400), answer=24, hot_share=0.5)
    return {
        "documents of 3,000, set 0.9": (three, documents(three, 0.9, 3000)),
        "documents of 1,000, set 1.3": (six, documents(six, 1.3, 1000, answer=(16, 200))),
        "documents of 9,000, set 1.2": (three, documents(three, 1.2, 9000, answer=4)),
        "zipf documents of 1,200, set 3.0": (six, documents(six, 3.0, 1200, zipf=1.2)),
        "30 chats": (three, chats),
        "24 agents": (six, agents),
        "hot document, 50% of requests": (six, hot),
        "unshared, 700 tokens": (six, Unshared(prompt=700, answer=100)),
        "caches 3:1, set 0.9": (caches, documents(caches, 0.9, 2000)),
        "speeds 3:1:1, set 1.2": (speeds, documents(speeds, 1.2, 2000)),
    }


@dataclass(frozen=True, slots=True)
class Point:
    """A scenario under a load: `loop` clients per engine, or `share` of `best` requests/s."""

    scenario: str
    engines: Fleet
    workload: WorkloadSpec
    loop: int = 0
    share: float = 0.0
    best: float = 0.0

    def __str__(self) -> str:
        load = f"loop {self.loop}" if self.loop else f"{self.share:.0%}"
        return f"{self.scenario}, {load}"

    def cells(self, policies: Sequence[str], num_seeds: int, *, only_ties: bool) -> Iterator[Cell]:
        """Seed by seed, so that neighbours share their requests; `only_ties`: the seeds are the
        policies' own, the requests and their times are those of one seed.
        """
        arrivals = Arrivals(clients=self.loop * len(self.engines), rate=self.share * self.best)
        for seed in range(num_seeds):
            for policy in policies:
                yield Cell(
                    workload=self.workload, specs=self.engines, policy=policy, arrivals=arrivals,
                    seed=0 if only_ties else seed, warm=WARM, policy_seed=seed,
                )  # fmt: skip


Results = dict[Point, Summaries]


def run_points(
    points: Sequence[Point], policies: Sequence[str], num_seeds: int, *, only_ties: bool = False
) -> Results:
    """All cells of all points at once."""
    cells = [
        cell for point in points for cell in point.cells(policies, num_seeds, only_ties=only_ties)
    ]
    summaries = run_cells(cells, show_progress=sys.stderr.isatty())
    size = num_seeds * len(policies)
    return {
        point: {
            policy: summaries[number * size : (number + 1) * size][place :: len(policies)]
            for place, policy in enumerate(policies)
        }
        for number, point in enumerate(points)
    }


def main() -> None:
    """Loops, then what the best of them makes of random times, then the spread over seeds."""
    options = _options()
    chosen = _chosen(options.only.split(",") if options.only else [""])
    loops = [
        Point(name, engines, replace(workload, num_requests=options.requests), loop=loop)
        for name, (engines, workload) in chosen.items()
        for loop in LOOPS
    ]
    results = run_points(loops, POLICIES, options.seeds)
    results |= run_points(_random_times(results), POLICIES, options.seeds)
    results = dict(sorted(results.items(), key=lambda item: list(chosen).index(item[0].scenario)))
    prone = [p for p in results if p.scenario in SPREAD_OF and p.share >= SHARES[1]]
    spread = spread_of(run_points(prone, SPREAD_POLICIES, NUM_SPREAD_SEEDS) if prone else {})
    prone = [p for p in results if p.scenario in TIES_OF and p.share >= SHARES[1]]
    ties = run_points(prone, TIES_POLICIES, NUM_SPREAD_SEEDS, only_ties=True) if prone else {}
    content = content_of({str(point): cell_of(each) for point, each in results.items()})
    content |= {"spread": spread, "spread_of_ties": spread_of(ties)}
    _print(content)
    path = RESULTS.with_stem("sim-sweep-part") if options.only else RESULTS
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"wrote {path.relative_to(ROOT)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.sim_sweep")
    parser.add_argument("--only", default="", metavar="PART,PART", help="of names of scenarios")
    parser.add_argument("--seeds", type=int, default=3, help="of each cell (3)")
    parser.add_argument("--requests", type=int, default=1000, help="of each cell (1000)")
    return parser.parse_args()


def _chosen(parts: Sequence[str]) -> dict[str, tuple[Fleet, WorkloadSpec]]:
    every = scenarios()
    chosen = {name: each for name, each in every.items() if any(part in name for part in parts)}
    if not chosen:
        raise SystemExit(f"no scenario has {' or '.join(parts)} in its name: {'; '.join(every)}")
    return chosen


def _random_times(loops: Results) -> list[Point]:
    best: dict[str, float] = {}
    for point, summaries in loops.items():
        rates = [fmean(s.requests_per_s for s in each) for each in summaries.values()]
        best[point.scenario] = max(best.get(point.scenario, 0.0), *rates)
    first = {point.scenario: point for point in loops}
    return [
        replace(point, loop=0, share=share, best=best[name])
        for name, point in first.items()
        for share in SHARES
    ]


def cell_of(summaries: Summaries) -> dict[str, Any]:
    """A cell as it goes into the file."""
    ttft = {name: [s.ttft_mean_ms for s in each] for name, each in summaries.items()}
    best = min(WEIGHTS, key=lambda name: fmean(ttft[name]))
    policies = {
        name: {metric: [getattr(s, metric) for s in each] for metric in METRICS}
        for name, each in summaries.items()
    }
    return {
        "ratio": fmean(ttft["kv"]) / fmean(ttft[best]),
        "best": best,
        "difference_ms": paired_interval(ttft["kv"], ttft[best]),
        "policies": policies,
    }


def spread_of(results: Results) -> dict[str, dict[str, float]]:
    """Greatest over least mean TTFT of seeds, of each policy."""
    return {
        str(point): {
            name: max(s.ttft_mean_ms for s in each) / min(s.ttft_mean_ms for s in each)
            for name, each in summaries.items()
        }
        for point, summaries in results.items()
    }


def content_of(cells: dict[str, Any]) -> dict[str, Any]:
    """Cells, and what holds for all of them; those that are held out apart."""
    held_out = {name: cell for name, cell in cells.items() if name.startswith(HELD_OUT)}
    others = {name: cell for name, cell in cells.items() if name not in held_out}
    return {
        "cells": cells,
        "ratio": overall_ratio(others) if others else None,
        "ratio_held_out": overall_ratio(held_out) if held_out else None,
        "times_kv": times_kv(others),
        "times_kv_held_out": times_kv(held_out),
    }


def overall_ratio(cells: dict[str, Any]) -> dict[str, Any]:
    """kv over the best weight, in all cells and of each load."""
    ratios, of_load = [cell["ratio"] for cell in cells.values()], defaultdict(list)
    for name, cell in cells.items():
        of_load[name.rpartition(", ")[2]].append(cell["ratio"])
    return {
        "geometric_mean": geometric_mean(ratios),
        "worst": max(ratios),
        "num_cells": len(ratios),
        "num_above_limit": sum(ratio > LIMIT for ratio in ratios),
        "of_load": {load: geometric_mean(each) for load, each in of_load.items()},
    }


def times_kv(cells: dict[str, Any]) -> dict[str, float]:
    """Mean TTFT over kv's of each other policy, and of the best weight of each cell."""
    ratios = defaultdict(list)
    for cell in cells.values():
        mean = {policy: fmean(each["ttft_mean_ms"]) for policy, each in cell["policies"].items()}
        for policy, ttft in [*mean.items(), ("best weight", mean[cell["best"]])]:
            ratios[policy].append(ttft / mean["kv"])
    return {policy: geometric_mean(each) for policy, each in ratios.items() if policy != "kv"}


def _print(content: dict[str, Any]) -> None:
    cells = content["cells"]
    console.print("mean TTFT, ms, and kv's over that of the best weight\n")
    _print_cells(cells)
    above = [name for name, cell in cells.items() if cell["ratio"] > LIMIT]
    console.print(f"\nabove {LIMIT}\n")
    _print_cells({n: cells[n] for n in sorted(above, key=lambda n: -cells[n]["ratio"])})
    for kind in ("", "_held_out"):
        if overall := content[f"ratio{kind}"]:
            console.print(
                f"\n{overall['num_cells']} cells{kind.replace('_', ' ')}: geometric mean "
                f"{overall['geometric_mean']:.3f}, worst {overall['worst']:.2f}; above {LIMIT}: "
                f"{overall['num_above_limit']}"
            )
            _print_means("kv over the best weight, by load", overall["of_load"])
            _print_means("other policies over kv", content[f"times_kv{kind}"])
    _print_spread("seeds", content["spread"])
    _print_spread("ways in which ties fall, of equal requests", content["spread_of_ties"])


def _print_spread(what: str, spread: dict[str, dict[str, float]]) -> None:
    if spread:
        console.print(f"\ngreatest over least mean TTFT of {NUM_SPREAD_SEEDS} {what}\n")
        rows = [[name, *(f"{ratio:.2f}" for ratio in of.values())] for name, of in spread.items()]
        console.print(markdown(["cell", *next(iter(spread.values()))], rows))


def _print_means(title: str, means: dict[str, float]) -> None:
    console.print(f"\ngeometric mean of mean TTFT, {title}\n")
    console.print(markdown([*means], [[f"{mean:.2f}" for mean in means.values()]]))


def _print_cells(cells: dict[str, Any]) -> None:
    if not cells:
        return
    columns = ("kv", "kv:blocks=1", "cache_aware", "least_loaded")
    header = ["cell", *columns, "best weight", "its TTFT", "ratio", "difference"]
    rows = []
    for name, cell in cells.items():
        mean = {policy: fmean(each["ttft_mean_ms"]) for policy, each in cell["policies"].items()}
        difference, half = cell["difference_ms"]
        best = cell["best"]
        row = [name, *(f"{mean[policy]:,.0f}" for policy in columns), best.partition("=")[2]]
        rows.append(
            [
                *row,
                f"{mean[best]:,.0f}",
                f"{cell['ratio']:.2f}",
                f"{difference:+,.1f} ± {half:,.1f}",
            ]
        )
    console.print(markdown(header, rows))


if __name__ == "__main__":
    main()
