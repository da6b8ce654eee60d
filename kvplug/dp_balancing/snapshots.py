"""The load of SGLang's ranks: what their snapshots say, and what has been sent since.

In:  LoadSnapshots of all ranks, as SGLang's reader gives them; requests that are sent.
Out: reported loads in a Router; the ends of its own bookings.

Nobody tells the controller that a request is over. Once a rank's snapshots have it, they tell of
its load, and the router's own booking ends. The first snapshot after a request was sent may be of a
step that began before it came, the second has it. One of an idle rank has it, too, as an idle rank
looks for requests all the time: it has served it already.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final, Protocol

from kvplug.events import Rank

if TYPE_CHECKING:
    from kvplug.dp_balancing.chooser import Chooser

_PERIOD_S: Final = 0.02  # SGLang's own balancing reads them as often
_NUM_UNTIL_KNOWN: Final = 2
_IDLE_MARGIN_S: Final = 0.1


class Snapshot(Protocol):
    """What is used of SGLang's LoadSnapshot; timestamp: of the wall clock, in seconds."""

    timestamp: float
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int


@dataclass(slots=True)
class _Booking:
    """A request in flight as far as the router knows."""

    request_id: str
    sent_s: float
    num_snapshots: int = 0


class Snapshots:
    """report before each choice; new_id and sent for each request."""

    def __init__(
        self, read_all: Callable[[], Iterable[Snapshot]], clock: Callable[[], float] = time.time
    ) -> None:
        """`clock`: of the wall, as the snapshots'."""
        self._read_all, self._clock = read_all, clock
        self._not_before_s = 0.0
        self._last_s: dict[int, float] = {}
        self._bookings: defaultdict[int, deque[_Booking]] = defaultdict(deque)
        self._numbers = count()

    def new_id(self) -> str:
        """For the router: SGLang may use an id twice."""
        return f"sglang-{next(self._numbers)}"

    def sent(self, request_id: str, rank: int) -> None:
        """A request that the router has booked is on its way."""
        self._bookings[rank].append(_Booking(request_id, self._clock()))

    def report(self, chooser: Chooser) -> None:
        """Tell the router what new snapshots say."""
        now_s = self._clock()
        if now_s < self._not_before_s:
            return
        self._not_before_s = now_s + _PERIOD_S
        for snapshot in self._read_all():
            rank = snapshot.dp_rank
            if rank < chooser.num_ranks and snapshot.timestamp != self._last_s.get(rank):
                self._last_s[rank] = snapshot.timestamp
                self._take(chooser, snapshot)

    def _take(self, chooser: Chooser, snapshot: Snapshot) -> None:
        router, bookings = chooser.router, self._bookings[snapshot.dp_rank]
        for booking in bookings:
            booking.num_snapshots += booking.sent_s < snapshot.timestamp
        while bookings and _is_known(bookings[0], snapshot):
            router.finish(bookings.popleft().request_id)
        router.set_reported_load(
            Rank(chooser.worker, snapshot.dp_rank),
            num_running=snapshot.num_running_reqs,
            num_waiting=snapshot.num_waiting_reqs,
            waiting_tokens=snapshot.num_waiting_uncached_tokens,
        )


def _is_known(booking: _Booking, snapshot: Snapshot) -> bool:
    is_idle = not (snapshot.num_running_reqs or snapshot.num_waiting_reqs)
    is_served = is_idle and booking.sent_s + _IDLE_MARGIN_S < snapshot.timestamp
    return is_served or booking.num_snapshots >= _NUM_UNTIL_KNOWN
