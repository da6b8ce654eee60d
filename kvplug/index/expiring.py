"""Blocks that a rank is taken to hold for a while, because of what it was sent, not what it said.

In:  a rank number and sequence hashes, at a time in seconds.   Out: longer prefixes per rank.

One class for two uses, with the time to live of each:

    speculative  Between the decision and the engine's event some milliseconds pass. In a burst of
                 requests with one new prefix each of them would miss and go elsewhere, so the
                 decision itself is remembered until the event confirms it.
    approximate  Without events nothing else is known: what was routed to a rank counts as held
                 there, and is renewed with each request that has it.

Entries expire in the order in which they were inserted or renewed. An overdue one never counts;
its memory comes back bit by bit, as requests end and with later insertions. They are no annotation
of blocks: kvplug/index/block_annotation.py says why.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvplug.errors import IndexCorruptError
from kvplug.index.arrays import ArrayVersion
from kvplug.index.hash_table import HashTable
from kvplug.kernels import expiring as kernels
from kvplug.kernels.bundle import Bundle
from kvplug.kernels.expiring import Ring

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
F64 = npt.NDArray[np.float64]

# 33 million tokens in blocks of 16; memory is taken as it is needed.
_CAPACITY = 2**21
_MIN_NODES, _MIN_RANKS = 4, 16


@lru_cache(maxsize=4096)
def mark_of(rank_number: int) -> np.uint64:
    """What the keys of a rank's entries are marked with: splitmix64 of its number."""
    return np.uint64(kernels.mark_of(rank_number))


class ExpiringBlocks:
    """insert, confirm, forget, expire; extend moves prefixes on over what is there.

    `table` has key -> node + 1; whoever deletes a key from it has ended that entry. `capacity`
    bounds the entries, ended ones included until their time is up; the oldest make room.
    """

    def __init__(
        self,
        ttl_s: float,
        capacity: int = _CAPACITY,
        *,
        version: ArrayVersion | None = None,
        max_more_expired: int = 64,
    ) -> None:
        """An insertion expires at most as many entries as it brings, and `max_more_expired`.

        `version` counts when `table.slots` or one of `query_arrays` has become another array.
        """
        self.ttl_s, self.capacity, self.max_more_expired = ttl_s, capacity, max_more_expired
        self._version = version or ArrayVersion()
        self.table = HashTable(self._version)
        self._keys: U64 = np.zeros(0, dtype=np.uint64)
        self._deadlines: F64 = np.zeros(0)
        self._links: I32 = np.zeros(0, dtype=np.int32)
        self._state: I64 = np.zeros(kernels.NUM_OF_RANK + _MIN_RANKS, dtype=np.int64)
        self._add_nodes(min(_MIN_NODES, capacity))
        self._seen_version = -1

    def __len__(self) -> int:
        """Number of entries; overdue ones count until they are expired."""
        return len(self.table)

    @property
    def num_lost(self) -> int:
        """Entries that were dropped before their time, or never entered, for want of room."""
        return int(self._state[kernels.NUM_LOST])

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the ring and the table."""
        return self.table.nbytes + sum(array.nbytes for array in self.ring)

    @property
    def ring(self) -> Ring:
        """The arrays of the nodes."""
        return Ring(self._keys, self._deadlines, self._links, self._state)

    @property
    def arrays(self) -> tuple[U64, U64, F64, I32, I64]:
        """Slots of the table, then the ring: what kernels.expiring.insert_blocks changes."""
        return self.table.slots, self._keys, self._deadlines, self._links, self._state

    @property
    def bundle(self) -> U64:
        """`arrays` as one argument of a kernel, good until one is replaced."""
        if self._seen_version != self._version.count:
            self._bundle = Bundle(*self.arrays)
            self._seen_version = self._version.count
        return self._bundle.words

    @property
    def query_arrays(self) -> tuple[U64, F64, I64]:
        """Slots, deadlines and state: what kernels.expiring.extend reads."""
        return self.table.slots, self._deadlines, self._state

    def insert(self, rank_number: int, sequence_hashes: U64, now_s: float) -> None:
        """The rank will hold these blocks; only the first `capacity` of them are kept.

        Those that are there already are renewed. A clock that goes back does not shorten lives.
        """
        if self.ttl_s <= 0 or not len(sequence_hashes):
            return
        hashes = sequence_hashes[: self.capacity]
        self._state[kernels.NUM_LOST] += len(sequence_hashes) - len(hashes)
        self.reserve(rank_number, len(hashes))
        max_expired = len(hashes) + self.max_more_expired
        kernels.insert(rank_number, now_s, self.ttl_s, max_expired, hashes, self.bundle)

    def confirm(self, rank_number: int, sequence_hashes: U64) -> None:
        """The engine reported these blocks: the index knows them now."""
        if len(self.table):
            kernels.confirm(rank_number, sequence_hashes, self.table.slots)

    def forget(self, rank_number: int) -> None:
        """The rank is gone or cleared."""
        if self._num_nodes_of(rank_number):
            kernels.forget(rank_number, self.bundle)

    def expire(self, now_s: float, max_entries: int = 4096) -> None:
        """Give back the memory of overdue entries, of the oldest ones if there are more."""
        kernels.expire(now_s, max_entries, self.bundle)

    def extend(self, sequence_hashes: U64, depths: I64, now_s: float) -> I64:
        """int64[ranks]: each depth moved on over the entries that follow it."""
        if not len(self.table):
            return depths
        ends = depths.copy()
        kernels.extend_depths(now_s, sequence_hashes, self.bundle, ends)
        return ends

    def check(self) -> None:
        """Every invariant of ring and table; raises IndexCorruptError with the broken one."""
        self.table.check()
        used = self._check_circle()
        if (np.diff(self._deadlines[used]) < 0).any():
            raise IndexCorruptError("expiring blocks: deadlines do not ascend")
        ranks = self._links[kernels.RANK :: kernels.LINK_WIDTH][used]
        counts = self._state[kernels.NUM_OF_RANK :]
        found = np.bincount(ranks[ranks != kernels.NOBODY], minlength=len(counts))
        if not np.array_equal(counts, found):
            raise IndexCorruptError(f"expiring blocks: counted {counts}, found {found} per rank")
        self._check_entries(used[ranks != kernels.NOBODY])

    def _check_circle(self) -> I64:
        """Nodes in use, oldest first."""
        before, after = (
            self._links[place :: kernels.LINK_WIDTH].astype(np.int64)
            for place in (kernels.BEFORE, kernels.AFTER)
        )
        circle = [int(self._state[kernels.FIRST])]
        while len(circle) < len(after):
            circle.append(int(after[circle[-1]]))
        if len(set(circle)) != len(after) or (before[after] != np.arange(len(after))).any():
            raise IndexCorruptError("expiring blocks: the nodes are not linked in one circle")
        num_used = int(self._state[kernels.NUM_USED])
        if circle[num_used % len(circle)] != self._state[kernels.NEXT]:
            raise IndexCorruptError(f"expiring blocks: {num_used} nodes in use do not end at NEXT")
        return np.array(circle[:num_used], dtype=np.int64)

    def _check_entries(self, nodes: I64) -> None:
        keys, values = self.table.items()
        places = values.astype(np.int64) - 1
        if not np.isin(places, nodes).all() or (self._keys[places] != keys).any():
            raise IndexCorruptError("expiring blocks: an entry has no node in use, or another's")

    def _num_nodes_of(self, rank_number: int) -> int:
        counts = self._state[kernels.NUM_OF_RANK :]
        return int(counts[rank_number]) if rank_number < len(counts) else 0

    def reserve(self, rank_number: int, num_more: int) -> None:
        """Make room for so many blocks of the rank, up to `capacity`."""
        num_more = min(num_more, self.capacity)
        num_nodes = len(self._keys)
        needed = min(int(self._state[kernels.NUM_USED]) + num_more, self.capacity)
        if needed > num_nodes:
            self._add_nodes(min(max(2 * num_nodes, needed), self.capacity) - num_nodes)
        self.table.reserve(min(num_more, self.capacity - len(self.table)))
        missing = kernels.NUM_OF_RANK + rank_number + 1 - len(self._state)
        if missing > 0:
            more: I64 = np.zeros(missing + len(self._state), dtype=np.int64)
            self._state = np.concatenate([self._state, more])
            self._version.count += 1

    def _add_nodes(self, num_more: int) -> None:
        """Free nodes, linked in behind the free ones' end: right before the first in use."""
        start, end = len(self._keys), len(self._keys) + num_more
        self._keys = np.concatenate([self._keys, np.zeros(num_more, dtype=np.uint64)])
        self._deadlines = np.concatenate([self._deadlines, np.zeros(num_more)])
        self._links = np.concatenate([self._links, _chain(start, end)])
        self._version.count += 1
        if start:
            self._join_circle(start, end)

    def _join_circle(self, start: int, end: int) -> None:
        """Put the chain of new nodes before NEXT, and begin with it."""
        state, links = self._state, self._links.reshape(-1, kernels.LINK_WIDTH)
        following = int(state[kernels.NEXT])
        last = int(links[following, kernels.BEFORE])
        links[last, kernels.AFTER], links[start, kernels.BEFORE] = start, last
        links[end - 1, kernels.AFTER], links[following, kernels.BEFORE] = following, end - 1
        state[kernels.NEXT] = start
        if not state[kernels.NUM_USED]:
            state[kernels.FIRST] = start


def _chain(start: int, end: int) -> I32:
    """Links of the nodes start..end, in a circle of their own."""
    links = np.empty((end - start, kernels.LINK_WIDTH), dtype=np.int32)
    numbers = np.arange(start, end)
    links[:, kernels.RANK] = kernels.NOBODY
    links[:, kernels.BEFORE], links[:, kernels.AFTER] = np.roll(numbers, 1), np.roll(numbers, -1)
    return links.reshape(-1)
