"""When an engine said something, on the router's clock.

In:  the engine's timestamp of a batch, and when it arrived.   Out: when it was sent, estimated.

The clocks of two machines differ, but by about the same all the time: the fastest batch so far
tells by how much. What is slower than that was under way, or waited, for the rest.
"""

from __future__ import annotations

import math

from kvplug.events import Rank


class EventTimes:
    """sent, for each batch, and heard when it is applied; heard_until tells how far a rank's news
    have come. All in seconds.
    """

    def __init__(self) -> None:
        self._offset_s: dict[Rank, float] = {}
        self._heard_until_s: dict[Rank, float] = {}

    def sent(self, rank: Rank, ts: float, now_s: float) -> float:
        """When a batch that arrives now was sent; `ts` 0 stands for no timestamp: just now."""
        if not ts:
            return now_s
        self._offset_s[rank] = min(self._offset_s.get(rank, math.inf), now_s - ts)
        return ts + self._offset_s[rank]

    def heard(self, rank: Rank, sent_s: float) -> None:
        """A batch that was sent then has been applied, and with it all that were sent before."""
        self._heard_until_s[rank] = max(sent_s, self.heard_until(rank))

    def forget(self, rank: Rank) -> None:
        """Another life of the engine may begin, on another machine."""
        self._offset_s.pop(rank, None)

    def heard_until(self, rank: Rank) -> float:
        """Everything that the rank sent up to then has been applied."""
        return self._heard_until_s.get(rank, -math.inf)
