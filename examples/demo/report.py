"""What came out: one table, and one sentence on what it shows.

In:  the outcomes of the same requests under each policy.
Out: text on the terminal.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from examples.demo.client import Completed, Failed, Outcome

COLUMNS = ("policy", "requests", "errors", "cached", "TTFT p50", "TTFT p90", "requests/s")


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """The outcomes of one policy, and how long they took together."""

    policy: str
    outcomes: Sequence[Outcome]
    wall_s: float

    @property
    def completed(self) -> list[Completed]:
        """The requests that were answered to the end."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, Completed)]

    @property
    def failed(self) -> list[Failed]:
        """The requests that were not."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, Failed)]

    @property
    def cached_share(self) -> float:
        """Of all prompt tokens, the part that the engines had in their caches."""
        prompt_tokens = sum(outcome.prompt_tokens for outcome in self.completed)
        cached_tokens = sum(outcome.cached_tokens for outcome in self.completed)
        return cached_tokens / prompt_tokens if prompt_tokens else 0.0

    @property
    def requests_per_s(self) -> float:
        """Answered requests only."""
        return len(self.completed) / self.wall_s if self.wall_s else 0.0

    def ttft_ms(self, percent: float) -> float:
        """A percentile of the time to the first token; NaN if there was none."""
        return 1e3 * percentile([outcome.ttft_s for outcome in self.completed], percent)


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank: always one of the values."""
    if not values:
        return math.nan
    rank = math.ceil(percent / 100 * len(values))
    return sorted(values)[max(rank, 1) - 1]


def table_of(results: Sequence[PolicyResult]) -> Table:
    """One row for each policy."""
    table = Table()
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if number else "left")
    for result in results:
        table.add_row(
            result.policy,
            str(len(result.outcomes)),
            str(len(result.failed)),
            f"{result.cached_share:.1%}",
            f"{result.ttft_ms(50):.0f} ms",
            f"{result.ttft_ms(90):.0f} ms",
            f"{result.requests_per_s:.1f}",
        )
    return table


def sentence_on(base: PolicyResult, other: PolicyResult) -> str:
    """What the other policy did to the caches and to the first token, better or worse."""
    return (
        f"With {other.policy}, {other.cached_share:.1%} of the prompt tokens were in the chosen "
        f"engine's cache, with {base.policy} {base.cached_share:.1%}"
        f"{_times(other.cached_share, base.cached_share)}; half of the first tokens came within "
        f"{other.ttft_ms(50):.0f} ms instead of {base.ttft_ms(50):.0f} ms."
    )


def print_report(console: Console, results: Sequence[PolicyResult]) -> None:
    """The table, the sentence for the first and the last policy, and one failure if any."""
    console.print(table_of(results))
    console.print(sentence_on(results[0], results[-1]), highlight=False)
    failures = [failure for result in results for failure in result.failed]
    if failures:
        console.print(f"{len(failures)} requests failed, the first one with: {failures[0].reason}")


def _times(share: float, base: float) -> str:
    return f" ({share / base:.2f} times as many)" if base else ""
