"""`make sim-mooncake`: the Mooncake traces under each policy, in virtual time.

usage: python -m tests.benchmarks.sim_mooncake [--traces DIR] [--seeds N] [--requests N]

Four engines, caches of three sizes, blocks of 512 tokens. A seed is a random window of a trace; its
first fifth is not counted. `saturated` is a closed loop of 12 clients per engine; the other loads
replay the window's own arrival times, faster or slower, so that requests come at 50, 80 and 95 % of
the rate at which the best policy answered the same window when saturated.

Prints mean TTFTs, and where kv is worse than another policy by more than the paired 95 % interval.
Writes bench-results/sim-mooncake.json and .png:

    {"TRACE, CACHE tokens, LOAD": {policy: {"mean", "seeds", "against_first": least_loaded}}}
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console

from kvplug.sim.replay import report
from kvplug.sim.replay.engine import EngineSpec
from kvplug.sim.replay.fleet import Arrivals
from kvplug.sim.replay.report import Summaries
from kvplug.sim.replay.study import Cell, run_cells
from kvplug.sim.replay.traces import MOONCAKE_TOKENS, LogWindow
from tests.benchmarks.sides import ROOT

TRACES = ROOT / ".." / "shared" / "traces"
FILES = {"conversation": "conversation_trace.jsonl", "synthetic": "synthetic_trace.jsonl"}
RESULTS = ROOT / "bench-results" / "sim-mooncake.json"
NUM_ENGINES, CLIENTS_PER_ENGINE, WARM = 4, 12, 0.2
CACHE_TOKENS = (400_000, 1_600_000, 6_400_000)
SHARES = (0.5, 0.8, 0.95)
SHARES_SHOWN = [f"{share:.0%}" for share in SHARES]
POLICIES = (
    "least_loaded", "round_robin", "random", "cache_aware", "kv:blocks=1", "kv:blocks=4", "kv"
)  # fmt: skip
LOWER_IS_BETTER = ("ttft_mean_ms", "ttft_p90_ms", "total_mean_ms")

console = Console(width=170, highlight=False)


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the table; `share` of the best throughput, None is saturated."""

    trace: str
    cache_tokens: int
    share: float | None

    @property
    def load(self) -> str:
        return "saturated" if self.share is None else f"{self.share:.0%}"

    def __str__(self) -> str:
        return f"{self.trace}, {self.cache_tokens:,} tokens, {self.load}"

    def cells(self, window: LogWindow, arrivals: list[Arrivals]) -> list[Cell]:
        """Of each seed and policy."""
        spec = EngineSpec(
            num_blocks=self.cache_tokens // MOONCAKE_TOKENS, block_size=MOONCAKE_TOKENS
        )
        return [
            Cell(
                workload=window, specs=(spec,) * NUM_ENGINES, policy=policy,
                arrivals=arrivals[seed], seed=seed, warm=WARM,
            )
            for seed in range(len(arrivals))
            for policy in POLICIES
        ]  # fmt: skip


Results = dict[Setting, Summaries]


def main() -> None:
    """Run, print, write."""
    options = _options()
    windows = {
        name: LogWindow(
            path=options.traces.resolve() / file, kind="mooncake", block_size=MOONCAKE_TOKENS,
            num_requests=options.requests,
        )
        for name, file in FILES.items()
    }  # fmt: skip
    results: Results = {}
    for name, window in windows.items():
        if window.path.exists():
            results |= results_of(name, window, options.seeds)
        else:
            console.print(f"skipped {name}: there is no {window.path.name} in {window.path.parent}")
    if results:
        _print(results)
        _write(results, RESULTS)
        plot(results, RESULTS.with_suffix(".png"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.sim_mooncake")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of Mooncake traces")
    parser.add_argument("--seeds", type=int, default=5, help="windows (5)")
    parser.add_argument("--requests", type=int, default=1000, help="of a window (1000)")
    return parser.parse_args()


def results_of(trace: str, window: LogWindow, num_seeds: int) -> Results:
    """Saturated first: it tells what 100 % are."""
    loop = [Arrivals(clients=CLIENTS_PER_ENGINE * NUM_ENGINES)] * num_seeds
    full = {Setting(trace, cache, None): loop for cache in CACHE_TOKENS}
    results = run_settings(window, full)
    part = {
        Setting(trace, setting.cache_tokens, share): _arrivals(window, summaries, share)
        for setting, summaries in results.items()
        for share in SHARES
    }
    results |= run_settings(window, part)
    order = [Setting(trace, cache, share) for cache in CACHE_TOKENS for share in (*SHARES, None)]
    return {setting: results[setting] for setting in order}


def run_settings(window: LogWindow, settings: dict[Setting, list[Arrivals]]) -> Results:
    """All cells of all settings at once."""
    cells = [cell for s, arrivals in settings.items() for cell in s.cells(window, arrivals)]
    summaries = run_cells(cells, show_progress=sys.stderr.isatty())
    size = len(cells) // len(settings)
    return {
        setting: {
            policy: summaries[number * size : (number + 1) * size][place :: len(POLICIES)]
            for place, policy in enumerate(POLICIES)
        }
        for number, setting in enumerate(settings)
    }


def _arrivals(window: LogWindow, saturated: Summaries, share: float) -> list[Arrivals]:
    """Of each seed: its window at this share of the best policy's throughput."""
    result = []
    for seed, each in enumerate(zip(*saturated.values(), strict=True)):
        requests = window.make(seed).requests
        rate = len(requests) / (requests[-1].arrival_s or 1.0)
        best = max(summary.requests_per_s for summary in each)
        result.append(Arrivals(speed=share * best / rate))
    return result


def _print(results: Results) -> None:
    header = ["mean TTFT, ms", *POLICIES, "kv against least_loaded"]
    rows = []
    for setting, summaries in results.items():
        means = [fmean(s.ttft_mean_ms for s in summaries[policy]) for policy in POLICIES]
        difference, half = report.against(
            "ttft_mean_ms", summaries["kv"], summaries["least_loaded"]
        )
        cells = [f"{mean:,.0f}" for mean in means]
        rows.append([str(setting), *cells, f"{difference:+,.0f} ± {half:,.0f}"])
    console.print(report.markdown(header, rows))
    for line in verdicts(results):
        console.print(line)


def verdicts(results: Results) -> list[str]:
    """Of each other policy: where kv is worse than it beyond the interval."""
    lines = []
    for other in POLICIES[:-1]:
        worse = [
            f"{setting} ({metric} {difference:+.3g} ± {half:.2g})"
            for setting, summaries in results.items()
            for metric in (*LOWER_IS_BETTER, "requests_per_s")
            for difference, half in [report.against(metric, summaries["kv"], summaries[other])]
            if (-difference if metric == "requests_per_s" else difference) > half
        ]
        text = f"kv worse than {other} beyond the interval: {len(worse)} of "
        lines.append(f"{text}{len(results) * (len(LOWER_IS_BETTER) + 1)} comparisons")
        lines += [f"    {line}" for line in worse]
    return lines


def _write(results: Results, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    content = {str(setting): report.as_json(each) for setting, each in results.items()}
    path.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"wrote {path.relative_to(ROOT)} and {path.with_suffix('.png').name}")


def plot(results: Results, path: Path) -> None:
    """Mean TTFT over load: a row per trace, a column per size of cache."""
    from matplotlib.figure import Figure

    traces = list(dict.fromkeys(setting.trace for setting in results))
    size = (4 * len(CACHE_TOKENS), 3.2 * len(traces))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(traces), len(CACHE_TOKENS), squeeze=False, sharey="row")
    for row, trace in zip(grid, traces, strict=True):
        for axes, cache in zip(row, CACHE_TOKENS, strict=True):
            mine = {s: r for s, r in results.items() if (s.trace, s.cache_tokens) == (trace, cache)}
            for policy in POLICIES:
                means = [fmean(s.ttft_mean_ms for s in each[policy]) for each in mine.values()]
                (line,) = axes.plot(
                    SHARES_SHOWN, means[:-1], marker="o", markersize=3, label=policy
                )
                axes.plot(["saturated"], means[-1:], marker="o", color=line.get_color())
            axes.set_yscale("log")
            axes.set_title(f"{trace}, {cache:,} tokens an engine", fontsize=9)
        row[0].set_ylabel("mean TTFT, ms")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=7)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
