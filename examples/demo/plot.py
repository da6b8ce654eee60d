"""The comparison as a picture: cached share, and how soon first tokens come.

In:  the outcomes of the same requests under each policy.   Out: a PNG file.
"""

from collections.abc import Sequence
from pathlib import Path

from examples.demo.report import PolicyResult

SIZE_INCHES, DPI = (9.0, 3.6), 130
COLOURS = ("#9aa5b1", "#1f7a5c", "#c0562f")


def save_plot(results: Sequence[PolicyResult], title: str, path: Path) -> None:
    """Bars for the cached share, a cumulative curve for the time to the first token."""
    # Imported late: half a second that a run without a plot would pay, too.
    import matplotlib

    matplotlib.use("Agg")  # there may be no display
    from matplotlib import pyplot

    figure, (share, ttft) = pyplot.subplots(1, 2, figsize=SIZE_INCHES, width_ratios=(1, 2))
    for result, colour in zip(results, COLOURS, strict=False):
        bar = share.bar(result.policy, 100 * result.cached_share, color=colour)
        share.bar_label(bar, fmt="%.0f %%")
        ordered = sorted(1e3 * outcome.ttft_s for outcome in result.completed)
        parts = [100 * (i + 1) / len(ordered) for i in range(len(ordered))]
        ttft.step(ordered, parts, where="post", color=colour, label=result.policy)
    share.set(title="prompt tokens found cached", ylim=(0, 100), ylabel="%")
    ttft.set(title="time to first token", xlabel="ms", ylabel="% of requests", xlim=(0, None))
    ttft.legend(loc="lower right")
    ttft.grid(alpha=0.3)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)
