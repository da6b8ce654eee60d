"""What a study found: a table, a dict for JSON, a plot.

In:  the summaries of each policy, one per seed.   Out: text, a dict, a PNG.

Numbers are means over seeds. Intervals are of the difference to the first policy, seed by seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from kvplug.errors import ConfigError
from kvplug.sim.replay.study import Summary, paired_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Summaries = dict[str, list[Summary]]
"""Of each policy, seed by seed."""

METRICS: Final = (*(field.name for field in fields(Summary)), "hits_of_ideal")
_COLUMNS: Final[dict[str, Callable[[dict[str, float]], str]]] = {
    "TTFT mean, ms": lambda mean: f"{mean['ttft_mean_ms']:,.1f}",
    "p50": lambda mean: f"{mean['ttft_p50_ms']:,.1f}",
    "p90": lambda mean: f"{mean['ttft_p90_ms']:,.1f}",
    "p99": lambda mean: f"{mean['ttft_p99_ms']:,.1f}",
    "requests/s": lambda mean: f"{mean['requests_per_s']:,.2f}",
    "hits": lambda mean: f"{mean['hit_share']:.1%}",
    "of the ideal": lambda mean: f"{mean['hits_of_ideal']:.1%}",
    "imbalance": lambda mean: f"{mean['imbalance']:.2f}",
}
LEGEND: Final = (
    "hits: share of prompt tokens that were cached; of the ideal: of what one unlimited cache has",
    "imbalance: prompt tokens computed by the busiest engine, over the mean of all engines",
)


def means_of(summaries: Sequence[Summary]) -> dict[str, float]:
    """{metric: mean over seeds}."""
    return {name: fmean(getattr(one, name) for one in summaries) for name in METRICS}


def against(
    metric: str, summaries: Sequence[Summary], first: Sequence[Summary]
) -> tuple[float, float]:
    """Mean difference of a metric to the first policy and half of its 95 % interval."""
    ours, theirs = ([getattr(one, metric) for one in side] for side in (summaries, first))
    return paired_interval(ours, theirs)


def table_of(results: Summaries) -> str:
    """Markdown, a row per policy."""
    (name, first), *_ = results.items()
    header, rows = ["policy", *_COLUMNS], []
    for policy, summaries in results.items():
        mean = means_of(summaries)
        rows.append([policy, *(cell(mean) for cell in _COLUMNS.values())])
    if len(results) > 1:
        header.append(f"TTFT mean against {name}, ms")
        for row, summaries in zip(rows, results.values(), strict=True):
            row.append("" if row[0] == name else _difference(summaries, first))
    return markdown(header, rows)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that reads well as it is: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for cells in (header, rule, *rows):
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        padded[0] = cells[0].ljust(widths[0])
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)


def _difference(summaries: Sequence[Summary], first: Sequence[Summary]) -> str:
    difference, half_width = against("ttft_mean_ms", summaries, first)
    interval = f" ± {half_width:,.1f}" if len(summaries) > 1 else ""
    return f"{difference:+,.1f}{interval}"


def as_json(results: Summaries) -> dict[str, Any]:
    """{policy: {mean, seeds, against_first: {metric: [difference, half width]}}}."""
    first = next(iter(results.values()))
    return {
        policy: {
            "mean": means_of(summaries),
            "seeds": [asdict(one) for one in summaries],
            "against_first": {
                metric: against(metric, summaries, first) if len(summaries) > 1 else None
                for metric in METRICS
            },
        }
        for policy, summaries in results.items()
    }


def require_plot(path: Path) -> None:
    """ConfigError if matplotlib is missing, or writes no such files."""
    if find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib: pip install 'kvplug[sim]'")
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise ConfigError(f"cannot write a plot to {path}: expected a name that ends in .png")


def plot(results: Summaries, path: Path, title: str) -> None:
    """Bars are means, dots are seeds; OSError if the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 2.2 + 0.45 * len(results)), layout="constrained")
    figure.suptitle(title)
    ttft, throughput, hits, imbalance = figure.subplots(1, 4, sharey=True)
    _plot_ttft(ttft, results)
    for axes, metric, label, scale in (
        (throughput, "requests_per_s", "requests/s", 1),
        (hits, "hit_share", "hits, % of prompt tokens", 100),
        (imbalance, "imbalance", "imbalance, busiest / mean", 1),
    ):
        _plot_bars(axes, [[getattr(s, metric) * scale for s in each] for each in results.values()])
        axes.set_xlabel(label)
    ideal = means_of(next(iter(results.values())))["ideal_share"] * 100
    hits.axvline(ideal, color="0.4", linestyle=":")
    hits.set_title("dotted: one unlimited cache", fontsize=8, loc="right")
    ttft.set_yticks(range(len(results)), list(results))
    ttft.invert_yaxis()
    figure.savefig(path, dpi=130)


def _plot_ttft(axes: Axes, results: Summaries) -> None:
    from matplotlib.ticker import LogLocator

    marks = {"ttft_p50_ms": "|", "ttft_mean_ms": "o", "ttft_p90_ms": "D", "ttft_p99_ms": ">"}
    means = [means_of(each) for each in results.values()]
    for metric, marker in marks.items():
        label = metric.split("_")[1]
        values = [mean[metric] for mean in means]
        axes.scatter(values, range(len(means)), marker=marker, label=label, zorder=2)
    least_most = [(min(m[k] for k in marks), max(m[k] for k in marks)) for m in means]
    axes.hlines(range(len(means)), *zip(*least_most, strict=True), color="0.8", zorder=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("TTFT, ms")
    axes.legend(fontsize=8, ncols=4, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)


def _plot_bars(axes: Axes, values: Sequence[Sequence[float]]) -> None:
    axes.barh(range(len(values)), [fmean(each) for each in values], color="tab:blue", alpha=0.6)
    for row, each in enumerate(values):
        axes.scatter(each, [row] * len(each), s=9, color="black", zorder=2)
