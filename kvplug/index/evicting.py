"""Eviction from an index that is full: tails of the runs that were not used for the longest time.

In:  the block store, how many blocks have to go.   Out: an Eviction, advanced in slices like a
clear; counts of what went, and a filter of its engine hashes.

A run gives up blocks from its end, down to the deepest one that another run follows; a chain is
given up from its tail and its head stays longest. Runs whose parent nobody knows, left over from
removals in the middle of a chain, go first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.index.arrays import ArrayVersion
from kvplug.index.block_store import BlockStore, HashSpaceArrays
from kvplug.index.hash_table import HashTable
from kvplug.index.sweeping import Sweep
from kvplug.kernels import evicting as kernels
from kvplug.kernels import runs, sweeping

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_OLDEST = 2**32
_MIN_WORDS = 64
_WORDS_PER_HASH = 0.25  # 16 bits


class _Cut(NamedTuple):
    """int64[n] each: runs, the depth at which each ends now, how many blocks it gives up."""

    runs: I64
    ends: I64
    num_blocks: I64


@dataclass(slots=True)
class EvictionStats:
    """num_blocks, num_memberships: evicted so far, blocks and pairs of a block and a holder."""

    num_blocks: int = 0
    num_memberships: int = 0


class EvictedHashFilter:
    """Engine hashes of evicted blocks: at least the last `capacity` of them, in two filters.

    A store behind such a block is no sign of a lost event (kvplug/index/block_index.py).
    """

    def __init__(self, max_nbytes: int | None = None) -> None:
        """With `max_nbytes` both filters are there from the start, as large as they may be."""
        num_words = 0 if max_nbytes is None else max_nbytes // (2 * 8)
        self.words: U64 = np.zeros(num_words, dtype=np.uint64)
        self._before: U64 = np.zeros(num_words, dtype=np.uint64)
        self._most_words = max_nbytes and num_words
        self._num_left = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory of both filters."""
        return int(self.words.nbytes + self._before.nbytes)

    def reserve(self, num_hashes: int, capacity: int) -> U64:
        """A filter that takes as many more hashes, or as it can."""
        if self._num_left < num_hashes:
            num_words = max(_MIN_WORDS, int(_WORDS_PER_HASH * max(capacity, num_hashes)))
            num_words = self._most_words or num_words
            self._before = self.words
            self.words = np.zeros(num_words, dtype=np.uint64)
            self._num_left = int(num_words / _WORDS_PER_HASH)
        self._num_left -= num_hashes
        return self.words

    def remember(self, engine_hashes: U64) -> None:
        """They left in another way than by an eviction, and are known as if by one."""
        kernels.remember(self.reserve(len(engine_hashes), 0), engine_hashes)

    def __contains__(self, engine_hash: int) -> bool:
        asked = np.uint64(engine_hash)
        return any(
            len(words) and kernels.is_remembered(words, asked)
            for words in (self.words, self._before)
        )


class Eviction(Sweep):
    """`num_blocks` blocks leave by the time it is done; 0 if nothing can."""

    def __init__(
        self, block_store: BlockStore, hash_spaces: Sequence[HashSpaceArrays], num_wanted: int,
        lost: EvictionStats, evicted: EvictedHashFilter,
    ) -> None:  # fmt: skip
        super().__init__(block_store)
        self._hash_spaces, self._gone = hash_spaces, HashTable(ArrayVersion(is_tight=True))
        cut = _choose(block_store, num_wanted)
        self.num_blocks = int(cut.num_blocks.sum())
        self.is_done = not self.num_blocks
        if self.num_blocks:
            self._gone.reserve(self.num_blocks)
            self._remembered = evicted.reserve(self.num_blocks, len(block_store))
            self._cut(cut, lost)

    def _cut(self, cut: _Cut, lost: EvictionStats) -> None:
        held = self.block_store
        sets = held.runs.column(runs.SET)[cut.runs].astype(np.int64)
        lost.num_blocks += self.num_blocks
        lost.num_memberships += int((cut.num_blocks * held.sets.num_members[sets]).sum())
        held.sets.num_held[:] -= held.sets.sum_by_holder(sets, cut.num_blocks)
        kernels.cut_runs(cut.runs, cut.ends, held.bundle)

    def _run(self) -> Iterator[bool]:
        held, gone = self.block_store, self._gone.slots
        words, table = held.runs.words, held.table.slots
        yield from self._pass(
            held.table.capacity,
            lambda first, last: kernels.evict_blocks(first, last, words, table, gone),
        )
        sweeping.free_dead_runs(words)
        for slots, _ in self._hash_spaces:
            yield from self._evict_engine_hashes(slots)
        yield from self._sweep_copies()
        yield True

    def _evict_engine_hashes(self, slots: U64) -> Iterator[bool]:
        gone, remembered = self._gone.slots, self._remembered
        yield from self._pass(
            len(slots) // 2 - 1,
            lambda first, last: kernels.evict_engine_hashes(first, last, gone, slots, remembered),
        )


def _choose(held: BlockStore, num_wanted: int) -> _Cut:
    """Whole tails of the runs that were not used for the longest time, and a part of one more."""
    starts, ends = _depths(held, runs.START), _depths(held, runs.END)
    num_blocks, age = held.runs.num_blocks, held.runs.age
    deepest, is_orphan = _children(held, starts, ends)
    age[is_orphan] = _OLDEST
    is_whole = num_blocks == ends + 1 - starts
    # What is missing between start and end is not known: such a run goes at once or not at all.
    in_pieces = np.where(deepest < starts, num_blocks, 0)
    can_go = np.where(held.runs.is_live, np.where(is_whole, ends - deepest, in_pieces), 0)
    able = np.flatnonzero(can_go > 0)
    order = able[np.argsort(-age[able], kind="stable")]
    total = np.cumsum(can_go[order])
    chosen = order[: int(np.searchsorted(total, num_wanted)) + 1]
    num_cut = can_go[chosen]
    if len(chosen) and is_whole[chosen[-1]]:
        num_cut[-1] -= max(0, int(num_cut.sum()) - num_wanted)
    new_ends = np.where(is_whole[chosen], ends[chosen] - num_cut, starts[chosen] - 1)
    return _Cut(chosen, new_ends, num_cut)


def _depths(held: BlockStore, word: np.uint64) -> I64:
    return held.runs.column(word).astype(np.int64)


def _children(held: BlockStore, starts: I64, ends: I64) -> tuple[I64, Mask]:
    """The deepest block of each run that another run follows (before its start: none), and which
    runs follow nobody knows what.
    """
    live, above, parents = held.runs.is_live, held.runs.above, held.runs.parents
    deepest = starts - 1
    places = held.table.find(parents)
    is_known = live & (places != 0) & (parents != 0)
    of_parents, depths = places & _LOW, (places >> _SHIFT).astype(np.int64)
    np.maximum.at(deepest, of_parents[is_known], depths[is_known])
    is_linked = live & (above != 0)
    np.maximum.at(deepest, above[is_linked], ends[above[is_linked]])
    return deepest, live & (starts > 0) & ~is_known & ~is_linked
