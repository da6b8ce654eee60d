"""What engines said of the CXL state of their blocks, one entry per rank and block.

In:  a rank number and sequence hashes, a state and a place.   Out: the last one of each block.

    table   hash xor mark of the rank -> serial << 24 | number of the placement << 2 | state
    ring    the key of entry n at n modulo its capacity; n counts up for ever

Entries of pooled blocks have serial 0 and stay as long as the copy. The others are only what is
known besides: where the copy was, or will be, so that a later event may leave that out, and a copy
that is lost can be looked for. They are in the ring, and when it is full the oldest go.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvplug.errors import IndexCorruptError
from kvplug.events import CxlState
from kvplug.index.array_version import ArrayVersion
from kvplug.index.expiring import mark_of
from kvplug.index.hash_table import HashTable
from kvplug.index.pools import Placement, Placements

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

MAX_RETAINED = 2**17
"""Entries of blocks that are not in a pool."""

STATES = tuple(CxlState)
POOLED, EVICTED = STATES.index(CxlState.CXL_POOLED), STATES.index(CxlState.EVICTED)
_STATE_BITS, _SERIAL_SHIFT = np.uint64(2), np.uint64(24)
_STATE, _PLACEMENT = np.uint64(3), np.uint64(2**22 - 1)


def state_of(entries: U64) -> I64:
    """Number of the state in STATES; of an absent entry (0) that of LOCAL_GPU."""
    return np.asarray(entries & _STATE).astype(np.int64)


def placement_of(entries: U64) -> I64:
    """Number of the placement of each entry, -1 where it is absent."""
    numbers = ((entries >> _STATE_BITS) & _PLACEMENT).astype(np.int64)
    return np.where(entries != 0, numbers, -1)


class CxlStates:
    """find, put, erase, forget; every entry is of a block of a rank with a number."""

    def __init__(self, placements: Placements, max_retained: int = MAX_RETAINED) -> None:
        self.num_lost = 0  # entries that had to go
        self._placements, self._max_retained = placements, max_retained
        self.table = HashTable(ArrayVersion(is_tight=True))
        self._ring: U64 = np.zeros(0, dtype=np.uint64)
        self._next = 1

    def __len__(self) -> int:
        return len(self.table)

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the table and the ring."""
        return self.table.nbytes + int(self._ring.nbytes)

    @property
    def arrays(self) -> tuple[U64, U64]:
        """The table's slots and the ring."""
        return self.table.slots, self._ring

    def load(self, slots: U64, ring: U64) -> None:
        """Be what other states were; their placements are loaded."""
        self.table, self._ring = HashTable(ArrayVersion(is_tight=True), slots), ring
        serials = self.table.items()[1] >> _SERIAL_SHIFT
        self._next = 1 + int(serials.max(initial=0))

    def find(self, rank_number: int, hashes: U64) -> U64:
        """The entry of each block, 0 where there is none."""
        return self.table.find(hashes ^ mark_of(rank_number))

    def put(self, rank_number: int, hashes: U64, state: CxlState, placement: int) -> None:
        """What the blocks are in from now on."""
        keys, number = hashes ^ mark_of(rank_number), STATES.index(state)
        base = np.uint64(placement << int(_STATE_BITS) | number)
        if number == POOLED:
            self.table.put(keys, np.full(len(keys), base))
        else:
            self.table.erase(keys[: -self._max_retained])
            keys = keys[-self._max_retained :]
            self.table.put(keys, (self._serials(keys) << _SERIAL_SHIFT) | base)

    def erase(self, rank_number: int, hashes: U64) -> None:
        """Nothing is known of the blocks besides the copies that the rank has."""
        self.table.erase(hashes ^ mark_of(rank_number))

    def forget(self, rank_number: int) -> None:
        """The rank is gone or cleared."""
        if not len(self.table):
            return
        keys, entries = self.table.items()
        numbers = self._placements.numbers_of(rank_number)
        self.table.erase(keys[np.isin(placement_of(entries), numbers)])

    def unused(self, rank_number: int) -> list[int]:
        """The numbers of the rank's placements that no entry has."""
        used = set(np.unique(placement_of(self.table.items()[1])).tolist())
        return [n for n in self._placements.numbers_of(rank_number) if n not in used]

    def items(self) -> list[tuple[CxlState, Placement, U64]]:
        """Sequence hashes of all entries by state and placement."""
        keys, entries = self.table.items()
        kinds = np.asarray(entries & ((_PLACEMENT << _STATE_BITS) | _STATE))
        found = []
        for kind in np.unique(kinds):
            number = int(kind >> _STATE_BITS)
            placement = self._placements.placement(number)
            hashes = keys[kinds == kind] ^ mark_of(placement.rank_number)
            found.append((STATES[int(kind & _STATE)], placement, hashes))
        return found

    def check(self) -> None:
        """Table and ring agree, and every entry is of a placement in use."""
        self.table.check()
        keys, entries = self.table.items()
        for number in np.unique(placement_of(entries)):
            self._placements.placement(int(number))
        serials = entries >> _SERIAL_SHIFT
        is_retained = state_of(entries) != POOLED
        if serials[~is_retained].any() or is_retained.sum() > self._max_retained:
            raise IndexCorruptError("cxl: a pooled block is in the ring, or the ring is too full")
        keys, serials = keys[is_retained], serials[is_retained]
        if len(keys) and not np.array_equal(self._ring[serials % np.uint64(len(self._ring))], keys):
            raise IndexCorruptError("cxl: an entry is not where the ring has it")

    def _serials(self, keys: U64) -> U64:
        """A place in the ring for each key; who was there is forgotten if that was its latest."""
        if not len(self._ring):
            self._ring = np.zeros(self._max_retained, dtype=np.uint64)
        serials = np.arange(self._next, self._next + len(keys)).astype(np.uint64)
        self._next += len(keys)
        places, capacity = serials % np.uint64(len(self._ring)), np.uint64(len(self._ring))
        before = self._ring[places]
        is_latest = self.table.find(before) >> _SERIAL_SHIFT == serials - capacity
        is_latest &= serials > capacity
        self.num_lost += self.table.erase(before[is_latest])
        self._ring[places] = keys
        return serials
