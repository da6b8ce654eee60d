"""Blocks that a routed request is about to create, until the engine says so or time is up.

In:  a rank number and sequence hashes, at a time in seconds.   Out: longer prefixes per rank.

Between the decision and the engine's event some milliseconds pass. In a burst of requests with
one new prefix each of them would miss and go elsewhere, so the decision itself is remembered for a
short while. Entries expire in the order in which they came (one time to live for all):

    ring    key, deadline of entry n at n modulo capacity; n counts up for ever
    table   key -> n + 1 of its latest entry

key = sequence hash xor a mark of the rank. An entry whose n is not the table's was renewed or
confirmed, and expires without effect. When the ring is full, the oldest entries go first.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvplug.index.hash_table import HashTable

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_CAPACITY = 2**17


@lru_cache(maxsize=4096)
def mark_of(rank_number: int) -> np.uint64:
    """What the keys of a rank's entries are marked with: splitmix64 of its number."""
    x = (rank_number + 1) * 0x9E3779B97F4A7C15 % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return np.uint64(x ^ (x >> 31))


class SpeculativeBlocks:
    """insert, confirm, expire; extends the prefixes that the index knows."""

    def __init__(self, ttl_s: float, capacity: int = _CAPACITY) -> None:
        self.ttl_s = ttl_s
        self.num_lost = 0  # dropped early, or at once, because the ring was full
        self.table = HashTable()
        self._keys = np.zeros(capacity, dtype=np.uint64)
        self._ranks = np.zeros(capacity, dtype=np.int32)
        self._deadlines = np.zeros(capacity, dtype=np.float64)
        self._first = self._next = 0

    def __len__(self) -> int:
        return len(self.table)

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the ring and the table."""
        ring = self._keys.nbytes + self._ranks.nbytes + self._deadlines.nbytes
        return self.table.nbytes + int(ring)

    def insert(self, rank_number: int, sequence_hashes: U64, now_s: float) -> None:
        """The rank will hold these blocks; only the first `capacity` of them are kept."""
        if self.ttl_s <= 0 or not len(sequence_hashes):
            return
        hashes = sequence_hashes[: len(self._keys)]
        self.num_lost += len(sequence_hashes) - len(hashes)
        self._make_room(len(hashes))
        numbers = np.arange(self._next, self._next + len(hashes)).astype(np.uint64)
        places = numbers % np.uint64(len(self._keys))
        keys = hashes ^ mark_of(rank_number)
        self._keys[places], self._ranks[places] = keys, rank_number
        self._deadlines[places] = now_s + self.ttl_s
        self.table.put(keys, numbers + np.uint64(1))
        self._next += len(hashes)

    def confirm(self, rank_number: int, sequence_hashes: U64) -> None:
        """The engine reported these blocks: the index knows them now."""
        if len(self.table):
            self.table.erase(sequence_hashes ^ mark_of(rank_number))

    def forget(self, rank_number: int) -> None:
        """The rank is gone or cleared."""
        numbers = self._numbers(self._next)
        places = numbers % np.uint64(len(self._keys))
        self._erase(numbers[self._ranks[places] == rank_number])

    def expire(self, now_s: float) -> None:
        """Drop what is older than the time to live."""
        if self._first == self._next:
            return
        deadlines = self._deadlines[self._numbers(self._next) % np.uint64(len(self._keys))]
        num_due = int(np.searchsorted(deadlines, now_s, side="right"))
        self._drop_first(num_due)

    def extend(self, sequence_hashes: U64, depths: I64, now_s: float) -> I64:
        """int64[ranks]: each depth moved on over the speculative blocks that follow it."""
        self.expire(now_s)
        if not len(self.table):
            return depths
        marks = np.array([mark_of(rank) for rank in range(len(depths))], dtype=np.uint64)
        ends = depths.copy()
        self.table.extend_runs(sequence_hashes, marks, ends)
        return ends

    def _numbers(self, end: int) -> U64:
        return np.arange(self._first, end).astype(np.uint64)

    def _make_room(self, num_more: int) -> None:
        excess = self._next + num_more - self._first - len(self._keys)
        if excess > 0:
            self.num_lost += excess
            self._drop_first(excess)

    def _drop_first(self, num_entries: int) -> None:
        if num_entries:
            self._erase(self._numbers(self._first + num_entries))
            self._first += num_entries

    def _erase(self, numbers: U64) -> None:
        keys = self._keys[numbers % np.uint64(len(self._keys))]
        is_latest = self.table.find(keys) == numbers + np.uint64(1)
        self.table.erase(keys[is_latest])
