"""A table uint64 -> uint64 that grows, over the kernels of kernels/table.py.

In:  arrays of keys (and values above 0).   Out: arrays of values, 0 where a key is absent.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvplug.errors import IndexCorruptError
from kvplug.kernels import table as kernels

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.uint8]

_MIN_CAPACITY = 64
# Linear probing: about 2 probes a hit and 5 a miss at 0.75; memory wins beyond that, speed loses.
_MAX_LOAD = 0.75
_GROWTH = 1.6


class HashTable:
    """len(), find, put, erase and counting, batched; never shrinks below what it needed once.

    `slots` and `count` (int64[1], the number of entries) may be changed by a kernel in between,
    after `reserve`.
    """

    def __init__(self) -> None:
        self.slots: U64 = np.zeros(2 * _MIN_CAPACITY, dtype=np.uint64)
        self.count: I64 = np.zeros(1, dtype=np.int64)
        self.num_growths = 0  # how often `slots` has become another array

    def __len__(self) -> int:
        return int(self.count[0])

    @property
    def arrays(self) -> tuple[U64, I64]:
        """Slots and count, for kernels that change both."""
        return self.slots, self.count

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the table."""
        return int(self.slots.nbytes)

    def find(self, keys: U64) -> U64:
        """Value of each key, 0 where absent."""
        values = np.empty(len(keys), dtype=np.uint64)
        kernels.find_many(self.slots, keys, values)
        return values

    def find_prefix(self, keys: U64) -> U64:
        """Values of the leading keys, up to the first absent one."""
        values = np.empty(len(keys), dtype=np.uint64)
        return values[: kernels.find_prefix(self.slots, keys, values)]

    def put(self, keys: U64, values: U64) -> None:
        """Store or overwrite."""
        self.reserve(len(keys))
        self.count += kernels.put_many(self.slots, keys, values)

    def find_or_put(self, keys: U64, fresh_values: U64) -> tuple[U64, int]:
        """Values of the keys, absent ones take fresh values in order; and how many were taken."""
        self.reserve(len(keys))
        values = np.empty(len(keys), dtype=np.uint64)
        num_taken = kernels.find_or_put_many(self.slots, keys, fresh_values, values)
        self.count += num_taken
        return values, num_taken

    def erase(self, keys: U64) -> None:
        """Remove the keys that are there."""
        self.count -= kernels.erase_many(self.slots, keys)

    def count_up(self, keys: U64) -> None:
        """Add one to the value of each key."""
        self.reserve(len(keys))
        self.count += kernels.count_up_many(self.slots, keys)

    def count_down(self, keys: U64) -> npt.NDArray[np.bool_]:
        """Take one from each key that is there, erase it at 0; returns which were there."""
        counted = np.empty(len(keys), dtype=np.uint8)
        self.count -= kernels.count_down_many(self.slots, keys, counted)
        return counted.view(np.bool_)

    def extend_runs(self, keys: U64, salts: U64, ends: I64) -> None:
        """Move ends[j] forward while keys[ends[j]] ^ salts[j] is in the table."""
        kernels.extend_runs(self.slots, keys, salts, ends)

    def items(self) -> tuple[U64, U64]:
        """All keys and their values, in no order."""
        pairs = self.slots.reshape(-1, 2)
        pairs = pairs[pairs[:, 1] != 0]
        return pairs[:, 0].copy(), pairs[:, 1].copy()

    def check(self) -> None:
        """Every entry is found where a lookup would look; raises IndexCorruptError."""
        keys, values = self.items()
        if len(keys) != len(self):
            raise IndexCorruptError(f"table: counted {len(self)} entries, found {len(keys)}")
        if not np.array_equal(self.find(keys), values):
            raise IndexCorruptError("table: an entry is not reachable by lookup")

    def reserve(self, num_more: int) -> None:
        """Make room, so that as many entries can come and one slot stays empty."""
        needed = len(self) + num_more + 1
        capacity = len(self.slots) // 2
        if needed <= capacity * _MAX_LOAD:
            return
        grown = max(int(capacity * _GROWTH), int(needed / _MAX_LOAD) + 1)
        slots = np.zeros(2 * grown, dtype=np.uint64)
        kernels.rehash(self.slots, slots)
        self.slots = slots
        self.num_growths += 1
