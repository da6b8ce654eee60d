"""What the router expected of one request, and the verdict once its engine has answered.

In:  a decision's blocks, and the cached tokens that the engine reports.   Out: a Verdict.

An engine computes at least the last token of a prompt, and shares only full blocks (vLLM 0.32
`get_computed_blocks`, SGLang 0.5.23 likewise by pages): of a prompt of n tokens it never reports
more than (n - 1) // block_size blocks as cached, so expectations are cut to that first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvplug.events import Rank
from kvplug.hashing import Hashes


class Verdict(StrEnum):
    """How a prediction turned out."""

    AS_PREDICTED = "as_predicted"  # the rank had what was expected, or more
    EVICTED = "evicted"  # it had less, and has said so since: the news came after the decision
    OVERTAKEN = "overtaken"  # it had less, as the request came before the one that it counts on
    WRONG_RESIDENT = "wrong_resident"  # the index had blocks that the engine had not
    WRONG_SPECULATIVE = "wrong_speculative"  # blocks of an earlier request were not there yet

    @property
    def is_wrong(self) -> bool:
        """Whether the request counts as incorrectly routed."""
        return self in (Verdict.WRONG_RESIDENT, Verdict.WRONG_SPECULATIVE)


@dataclass(slots=True)
class Expectation:
    """Of one request in flight; all counts are leading blocks of its prompt.

    decided_s: when, on the router's clock;
    predicted: what the decision counted on; resident: the part that the index had from events;
    lowest: what the engine has left of it by evictions that became known since.
    """

    rank: Rank
    decided_s: float
    sequence_hashes: Hashes
    num_tokens: int
    block_size: int
    predicted: int
    resident: int
    lowest: int

    def reported(self, cached_tokens: int) -> int:
        """Blocks, from the tokens that the engine reports."""
        return cached_tokens // self.block_size

    @property
    def limit(self) -> int:
        """Blocks that an engine may report of this prompt at most."""
        return max(self.num_tokens - 1, 0) // self.block_size

    def error(self, cached_tokens: int) -> int:
        """Predicted less reported blocks: above 0 the rank had less than expected."""
        return min(self.predicted, self.limit) - self.reported(cached_tokens)

    def judge(self, cached_tokens: int) -> Verdict:
        """The verdict, as far as events have told by now."""
        reported = self.reported(cached_tokens)
        if self.error(cached_tokens) <= 0:
            return Verdict.AS_PREDICTED
        if reported >= self.lowest:
            return Verdict.EVICTED
        is_resident = reported < min(self.resident, self.limit)
        return Verdict.WRONG_RESIDENT if is_resident else Verdict.WRONG_SPECULATIVE
