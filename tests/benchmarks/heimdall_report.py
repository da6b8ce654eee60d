"""What comes of the replays of `make sim-heimdall`: comparisons, tables, a plot.

In:  results by policy, seed by seed.   Out: numbers with 95 % intervals; rich tables; a PNG file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from rich.table import Table

from kvplug.sim.replay.study import paired_interval
from tests.benchmarks.heimdall_fit import PRECISE_S, RANDOM_S, Fit
from tests.benchmarks.heimdall_run import RATES, WARM_RATE, Result

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Results = Mapping[str, Sequence[Result]]

POLICIES: Final = ("random", "round_robin", "least_loaded", "cache_aware", "kv:blocks=1", "kv")
NAMES: Final = {
    "cache_aware": "approximate", "kv:blocks=1": "kv in blocks", "kv": "kv in ms",
}  # fmt: skip
_PERCENTILES = ("P50", "P75", "P90")
# A stage is saturated if fewer of its requests have a first token by the time the last one comes.
LEAST_ANSWERED: Final = 0.8
_COLOURS = ("#9aa5b1", "#c9b458", "#c0562f", "#7d5ba6", "#4a90c2", "#1f7a5c")
_METRICS: Final = ("TTFT mean", "TTFT P90", "in all, mean")


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3g} ({self.low:.3g}-{self.high:.3g})"


def ratio(a: Sequence[float], b: Sequence[float]) -> Interval:
    """How many times as large `a` is, pair by pair: the geometric mean."""
    mean, half = paired_interval(np.log(a).tolist(), np.log(b).tolist())
    return Interval(*np.exp([mean, mean - half, mean + half]).tolist())


def mean_percentiles_s(results: Sequence[Result], stages: I64 | None = None) -> F64:
    """P50, P75, P90: the mean over seeds."""
    return np.asarray(np.mean([each.percentiles_s(stages) for each in results], axis=0))


def ratios(results: Results, policy: str, stages: I64 | None = None) -> list[Interval]:
    """How many times sooner than under random routing, at P50, P75, P90."""
    theirs, ours = (
        np.array([each.percentiles_s(stages) for each in results[name]])
        for name in ("random", policy)
    )
    return [ratio(theirs[:, at].tolist(), ours[:, at].tolist()) for at in range(3)]


def saturated(results: Sequence[Result]) -> npt.NDArray[np.bool_]:
    """Of each stage, whether the policy does not keep up."""
    return np.asarray(np.mean([each.answered for each in results], axis=0) < LEAST_ANSWERED)


def stages_by_load(results: Results) -> dict[str, I64]:
    """Stages in which random routing keeps up, and in which it does not; not the warm-up."""
    is_saturated = saturated(results["random"])
    stages = np.arange(len(is_saturated))
    counted = stages > 0
    return {
        "unsaturated": stages[counted & ~is_saturated],
        "saturated": stages[counted & is_saturated],
    }


@dataclass(frozen=True, slots=True)
class Difference:
    """Of a policy from least_loaded at one load, in seconds, and half of its 95 % interval."""

    policy: str
    rate: float
    is_warm_up: bool
    metric: str
    mean_s: float
    half_s: float

    @property
    def is_worse(self) -> bool:
        """Beyond the interval."""
        return self.mean_s > self.half_s

    def __str__(self) -> str:
        return f"{self.mean_s:.3f} +- {self.half_s:.3f}{'!' if self.is_worse else ''}"


def differences(results: Results, policies: Iterable[str]) -> list[Difference]:
    """Of each policy, stage and metric."""
    found = []
    for policy in policies:
        for stage, rate in enumerate((WARM_RATE, *RATES)):
            ours, theirs = (
                np.array([_of_stage(each, stage) for each in results[name]])
                for name in (policy, "least_loaded")
            )
            for at, metric in enumerate(_METRICS):
                mean, half = paired_interval(ours[:, at].tolist(), theirs[:, at].tolist())
                found.append(Difference(policy, rate, stage == 0, metric, mean, half))
    return found


def _of_stage(result: Result, stage: int) -> tuple[float, float, float]:
    mine = result.stage == stage
    ttft_s = result.ttft_s[mine]
    return (
        float(ttft_s.mean()), float(np.percentile(ttft_s, 90)), float(result.total_s[mine].mean())
    )  # fmt: skip


def fits_table(fits: Sequence[Fit], predicted: Mapping[int, list[Interval]]) -> Table:
    """Settings, how well each fits the random row, what it predicts; `predicted` by number."""
    table = Table(
        "cache, tokens", "requests a stage", "pauses", "decode", "prefill, tokens/s",
        "random: P50, P75, P90 s", "off by", *(f"kv in ms: {p} ratio" for p in _PERCENTILES),
        title="settings: calibrated on the random row; times sooner than random, predicted",
    )  # fmt: skip
    for number, fit in enumerate(fits):
        setting = fit.setting
        cells = [str(each) for each in predicted.get(number, [])] or ["not predicted"]
        table.add_row(
            f"{setting.cache_tokens:,}", str(setting.requests_per_stage),
            "yes" if setting.pauses else "no", f"x {setting.decode_factor:g}",
            f"{setting.prefill_tokens_per_s:,.0f}", _seconds(fit.percentiles_s),
            f"{100 * fit.error:.0f} %", *cells,
        )  # fmt: skip
    return table


def policies_table(results: Results) -> Table:
    """P50, P75, P90 by policy, beside what was published."""
    columns = ("TTFT P50, P75, P90, s", *(f"{p}: times sooner" for p in _PERCENTILES), "cached")
    table = Table("policy", *columns, title="all stages, at the setting that fits best")
    table.add_row("published: random", _seconds(RANDOM_S), "", "", "", "")
    published = [f"{r:.3g}" for r in RANDOM_S / PRECISE_S]
    table.add_row("published: cache-aware", _seconds(PRECISE_S), *published, "", end_section=True)
    for policy, each in results.items():
        sooner = [str(r) for r in ratios(results, policy)] if policy != "random" else [""] * 3
        hit_share = np.mean([result.hit_share for result in each])
        times = _seconds(mean_percentiles_s(each))
        table.add_row(NAMES.get(policy, policy), times, *sooner, f"{100 * hit_share:.0f} %")
    return table


def loads_table(results: Results) -> Table:
    """Unsaturated and saturated stages apart."""
    parts = {name: stages for name, stages in stages_by_load(results).items() if len(stages)}
    title = "stages in which random routing keeps up, and in which it does not"
    table = Table("policy", title=title)
    for name, stages in parts.items():
        rates = f"{RATES[stages[0] - 1]:g}-{RATES[stages[-1] - 1]:g} a second"
        table.add_column(f"{name}, {rates}: P50, P75, P90, s")
        table.add_column("P50: times sooner")
    for policy, each in results.items():
        cells = []
        for stages in parts.values():
            cells.append(_seconds(mean_percentiles_s(each, stages)))
            cells.append("" if policy == "random" else str(ratios(results, policy, stages)[0]))
        table.add_row(NAMES.get(policy, policy), *cells)
    return table


def stages_table(results: Results) -> Table:
    """Median TTFT at each load; * where a policy does not keep up."""
    table = Table("requests/s", title="TTFT P50, s, by load; * the policy does not keep up")
    for policy in results:
        table.add_column(NAMES.get(policy, policy), justify="right")
    behind = {policy: saturated(each) for policy, each in results.items()}
    for stage, rate in enumerate((WARM_RATE, *RATES)):
        cells = []
        for policy, each in results.items():
            p50 = mean_percentiles_s(each, np.array([stage]))[0]
            cells.append(f"{p50:.3f}{'*' if behind[policy][stage] else ' '}")
        table.add_row(f"{rate:g}" if stage else f"{rate:g}, caches cold", *cells)
    return table


def differences_table(found: Sequence[Difference]) -> Table:
    """Every policy and metric at every load."""
    table = Table(title="slower than least_loaded by, s (95 % interval of pairs); ! is worse")
    policies = list(dict.fromkeys(each.policy for each in found))
    table.add_column("requests/s")
    for policy in policies:
        for metric in _METRICS:
            table.add_column(f"{NAMES.get(policy, policy)}: {metric}", justify="right")
    for rate, is_warm_up in ((WARM_RATE, True), *((rate, False) for rate in RATES)):
        mine = [e for e in found if (e.rate, e.is_warm_up) == (rate, is_warm_up)]
        table.add_row(f"{rate:g}{', caches cold' if is_warm_up else ''}", *map(str, mine))
    return table


def _seconds(percentiles_s: F64) -> str:
    return ", ".join(f"{each:.3f}" for each in percentiles_s)


def content_of(results: Results) -> dict[str, Any]:
    """What the file says of the policies."""
    parts = stages_by_load(results)
    content: dict[str, Any] = {}
    for policy, each in results.items():
        content[policy] = {
            "ttft_s": _named(mean_percentiles_s(each).tolist()),
            "times_sooner": _named([[r.mean, r.low, r.high] for r in ratios(results, policy)]),
            "cached_share": float(np.mean([result.hit_share for result in each])),
            "by_load_ttft_p50_s": {
                f"{rate:g}": float(mean_percentiles_s(each, np.array([stage]))[0])
                for stage, rate in enumerate(RATES, 1)
            },
            "does_not_keep_up_at": [
                rate
                for rate, is_behind in zip(RATES, saturated(each)[1:], strict=True)
                if is_behind
            ],
            **{
                name: _named(mean_percentiles_s(each, stages).tolist())
                for name, stages in parts.items()
                if len(stages)
            },
        }
    return content


def _named(values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(_PERCENTILES, values, strict=True))


def save_plot(results: Results, path: Path) -> None:
    """Percentiles by policy beside the published ones; medians by load."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    bars, lines = figure.subplots(1, 2)
    series = {"published: random": RANDOM_S, "published: cache-aware": PRECISE_S}
    series |= {NAMES.get(p, p): mean_percentiles_s(each) for p, each in results.items()}
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        colour = ("#444444", "#000000", *_COLOURS)[number]
        bars.bar(np.arange(3) + number * width, values, width, label=name, color=colour)
    bars.set(yscale="log", ylabel="time to first token, s", title="all stages")
    bars.set_xticks(np.arange(3) + 0.4 - width / 2, _PERCENTILES)
    bars.set_ylim(top=10 * RANDOM_S[-1])  # room for the legend
    bars.legend(fontsize=7, ncols=2, loc="upper left")
    for (policy, each), colour in zip(results.items(), _COLOURS, strict=False):
        p50 = np.array([[r.percentiles_s(np.array([s]))[0] for r in each] for s in _stages()])
        lines.plot(RATES, p50.mean(axis=1), color=colour, label=NAMES.get(policy, policy))
        lines.fill_between(RATES, p50.min(axis=1), p50.max(axis=1), color=colour, alpha=0.2)
    lines.set(
        yscale="log",
        xlabel="requests/s",
        ylabel="TTFT P50, s",
        title="by load: mean, least and greatest of the seeds",
    )
    lines.legend(fontsize=7)
    figure.savefig(path, dpi=130)


def _stages() -> range:
    return range(1, len(RATES) + 1)
