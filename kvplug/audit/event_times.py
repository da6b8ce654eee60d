"""When an engine said something, on the router's clock.

In:  the engine's timestamp of a batch, and when it arrived.   Out: when it was sent, estimated.

The clocks of two machines differ, but by about the same all the time: the fastest batch so far
tells by how much. What is slower than that was under way, or waited, for the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvplug.events import Rank


@dataclass(slots=True)
class _Clock:
    offset_s: float = math.inf
    heard_until_s: float = -math.inf


class EventTimes:
    """join and leave, as ranks do. sent, for each batch, and heard when it is applied; heard_until
    tells how far a rank's news have come. All in seconds. Nothing is kept of other ranks.
    """

    def __init__(self) -> None:
        self._clocks: dict[Rank, _Clock] = {}

    def join(self, rank: Rank) -> None:
        """From now on the rank is listened to."""
        self._clocks[rank] = _Clock()

    def leave(self, rank: Rank) -> None:
        """The rank is gone."""
        self._clocks.pop(rank, None)

    def sent(self, rank: Rank, ts: float, now_s: float) -> float:
        """When a batch that arrives now was sent; `ts` 0 stands for no timestamp: just now."""
        clock = self._clocks.get(rank)
        if not ts or clock is None:
            return now_s
        clock.offset_s = min(clock.offset_s, now_s - ts)
        return ts + clock.offset_s

    def heard(self, rank: Rank, sent_s: float) -> None:
        """A batch that was sent then has been applied, and with it all that were sent before."""
        if clock := self._clocks.get(rank):
            clock.heard_until_s = max(sent_s, clock.heard_until_s)

    def forget(self, rank: Rank) -> None:
        """A new incarnation of the engine may begin, on another machine."""
        if clock := self._clocks.get(rank):
            clock.offset_s = math.inf

    def heard_until(self, rank: Rank) -> float:
        """Everything that the rank sent up to then has been applied."""
        clock = self._clocks.get(rank)
        return -math.inf if clock is None else clock.heard_until_s
