"""First tokens of which nobody tells: when a prefill counts as done all the same.

In:  requests whose first token nobody reports; blocks that a rank's events have stored.
Out: the ends of their prefills in the load.

Most data planes tell of the end of a request only. An engine stores the last full block of a prompt
as it computes the last of it, and its event says so: that ends the prefill. Where no event will say
it, the prefill counts as done when it is predicted to be: for a rank without events, for a prompt
without a full block, and where the block was there already. Where one will, it is waited for, at
most twice as long as the prefill is predicted to take: what is late says that the rank is busier
than it was taken to be, and what never comes was lost. Neither teaches how fast the rank is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvplug.events import Rank, Tier
from kvplug.router.fleet_index import FleetIndex
from kvplug.router.load import ActiveLoad, ActiveRequest

U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

_PATIENCE = 2.0


class UnreportedFirstTokens:
    """expect, note_stored. A fleet whose first tokens are all reported pays nothing."""

    def __init__(self, fleet_index: FleetIndex, load: ActiveLoad) -> None:
        self._fleet_index, self._load = fleet_index, load
        self._waiting_on: set[int] = set()  # numbers of ranks

    @property
    def are_awaited(self) -> bool:
        """Whether an event of any rank may end a prefill."""
        return bool(self._waiting_on)

    def expect(self, request: ActiveRequest, own_ms: float) -> float:
        """Nobody will report its first token, predicted to take so long; returns when it is
        presumed to be there, in seconds. To be called before its rank can have stored anything.
        """
        request.reports_first_token, last = False, request.sequence_hashes[-1:]
        rank = self._fleet_index.numbers.rank(request.rank_number)
        request.shows_in_event = bool(len(last) and not self._held(rank, last)[0])
        is_event_due = request.shows_in_event and self._fleet_index.is_heard(rank)
        if request.shows_in_event:
            self._waiting_on.add(request.rank_number)
        return request.routed_s + (_PATIENCE if is_event_due else 1.0) * own_ms / 1e3

    def note_stored(self, rank: Rank, now_s: float) -> None:
        """Events of the rank have stored blocks."""
        if rank not in self._fleet_index.numbers:
            return
        number = self._fleet_index.numbers.number_of(rank)
        if number in self._waiting_on:
            waiting = [each for each in self._load.waiting_on(number) if each.shows_in_event]
            last = np.array([each.sequence_hashes[-1] for each in waiting], dtype=np.uint64)
            for request, is_held in zip(waiting, self._held(rank, last).tolist(), strict=True):
                if is_held:
                    self._load.end_prefill(request, now_s)
            if not waiting:
                self._waiting_on.discard(number)

    def _held(self, rank: Rank, hashes: U64) -> Mask:
        """bool[n]: which of these blocks the rank's events have on its device."""
        index = self._fleet_index.group_of(rank).index
        holders = index.numbers.holders(index.numbers.number_of(rank), Tier.DEVICE)
        return index.block_store.which_held(hashes, holders)
