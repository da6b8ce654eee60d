"""What the sequence numbers of a publisher say about what was lost.

In:  the number of each message.   Out: in order, duplicate, gap or restart.

Stock publishers (vLLM, SGLang) count messages from 0 and start again at 0 with their process.
"""

from __future__ import annotations

from enum import Enum


class Arrival(Enum):
    """How a message follows the one before it."""

    IN_ORDER = "in_order"
    LATE_JOIN = "late_join"  # the first one that we see is not the publisher's first
    DUPLICATE = "duplicate"
    GAP = "gap"
    RESTART = "restart"
    UNNUMBERED = "unnumbered"


class SequenceTracker:
    """observe each number; `last` and `num_missed` tell where the stream is."""

    def __init__(self) -> None:
        self.last: int | None = None
        self.num_missed = 0

    def observe(self, number: int | None) -> Arrival:
        """Classify a message and remember its number."""
        arrival = self._classify(number)
        if arrival is Arrival.GAP:
            assert number is not None
            assert self.last is not None
            self.num_missed += number - self.last - 1
        if number is not None:
            self.last = number
        return arrival

    def reset(self) -> None:
        """Another life of the publisher begins."""
        self.last = None

    def _classify(self, number: int | None) -> Arrival:
        if number is None:
            return Arrival.UNNUMBERED
        if self.last is None:
            return Arrival.IN_ORDER if number == 0 else Arrival.LATE_JOIN
        if number == self.last + 1:
            return Arrival.IN_ORDER
        if number == self.last:
            return Arrival.DUPLICATE
        return Arrival.GAP if number > self.last else Arrival.RESTART
