"""Blocks of live requests, per rank.

In:  the sequence hashes of a whole prompt, the number of the rank that it is on.
Out: the table changed; how many blocks came into use or went out of use; a shared prefix; a suffix
     that only one request has.

    slots   sequence hash xor the mark of the rank -> how many live requests have the block

A request enters all of its blocks, so a block in use has its whole prefix in use, by at least as
many requests: how much a new request shares with those of a rank, and how much of a live one is its
own, is found by bisection. Reference: a Counter per rank (tests/kernels/test_active_blocks.py).
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import i8, inlined, kernel, reads, u8, void, writes
from kvplug.kernels.holders import mark_of
from kvplug.kernels.table import (
    NUM_PREFETCHED,
    capacity_of,
    count_up,
    erase_slot,
    find_slot,
    prefetch_key,
    value_of,
)

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Index = int | np.int64

_0, _1, _2 = np.uint64(0), np.uint64(1), np.uint64(2)


@inlined
def _prefetch_ahead(
    slots: U64, hashes: U64, i: Index, mark: np.uint64, capacity: np.uint64
) -> None:
    """Prefetch the slots of later blocks: of a whole window at the start, then of one at a time."""
    last = min(len(hashes), i + NUM_PREFETCHED + 1)
    for later in range(0 if i == 0 else i + NUM_PREFETCHED, last):
        prefetch_key(slots, hashes[later] ^ mark, capacity)


@inlined
def add(slots: U64, hashes: U64, rank: Index) -> Index:
    """One more request has these blocks; returns how many nobody on the rank had. There is room."""
    mark, capacity, num_before = mark_of(rank), capacity_of(slots), slots[len(slots) - 2]
    for i in range(len(hashes)):
        _prefetch_ahead(slots, hashes, i, mark, capacity)
        count_up(slots, hashes[i] ^ mark, _0)
    return np.int64(slots[len(slots) - 2] - num_before)


@inlined
def shared(slots: U64, hashes: U64, rank: Index) -> Index:
    """How many leading blocks live requests on the rank have."""
    mark, first, last = mark_of(rank), np.int64(0), np.int64(len(hashes))
    if last == 0 or value_of(slots, hashes[0] ^ mark) == _0:
        return first
    while last - first > 1:  # the rank has block `first`, and not `last` if that is a block
        middle = (first + last) // 2
        if value_of(slots, hashes[middle] ^ mark) != _0:
            first = middle
        else:
            last = middle
    return first + 1


@kernel(i8(writes(u8), reads(u8), i8))
def enter(slots: U64, hashes: U64, rank: Index) -> Index:
    """As `add`."""
    return add(slots, hashes, rank)


@kernel(i8(writes(u8), reads(u8), i8))
def leave(slots: U64, hashes: U64, rank: Index) -> Index:
    """A request that has these blocks is over; returns how many no other on the rank has."""
    mark, capacity, num_gone = mark_of(rank), capacity_of(slots), 0
    for i in range(len(hashes)):
        _prefetch_ahead(slots, hashes, i, mark, capacity)
        at = find_slot(slots, hashes[i] ^ mark, capacity)
        if slots[_2 * at + _1] == _1:
            erase_slot(slots, at, capacity)
            num_gone += 1
        elif slots[_2 * at + _1] != _0:
            slots[_2 * at + _1] -= _1
    return num_gone


@kernel(i8(reads(u8), reads(u8), i8))
def num_exclusive(slots: U64, hashes: U64, rank: Index) -> Index:
    """How many last blocks of a live request no other request on the rank has."""
    mark, first, last = mark_of(rank), np.int64(0), np.int64(len(hashes))
    while first < last:  # the blocks from `last` on are its own, those before `first` are not
        middle = (first + last) // 2
        if value_of(slots, hashes[middle] ^ mark) > _1:
            first = middle + 1
        else:
            last = middle
    return len(hashes) - last


@kernel(void(reads(u8), reads(u8), writes(i8)))
def fill_shared(slots: U64, hashes: U64, out_depths: I64) -> None:
    """out_depths[rank] = shared(slots, hashes, rank)."""
    for rank in range(len(out_depths)):
        out_depths[rank] = shared(slots, hashes, rank)
