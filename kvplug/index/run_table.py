"""Runs of blocks in an array that grows, over kernels/runs.py.

In:  how many runs may come.   Out: the array, and its words as columns.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvplug.index.arrays import ArrayVersion, zeros
from kvplug.kernels import runs as kernels

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_MIN_RUNS = 256
_GROWTH = 1.5
_SHIFT, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


class RunTable:
    """len(), reserve; the words of all runs as arrays by run number."""

    def __init__(self, version: ArrayVersion | None = None, words: U64 | None = None) -> None:
        self._version = version or ArrayVersion()
        if words is None:
            self.start_over()
        else:
            self.words: U64 = words

    def __len__(self) -> int:
        """Number of runs."""
        return int(self.words[int(kernels.END)])

    def start_over(self) -> None:
        """Give memory back; there may be no run."""
        self.words = np.zeros(0, dtype=np.uint64)
        self._grow(_MIN_RUNS)
        self.words[int(kernels.START)] = 1
        self.words[int(kernels.USED)] = 1

    @property
    def capacity(self) -> int:
        """How many numbers there are, 0 included."""
        return len(self.words) // kernels.WIDTH

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the array."""
        return int(self.words.nbytes)

    def column(self, word: np.uint64) -> U64:
        """uint64[capacity], a view of one word of every number."""
        return self.words.reshape(-1, kernels.WIDTH)[:, int(word)]

    @property
    def is_live(self) -> Mask:
        """bool[capacity], which numbers are in use."""
        live = np.asarray(self.column(kernels.USED) >> _SHIFT != 0)
        live[0] = False
        return live

    @property
    def is_list_whole(self) -> bool:
        """Whether every free number is followed once, and the last one by the first beyond them."""
        free = np.flatnonzero(~self.is_live)  # run 0 has the first one
        following = np.sort(self.column(kernels.START)[free])
        return np.array_equal(following, np.append(free[1:], self.capacity))

    @property
    def sets(self) -> I64:
        """int64[capacity], the set of each, 0 if nobody has it."""
        return np.asarray(self.column(kernels.SET) & _LOW).astype(np.int64)

    @property
    def families(self) -> U64:
        """uint64[capacity], the family of each, 0 for none."""
        return np.asarray(self.column(kernels.SET) >> _SHIFT)

    @property
    def above(self) -> U64:
        """uint64[capacity], the run above each, 0 if it is not known."""
        return np.asarray(self.column(kernels.LINKS) & _LOW)

    @property
    def below(self) -> U64:
        """uint64[capacity], the run below each, 0 if it is not known."""
        return np.asarray(self.column(kernels.LINKS) >> _SHIFT)

    @property
    def parents(self) -> U64:
        """uint64[capacity], the hash of the block before each, 0 if it is not known by its hash."""
        return np.where(self.above == 0, self.column(kernels.PARENT), np.uint64(0))

    @property
    def only_changes(self) -> I64:
        """int64[capacity], the only holder that comes or goes from the run above; -1: not known."""
        remembered = self.column(kernels.PARENT).astype(np.int64) - 1
        return np.where(self.above != 0, remembered, -1)

    @property
    def age(self) -> I64:
        """int64[capacity], for how long each run was not used, in events and queries."""
        used = self.column(kernels.USED)
        return np.asarray((used[0] - (used >> _SHIFT)) & _LOW).astype(np.int64)

    @property
    def num_blocks(self) -> I64:
        """int64[capacity], how many blocks each run has."""
        span = self.column(kernels.END) + np.uint64(1) - self.column(kernels.START)
        count = span - (self.column(kernels.USED) & _LOW)
        return np.where(self.is_live, count, 0).astype(np.int64)

    def grown_nbytes(self, num_more: int) -> int:
        """Bytes of memory that the array would have after `reserve`."""
        return 8 * kernels.WIDTH * self._capacity_for(num_more)

    @staticmethod
    def least_nbytes(num_runs: int) -> int:
        """Bytes of memory of an array that had no run before so many came."""
        return 8 * kernels.WIDTH * max(_MIN_RUNS, num_runs + 2)

    def reserve(self, num_more: int) -> None:
        """Make room for as many runs."""
        capacity = self._capacity_for(num_more)
        if capacity > self.capacity:
            self._grow(capacity)

    def _capacity_for(self, num_more: int) -> int:
        needed = len(self) + num_more + 2
        if needed <= self.capacity:
            return self.capacity
        return max(int(self.capacity * _GROWTH), needed)

    def _grow(self, capacity: int) -> None:
        old = self.capacity
        words = zeros(kernels.WIDTH * capacity)
        words[: len(self.words)] = self.words
        # The free list ends at the old capacity, which is the first of the new numbers.
        starts = words.reshape(-1, kernels.WIDTH)[:, int(kernels.START)]
        starts[max(1, old) :] = np.arange(max(1, old) + 1, capacity + 1)
        self.words = words
        self._version.count += 1
