"""What engines said of the CXL state of their blocks, one entry per rank and block, and the
placements in pools that entries name.

In:  a rank number and sequence hashes; a state, a pool id and workers.   Out: the last state of
each block; the holder of the copies in a pool.

    placements  number -> rank number, pool id, workers that can read it; a holder on first use
    table       hash xor mark of the rank -> serial << 24 | number of the placement << 2 | state
    ring        the key of entry n at n modulo its capacity; n counts up for ever

Entries of pooled blocks have serial 0 and stay as long as the copy. The others only say where a
copy was or will be, so that a later event may leave that out, and so that an entry without its
copy can be found. They are in the ring, and when it is full the oldest go.

A rank has few placements at a time. Those that no entry names are given up when the rank comes
near its limit (MAX_PLACEMENTS), or goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.errors import IndexCorruptError
from kvplug.events import CxlState
from kvplug.index.arrays import ArrayVersion
from kvplug.index.expiring import mark_of
from kvplug.index.hash_table import HashTable, require_sound
from kvplug.index.holder_numbers import HolderNumbers

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

MAX_PLACEMENTS = 256
"""Of one rank at once; each takes a bit in every set of holders."""

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


class Placement(NamedTuple):
    """Where a block of a rank is or was in a pool; None is what no event has said. Of workers that
    are not said, those can read it that say that they can read the pool.
    """

    rank_number: int
    pool_id: int | None = None
    workers: tuple[str, ...] | None = None

    def moved(self, pool_id: int | None, workers: tuple[str, ...] | None) -> Placement:
        """What is left out is as before."""
        return Placement(
            self.rank_number,
            self.pool_id if pool_id is None else pool_id,
            self.workers if workers is None else tuple(sorted(set(workers))),
        )

    @property
    def is_unknown(self) -> bool:
        """Whether it says nothing."""
        return self.pool_id is None and not self.workers


PlacementState = tuple[Placement, int | None]
"""With the holder of the copies there, None if none was asked for."""


class Placements:
    """find, add, placement, holder, numbers_of, free; numbers of all ranks are dense."""

    def __init__(self, numbers: HolderNumbers) -> None:
        self._numbers = numbers
        self._placements: list[Placement | None] = []
        self._number_of: dict[int, dict[Placement, int]] = {}
        self._holder_of: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(len(numbers) for numbers in self._number_of.values())

    @property
    def holders(self) -> list[int]:
        """The holders of copies in pools, of all ranks."""
        return list(self._holder_of.values())

    def state(self) -> list[PlacementState | None]:
        """Every placement by number, with its holder if it has one."""
        return [
            None if each is None else (each, self._holder_of.get(number))
            for number, each in enumerate(self._placements)
        ]

    def load(self, state: Sequence[PlacementState | None]) -> None:
        """Be what other placements were; there are none here yet."""
        self._placements = [None if each is None else each[0] for each in state]
        for number, each in enumerate(state):
            if each is not None:
                self._number_of.setdefault(each[0].rank_number, {})[each[0]] = number
                if each[1] is not None:
                    self._holder_of[number] = each[1]
        self._numbers.follow_pools(
            {
                holder: placement.pool_id
                for placement, holder in filter(None, state)
                if holder is not None
                and placement.workers is None
                and placement.pool_id is not None
            }
        )

    @property
    def numbers(self) -> list[int]:
        """Those in use, of all ranks."""
        return [number for number, each in enumerate(self._placements) if each is not None]

    def placement(self, number: int) -> Placement:
        """What is behind a number that is in use."""
        placement = self._placements[number]
        assert placement is not None
        return placement

    def numbers_of(self, rank_number: int) -> list[int]:
        """The numbers of a rank's placements."""
        return list(self._number_of.get(rank_number, {}).values())

    def is_full(self, rank_number: int) -> bool:
        """Whether a rank can have no more placements."""
        return len(self._number_of.get(rank_number, ())) >= MAX_PLACEMENTS

    def find(self, placement: Placement) -> int | None:
        """The number of a placement, None if it has none yet."""
        return self._number_of.get(placement.rank_number, {}).get(placement)

    def add(self, placement: Placement) -> int:
        """The number of a placement that had none."""
        free = self._placements.index(None) if None in self._placements else len(self._placements)
        self._placements[free : free + 1] = [placement]
        self._number_of.setdefault(placement.rank_number, {})[placement] = free
        return free

    def holder(self, number: int) -> int:
        """The holder of the copies there; given on first use."""
        holder = self._holder_of.get(number)
        if holder is None:
            rank_number, pool_id, workers = self.placement(number)
            holder = self._numbers.add_pool(rank_number, workers, pool_id)
            self._holder_of[number] = holder
        return holder

    def free(self, numbers: list[int]) -> None:
        """No block refers to these any more."""
        holders = [self._holder_of.pop(number) for number in numbers if number in self._holder_of]
        for number in numbers:
            placement = self.placement(number)
            del self._number_of[placement.rank_number][placement]
            if not self._number_of[placement.rank_number]:
                del self._number_of[placement.rank_number]
            self._placements[number] = None
        if holders:
            self._numbers.remove_pools(holders)


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
        """Be what other states were; their placements are loaded.

        slots, ring: uint64[n]. Raises IndexCorruptError if the slots are no table.
        """
        require_sound("cxl.table", slots)
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
        """Table, ring and placements agree; raises IndexCorruptError."""
        self.table.check()
        keys, entries = self.table.items()
        if not np.isin(placement_of(entries), self._placements.numbers).all():
            raise IndexCorruptError("cxl: an entry is of no placement in use")
        serials = entries >> _SERIAL_SHIFT
        is_retained = state_of(entries) != POOLED
        if serials[~is_retained].any() or is_retained.sum() > self._max_retained:
            raise IndexCorruptError("cxl: a pooled block is in the ring, or the ring is too full")
        keys, serials = keys[is_retained], serials[is_retained]
        places = serials % np.uint64(max(1, len(self._ring)))
        if len(keys) and not (len(self._ring) and np.array_equal(self._ring[places], keys)):
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
