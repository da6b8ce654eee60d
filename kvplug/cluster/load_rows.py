"""The rows of all replicas by rank, as the load kernels take them.

In:  rows of peers, the fleet as it is now.   Out: one's own rows; the load of peers in the router.

    rows   float64[places * ranks * ROW_WIDTH] (kernels/peer_load.py), ranks by the fleet's numbers

A place is one's own (OWN), that of load which is only assumed (ASSUMED), or that of a peer. Ranks
that come and go change numbers, and rows move with them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np
import numpy.typing as npt

from kvplug.cluster.sync_messages import PREFILLED_TOKENS
from kvplug.events import Rank
from kvplug.kernels import costing
from kvplug.kernels.peer_load import NUM_BUSY, ROW_WIDTH
from kvplug.router.core import Router

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

OWN, ASSUMED = 0, 1
_FIRST_PEER: Final = 2
_MIN_PLACES: Final = 4
# Kernels tell by the time whose request a rank is at work on: no two have the same.
_APART_MS: Final = 1e-3
_FIRST: Final = [costing.FIRST_MS, costing.FIRST_SINCE_MS]


class LoadRows:
    """open, close a place; show; take. For one thread, which holds the router's lock for `follow`
    and `take`, and for nothing else.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self.ranks: list[Rank | None] = []
        self._rows: F64 = np.zeros((_MIN_PLACES, 0, ROW_WIDTH))
        self._free: list[int] = [*range(_MIN_PLACES - 1, _FIRST_PEER - 1, -1)]
        self._slots: I64 = np.zeros(0, dtype=np.int64)

    @property
    def is_behind(self) -> bool:
        """Whether ranks have come or gone."""
        return self.ranks != self._router.fleet_index.numbers.ranks

    @property
    def numbers(self) -> list[int]:
        """Of all ranks."""
        return [number for number, rank in enumerate(self.ranks) if rank is not None]

    def of(self, place: int) -> F64:
        """float64[ranks, ROW_WIDTH], to be changed; gone with the next `open` or `follow`."""
        rows: F64 = self._rows[place]
        return rows

    def open(self) -> int:
        """A new place, with rows of zeros; what was computed until now is not known."""
        if not self._free:
            num_places, num_ranks, _ = self._rows.shape
            self._rows = np.concatenate([self._rows, np.zeros((num_places, num_ranks, ROW_WIDTH))])
            self._free = [*range(2 * num_places - 1, num_places - 1, -1)]
        place = self._free.pop()
        self._rows[place, :, PREFILLED_TOKENS] = np.nan
        return place

    def empty(self, place: int, numbers: Collection[int]) -> None:
        """Nothing of it is in flight on these ranks."""
        self._rows[place, list(numbers), :NUM_BUSY] = 0.0

    def close(self, place: int) -> None:
        """Its rows are zeros, and do not count after the next `take`."""
        self._rows[place] = 0.0
        self._free.append(place)

    def follow(self) -> None:
        """Rows have the numbers of the fleet from now on. The lock is held."""
        ranks = list(self._router.fleet_index.numbers.ranks)
        rows = np.zeros((len(self._rows), len(ranks), ROW_WIDTH))
        rows[_FIRST_PEER:, :, PREFILLED_TOKENS] = np.nan
        before = {rank: number for number, rank in enumerate(self.ranks) if rank is not None}
        for number, rank in enumerate(ranks):
            if rank in before:
                rows[:, number] = self._rows[:, before[rank]]
        self.ranks, self._rows = ranks, rows
        self._slots = np.full(len(ranks), -1, dtype=np.int64)
        self.take(self.numbers)

    def show(self, numbers: Collection[int]) -> F64:
        """float64[ranks, ROW_WIDTH]: one's own rows, of these ranks as they are now.

        Without the lock: a row that is read while it changes mixes two moments of a rank, and
        whatever changes it is told next.
        """
        at = self._only(numbers)
        self._router.load.show_own(self._slots, self._rows[OWN].reshape(-1))
        self._slots[at] = -1
        return self.of(OWN)

    def assume(self, numbers: Collection[int], times: int) -> None:
        """Of these ranks: others have sent there so many times what this router has."""
        at = np.fromiter(numbers, dtype=np.int64)
        self._rows[ASSUMED, at] = times * self._rows[OWN, at]
        self._rows[ASSUMED, at[:, None], _FIRST] = 0.0

    def restart(self, number: int, now_ms: float, but: int = OWN) -> None:
        """The rank has just computed a prompt of place `but`: so it begins with the oldest of the
        others now.
        """
        rows = self._rows[_FIRST_PEER:, number]
        waiting = np.flatnonzero(rows[:, costing.FIRST_MS] > 0.0) + _FIRST_PEER
        for place in waiting[waiting != but].tolist():
            self._rows[place, number, costing.FIRST_SINCE_MS] = now_of(place, now_ms)

    def take(self, numbers: Collection[int]) -> None:
        """Count what others have sent to these ranks. The lock is held."""
        at = self._only(numbers)
        self._router.shared_load.take(self._rows.reshape(-1), OWN, len(self._rows), self._slots)
        self._slots[at] = -1

    def busy(self, place: int) -> list[int]:
        """The numbers of ranks that have something from there."""
        found: list[int] = np.flatnonzero(self._rows[place, :, :NUM_BUSY].any(axis=1)).tolist()
        return found

    def _only(self, numbers: Collection[int]) -> I64:
        """The kernels pass over all but these."""
        at = np.fromiter(numbers, dtype=np.int64, count=len(numbers))
        self._slots[at] = at
        return at


def now_of(place: int, now_ms: float) -> float:
    """The time for the requests of a place."""
    return now_ms + _APART_MS * place
