"""What the router expected of one request, and the verdict once its engine has answered.

In:  a decision's blocks, and the cached tokens that the engine reports.   Out: a Verdict.

An engine computes at least the last token of a prompt, and shares only full blocks (vLLM 0.32
`get_computed_blocks`, SGLang 0.5.23 likewise by pages): of a prompt of n tokens it never reports
more than (n - 1) // block_size blocks as cached, so expectations are cut to that first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from kvplug.events import Rank
from kvplug.hashing import Hashes

# An event's time of sending is an estimate: so much later than the answer still counts as before.
TOLERANCE_S = 0.25


class Verdict(StrEnum):
    """How a prediction turned out."""

    AS_PREDICTED = "as_predicted"  # the rank had what was expected, or more
    EVICTED = "evicted"  # it had less, as it said after the decision
    LATE_EVENT = "late_event"  # it had less, as it said before the decision; that came too late
    OVERTAKEN = "overtaken"  # it had less, as the request came before the one that it counts on
    WRONG_RESIDENT = "wrong_resident"  # the index had blocks that the engine had not
    WRONG_SPECULATIVE = "wrong_speculative"  # blocks of an earlier request were not there yet

    @property
    def is_wrong(self) -> bool:
        """Whether the request counts as incorrectly routed."""
        return self in (Verdict.WRONG_RESIDENT, Verdict.WRONG_SPECULATIVE)


@dataclass(slots=True, eq=False)
class Expectation:
    """Of one request in flight; all counts are leading blocks of its prompt.

    decided_s, answered_s: when, on the router's clock;
    predicted: what the decision counted on; resident: the part that the index had from events;
    num_lower: of that, blocks in host memory, on disk or in a pool;
    lowest: what the engine has left of it by evictions that became known since, lowest_then: by
    those of them that it had sent before the decision; held: what the index had of `lowest` when it
    was last looked at.
    """

    rank: Rank
    decided_s: float
    sequence_hashes: Hashes
    num_tokens: int
    block_size: int
    predicted: int
    resident: int
    num_lower: int
    lowest: int
    lowest_then: int
    held: int
    answered_s: float = math.inf

    def reported(self, cached_tokens: int) -> int:
        """Blocks, from the tokens that the engine reports, within what is possible."""
        return min(max(cached_tokens // self.block_size, 0), self.limit)

    @property
    def limit(self) -> int:
        """Blocks that an engine may report of this prompt at most."""
        return max(self.num_tokens - 1, 0) // self.block_size

    def lost(self, num_left: int, sent_s: float) -> None:
        """By an event that was sent then, the engine has so many of the predicted blocks left."""
        if sent_s > self.answered_s + TOLERANCE_S:
            return  # evicted after the request had been scheduled
        self.lowest = num_left
        if sent_s < self.decided_s:
            self.lowest_then = num_left

    def error(self, cached_tokens: int) -> int:
        """Predicted less reported blocks: above 0 the rank had less than expected."""
        return min(self.predicted, self.limit) - self.reported(cached_tokens)

    def judge(self, cached_tokens: int) -> Verdict:
        """The verdict, as far as events have told by now."""
        reported = self.reported(cached_tokens)
        if self.error(cached_tokens) <= 0:
            return Verdict.AS_PREDICTED
        if reported >= self.lowest_then:
            return Verdict.LATE_EVENT
        if reported >= self.lowest:
            return Verdict.EVICTED
        is_resident = reported < min(self.resident, self.limit)
        return Verdict.WRONG_RESIDENT if is_resident else Verdict.WRONG_SPECULATIVE
