"""A table uint64 -> uint64 that grows, over the kernels of kernels/table.py.

In:  arrays of keys (and values above 0).   Out: arrays of values, 0 where a key is absent.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvplug.errors import IndexCorruptError
from kvplug.index.arrays import ArrayVersion, zeros
from kvplug.kernels import table as kernels

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_MIN_CAPACITY = 8
# Growing a small table costs as much as storing, mostly in pages that are touched for the first
# time (kvplug/index/arrays.py): so it grows to 256 KiB, to one huge page, and only then by
# little. Doubling instead took three times as long, from empty to 2 MiB.
_STEPS = 2**14, kernels.LARGE
_GROWTH = 1.15
# What a table gives back is at least so much of it, and it keeps room to grow: with each change of
# size all entries move.
_LEAST_SHRINKAGE, _SPARE = 1 / 8, 1 / 16


class HashTable:
    """len(), find, put, erase, batched; it only gets smaller by `shrink`.

    `slots` may be changed by a kernel in between, after `reserve`; `version` counts when it has
    become another array.
    """

    def __init__(self, version: ArrayVersion | None = None, slots: U64 | None = None) -> None:
        self.slots: U64 = _empty(_MIN_CAPACITY) if slots is None else slots
        self._version = version or ArrayVersion()

    def __len__(self) -> int:
        return int(self.slots[-2])

    @property
    def limit(self) -> int:
        """How many entries there may be, as far as kernels ask (table.has_room); 0: any number."""
        return int(self.slots[-1])

    @limit.setter
    def limit(self, num_entries: int) -> None:
        self.slots[-1] = num_entries

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return len(self.slots) // 2 - 1

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the table."""
        return int(self.slots.nbytes)

    def find(self, keys: U64) -> U64:
        """Value of each key, 0 where absent."""
        values = np.empty(len(keys), dtype=np.uint64)
        kernels.find_many(self.slots, keys, values)
        return values

    def put(self, keys: U64, values: U64) -> None:
        """Store or overwrite."""
        self.reserve(len(keys))
        kernels.put_many(self.slots, keys, values)

    def erase(self, keys: U64) -> int:
        """Remove the keys that are there; returns how many."""
        return int(kernels.erase_many(self.slots, keys))

    def count_equal(self, keys: U64, salts: U64, ends: I64, values: U64, counts: I64) -> None:
        """counts[j]: how many of keys[:ends[j]] ^ salts[j] have values[j]."""
        kernels.count_equal(self.slots, keys, salts, ends, values, counts)

    def items(self) -> tuple[U64, U64]:
        """All keys and their values, in no order."""
        pairs = self.slots[:-2].reshape(-1, 2)
        pairs = pairs[pairs[:, 1] != 0]
        return pairs[:, 0].copy(), pairs[:, 1].copy()

    def check(self) -> None:
        """Every entry is found where a lookup would look; raises IndexCorruptError."""
        if len(self) >= self.capacity:
            raise IndexCorruptError("table: no slot is empty")
        num_found = int(kernels.count_reachable(self.slots))
        if num_found != len(self):
            raise IndexCorruptError(
                f"table: counted {len(self)} entries, found {num_found} by lookup"
            )

    def grown_nbytes(self, num_more: int) -> int:
        """Bytes of memory that the table would have after `reserve`."""
        return 16 * (self._capacity_for(num_more) + 1)

    def reserve(self, num_more: int) -> None:
        """Make room, so that as many entries can come and one slot stays empty."""
        capacity = self._capacity_for(num_more)
        if capacity != self.capacity:
            self._move(capacity)

    def shrink(self) -> bool:
        """Give memory back that the entries do not need; False if there is not much of it."""
        capacity = _least_capacity(len(self) + int(_SPARE * len(self)))
        if capacity > (1 - _LEAST_SHRINKAGE) * self.capacity:
            return False
        self._move(capacity)
        return True

    def _move(self, capacity: int) -> None:
        slots = _empty(capacity)
        slots[-1] = self.limit
        kernels.rehash(self.slots, slots)
        self.slots = slots
        self._version.count += 1

    def _capacity_for(self, num_more: int) -> int:
        needed = len(self) + num_more
        if needed <= _most_entries(self.capacity):
            return self.capacity
        for step in _STEPS:
            if (
                step > self.capacity
                and needed <= _most_entries(step)
                and not self._version.is_tight
            ):
                return step
        return max(_whole_buckets(int(self.capacity * _GROWTH)), _least_capacity(needed))


def require_sound(name: str, slots: U64) -> None:
    """Raises IndexCorruptError if slots from a file are no table: kernels would leave them."""
    if (
        slots.dtype != np.uint64
        or len(slots) < 2 + 2 * kernels.BUCKET
        or (len(slots) - 2) % (2 * kernels.BUCKET)
        or (slots[-2] >= len(slots) // 2 - 1)
    ):
        raise IndexCorruptError(f"{name} is no table")
    num_filled = np.count_nonzero(slots[1:-2:2])
    if num_filled != slots[-2]:
        raise IndexCorruptError(f"{name} has {num_filled} entries and says {slots[-2]}")


def _most_entries(capacity: int) -> int:
    """As kernels/table.py has it."""
    return (2 if capacity < kernels.LARGE else 4) * capacity // 5 - 1


def least_nbytes(num_entries: int) -> int:
    """Bytes of memory of the smallest table with so many entries."""
    return 16 * (_least_capacity(num_entries) + 1)


def _least_capacity(num_entries: int) -> int:
    """The smallest that has room for so many."""
    sparse = (5 * (num_entries + 1) + 1) // 2
    dense = max(kernels.LARGE, (5 * (num_entries + 1) + 3) // 4)
    return _whole_buckets(max(_MIN_CAPACITY, sparse if sparse < kernels.LARGE else dense))


def _whole_buckets(num_slots: int) -> int:
    return -(-num_slots // kernels.BUCKET) * kernels.BUCKET


def _empty(capacity: int) -> U64:
    return zeros(2 * capacity + 2)
