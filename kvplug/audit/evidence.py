"""What may explain that an engine had less than was expected, besides a mistake of the router.

In:  when events were sent and came; answers with more cached tokens than expected.
Out: when a batch was sent on the router's clock, and how far a rank's news have come; whether a
     request that changed places with another one explains a shortfall.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple

from kvplug.audit.expectation import Expectation
from kvplug.events import Rank
from kvplug.router.observer import Arrival

_MAX_SURPLUSES = 4096


class EventTimes:
    """sent_s of a batch; heard once it is applied. heard_until tells how far a rank's news have
    come. All in seconds on the router's clock.

    The clocks of two machines differ, but by about the same all the time: the fastest batch so far
    tells by how much. What is slower than that was under way, or waited, for the rest.
    """

    def __init__(self) -> None:
        self._offset_s: dict[Rank, float] = {}
        self._heard_until_s: dict[Rank, float] = {}
        self._lag_s: dict[Rank, float] = {}

    def sent_s(self, arrival: Arrival) -> float:
        """When it was sent, estimated; without a timestamp: when it arrived."""
        rank, ts, arrived_s = arrival
        if not ts:
            return arrived_s
        self._offset_s[rank] = min(self._offset_s.get(rank, math.inf), arrived_s - ts)
        return ts + self._offset_s[rank]

    def heard(self, arrival: Arrival, now_s: float) -> None:
        """It has been applied by now, and with it all that was sent before."""
        rank, sent_s = arrival.rank, self.sent_s(arrival)
        self._heard_until_s[rank] = max(sent_s, self.heard_until(rank))
        self._lag_s[rank] = now_s - sent_s

    def lag_s(self, rank: Rank) -> float | None:
        """From when the last batch was sent, estimated, until it was applied; None before one."""
        return self._lag_s.get(rank)

    def heard_until(self, rank: Rank) -> float:
        """Everything that the rank sent up to then has been applied."""
        return self._heard_until_s.get(rank, -math.inf)

    def restart(self, rank: Rank) -> None:
        """Another life of the engine may begin, on another machine."""
        self._offset_s.pop(rank, None)

    def forget(self, rank: Rank) -> None:
        """The rank left the fleet."""
        self.restart(rank)
        self._heard_until_s.pop(rank, None)
        self._lag_s.pop(rank, None)


class _Surplus(NamedTuple):
    decided_s: float
    answered_s: float
    reported: int
    limit: int


class Surpluses:
    """note each answer, take the one that explains a shortfall.

    The router sends A, which will compute a prefix, and right behind it B, which counts on that. On
    two connections B may arrive first: then B computes the prefix and A finds it. The rank computes
    it once, as foreseen. A's surplus is the evidence, and excuses one shortfall.
    """

    def __init__(self) -> None:
        self._surpluses: OrderedDict[tuple[Rank, int], _Surplus] = OrderedDict()

    def note(self, expectation: Expectation, cached_tokens: int, now_s: float) -> None:
        """Keep an answer that had more than was expected."""
        if expectation.error(cached_tokens) >= 0:
            return
        reported = expectation.reported(cached_tokens)
        surplus = _Surplus(expectation.decided_s, now_s, reported, expectation.limit)
        self._surpluses[_key(expectation, expectation.predicted)] = surplus
        if len(self._surpluses) > _MAX_SURPLUSES:
            self._surpluses.popitem(last=False)

    def take(self, expectation: Expectation, cached_tokens: int) -> bool:
        """Whether a request that was in flight at the decision had found what was missing."""
        key = _key(expectation, expectation.reported(cached_tokens))
        surplus = self._surpluses.get(key)
        if surplus is None:
            return False
        was_in_flight = surplus.decided_s <= expectation.decided_s <= surplus.answered_s
        wanted = min(expectation.predicted, expectation.limit, surplus.limit)
        if not was_in_flight or surplus.reported < wanted:
            return False
        del self._surpluses[key]
        return True

    def forget(self, rank: Rank) -> None:
        """The rank left the fleet."""
        for key in [key for key in self._surpluses if key[0] == rank]:
            del self._surpluses[key]


def _key(expectation: Expectation, num_blocks: int) -> tuple[Rank, int]:
    """The block after so many blocks of the prompt, on its rank."""
    return expectation.rank, int(expectation.sequence_hashes[num_blocks])
