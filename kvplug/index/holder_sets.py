"""Interned sets of holders that grow, over the kernels of kernels/holders.py.

In:  how many sets may come, for which holders.   Out: the arrays, for kernels that change them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvplug.errors import IndexCorruptError
from kvplug.index.arrays import ArrayVersion
from kvplug.kernels import holders as kernels

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_MIN_SETS = 64
_MAX_LOAD = 0.5


class HolderSets:
    """len(), reserve, mask_of, any_of; kernels change the arrays.

    `version` counts when one of the arrays has become another one.
    """

    def __init__(self, version: ArrayVersion | None = None) -> None:
        self.words = 1
        self._version = version or ArrayVersion()
        self.start_over()

    def __len__(self) -> int:
        """Number of distinct sets in use, the empty one not counted."""
        return int(self.header[kernels.NUM_LIVE])

    def start_over(self) -> None:
        """Give memory back; no set may be in use."""
        self.bits: U64 = np.zeros(_MIN_SETS * self.words, dtype=np.uint64)
        self.meta: U64 = np.zeros(2 * _MIN_SETS, dtype=np.uint64)
        self.meta[3::2] = np.arange(2, _MIN_SETS + 1)
        self.intern: U32 = np.zeros(int(_MIN_SETS / _MAX_LOAD), dtype=np.uint32)
        self.header: I64 = np.zeros(kernels.NUM_HELD + 64 * self.words, dtype=np.int64)
        self.header[: kernels.NUM_HELD] = self.words, 1, 0
        self._version.count += 1

    @property
    def least_nbytes(self) -> int:
        """Bytes of memory as at the start."""
        return _MIN_SETS * (8 * self.words + 16) + 4 * int(_MIN_SETS / _MAX_LOAD)

    def load(self, bits: U64, meta: U64, intern: U32, header: I64) -> None:
        """Be what other sets were whose arrays these are."""
        self.bits, self.meta, self.intern, self.header = bits, meta, intern, header
        self.words = int(header[kernels.WORDS])

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all arrays."""
        return int(self.bits.nbytes + self.meta.nbytes + self.intern.nbytes)

    @property
    def num_held(self) -> I64:
        """int64[64 * words], how many blocks each holder has."""
        return self.header[kernels.NUM_HELD :]

    def sum_by_holder(self, sets: I64, num_blocks: I64) -> I64:
        """int64[64 * words]: for each holder the sum of num_blocks[i] over the sets[i] it is in."""
        of_set = np.bincount(sets, num_blocks, self.capacity).astype(np.int64)
        used = np.flatnonzero(of_set)
        words = self.bits.reshape(-1, self.words)[used]
        sums: I64 = np.empty(64 * self.words, dtype=np.int64)
        for w in range(self.words):  # one at a time: 64 numbers a set are enough to hold
            as_bytes = np.ascontiguousarray(words[:, w : w + 1]).view(np.uint8)
            members = np.unpackbits(as_bytes, axis=1, bitorder="little")
            sums[64 * w : 64 * (w + 1)] = of_set[used] @ members
        return sums

    @property
    def num_members(self) -> I64:
        """int64[sets], how many holders each set has."""
        as_bits = np.unpackbits(self.bits.view(np.uint8)).reshape(-1, 64 * self.words)
        return np.asarray(as_bits.sum(axis=1, dtype=np.int64))

    def reserve(self, holder: int, num_changes: int) -> None:
        """Make room for the holder's number and for the sets that so many changes may bring.

        A change takes the holder into the set of a run, or out of it. So each set in use, and the
        empty one, turns into at most one new set, however many runs change.
        """
        if holder >= 64 * self.words:
            self._widen(self._words_for(holder))
        capacity = self._capacity_for(num_changes)
        if capacity > self.capacity:
            self._grow(capacity)

    @property
    def capacity(self) -> int:
        """How many numbers there are, the empty set's included."""
        return len(self.meta) // 2

    def grown_nbytes(self, holder: int, num_changes: int) -> int:
        """Bytes of memory that the arrays would have after `reserve`."""
        capacity, words = self._capacity_for(num_changes), self._words_for(holder)
        return capacity * (8 * words + 16) + 4 * int(capacity / _MAX_LOAD)

    def _words_for(self, holder: int) -> int:
        fits = holder < 64 * self.words
        return self.words if fits else max(2 * self.words, holder // 64 + 1)

    def _capacity_for(self, num_changes: int) -> int:
        needed = len(self) + min(num_changes, len(self) + 1) + 2
        return self.capacity if needed <= self.capacity else max(2 * self.capacity, needed)

    def any_of(self, holders: list[int]) -> Mask:
        """bool[sets]: which sets have any of the holders."""
        return np.asarray((self.bits.reshape(-1, self.words) & self.mask_of(holders)).any(axis=1))

    def mask_of(self, holders: list[int]) -> U64:
        """uint64[words]: the bits of these holders; those that no set can have yet are left out."""
        mask = np.zeros(self.words, dtype=np.uint64)
        for holder in holders:
            if holder < 64 * self.words:
                mask[holder // 64] |= np.uint64(1 << (holder % 64))
        return mask

    def check(self, set_of_run: I64) -> None:
        """Counts, interning and the free list agree; raises IndexCorruptError.

        set_of_run: the set of each run that has one.
        """
        used, num_runs = np.unique(set_of_run[set_of_run != 0], return_counts=True)
        if not np.array_equal(self.meta[1::2][used], num_runs.astype(np.uint64)):
            raise IndexCorruptError("sets: a set counts other runs than it has")
        interned = np.sort(self.intern[self.intern != 0])
        if len(used) != len(self) or not np.array_equal(interned, used):
            raise IndexCorruptError("sets: what is interned is not what runs have")
        members = self.bits.reshape(-1, self.words)[used]
        if len(np.unique(members, axis=0)) != len(used) or not members.any(axis=1).all():
            raise IndexCorruptError("sets: two sets with the same members, or an empty one")
        if self.bits[: self.words].any() or self._num_free() != len(self.meta) // 2 - 1 - len(used):
            raise IndexCorruptError("sets: a set is neither used nor free")

    @property
    def arrays(self) -> tuple[U64, U64, U32, I64]:
        """bits, meta, intern and header, as kernels/holders.py wants them."""
        return self.bits, self.meta, self.intern, self.header

    def _num_free(self) -> int:
        num_free, at = 0, int(self.header[kernels.FIRST_FREE])
        while at < len(self.meta) // 2:
            num_free, at = num_free + 1, int(self.meta[2 * at + 1])
        return num_free

    def _widen(self, words: int) -> None:
        wide = np.zeros((len(self.meta) // 2, words), dtype=np.uint64)
        wide[:, : self.words] = self.bits.reshape(-1, self.words)
        more: I64 = np.zeros(64 * (words - self.words), dtype=np.int64)
        self.bits, self.words = wide.reshape(-1), words
        self.header = np.concatenate([self.header, more])
        self.header[kernels.WORDS] = words
        self._version.count += 1

    def _grow(self, capacity: int) -> None:
        old = len(self.meta) // 2
        self.bits = np.concatenate(
            [self.bits, np.zeros((capacity - old) * self.words, dtype=np.uint64)]
        )
        # The free list ends at the old capacity, which is the first of the new numbers.
        fresh = np.zeros(2 * (capacity - old), dtype=np.uint64)
        fresh[1::2] = np.arange(old + 1, capacity + 1)
        self.meta = np.concatenate([self.meta, fresh])
        self.intern = np.zeros(int(capacity / _MAX_LOAD), dtype=np.uint32)
        kernels.reintern(self.words, capacity, self.meta, self.intern)
        self._version.count += 1
