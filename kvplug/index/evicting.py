"""Eviction from an index that is full: tails of the runs that were not used for the longest time.

In:  the block store, how many blocks have to go.   Out: an Eviction, advanced in slices like a
clear; counts of what went, and a filter of its engine hashes.

Whatever goes was the deepest of its chain: no block stays that came behind one that goes. A run
gives up blocks from its end, down to the deepest one that another run follows. Runs of one family
(kernels/runs.py) go together, as any of them may follow any other: the deepest blocks of all of
them first, down to the deepest one that a run outside follows. What follows nothing that is there,
as that was removed by an engine, goes before everything else.
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
from kvplug.kernels import runs

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_OLDEST = 2**32
_MIN_WORDS = 64
_WORDS_PER_HASH = 0.25  # 16 bits


class _Cut(NamedTuple):
    """int64[n] each: runs, their sets, the depth at which each ends now, how many depths it gives
    up. Blocks are missing at some of those if the run has holes.
    """

    runs: I64
    sets: I64
    ends: I64
    num_depths: I64


class _Units(NamedTuple):
    """What is given up as one: families, and runs that are in none; each has the number of one of
    its runs. int64[capacity] by run: its unit, and the depth down to which it may go; by unit: its
    age, and how many depths it can give up.
    """

    of_run: I64
    floors: I64
    age: I64
    num_depths: I64


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
    """`num_blocks` blocks leave by the time it is done, fewer if runs have holes; 0 if none can."""

    def __init__(
        self, block_store: BlockStore, hash_spaces: Sequence[HashSpaceArrays], num_wanted: int,
        lost: EvictionStats, evicted: EvictedHashFilter,
    ) -> None:  # fmt: skip
        super().__init__(block_store)
        self._hash_spaces, self._gone = hash_spaces, HashTable(ArrayVersion(is_tight=True))
        self._cut, self._lost = _choose(block_store, num_wanted), lost
        self.num_blocks = min(int(self._cut.num_depths.sum()), len(block_store))
        self.is_done = not self.num_blocks
        if self.num_blocks:
            self._gone.reserve(self.num_blocks)
            self._remembered = evicted.reserve(self.num_blocks, len(block_store))
            kernels.cut_runs(self._cut.runs, self._cut.ends, block_store.bundle)

    def _run(self) -> Iterator[bool]:
        held, gone = self.block_store, self._gone.slots
        words, table = held.runs.words, held.table.slots
        num_gone: I64 = np.zeros(held.runs.capacity, dtype=np.int64)
        ends: I64 = np.zeros(held.runs.capacity, dtype=np.int64)
        yield from self._pass(
            held.table.capacity,
            lambda first, last: kernels.evict_blocks(
                first, last, words, table, gone, num_gone, ends
            ),
        )
        self._settle(num_gone[self._cut.runs])
        kernels.trim_runs(ends, held.bundle)
        for slots, _ in self._hash_spaces:
            yield from self._evict_engine_hashes(slots)
        yield from self._sweep_copies()
        yield True

    def _settle(self, num_gone: I64) -> None:
        """Count what each run that was cut has lost."""
        held, cut = self.block_store, self._cut
        self._lost.num_blocks += int(num_gone.sum())
        self._lost.num_memberships += int((num_gone * held.sets.num_members[cut.sets]).sum())
        held.sets.num_held[:] -= held.sets.sum_by_holder(cut.sets, num_gone)
        kernels.settle_runs(cut.runs, cut.sets, cut.num_depths, num_gone, held.bundle)

    def _evict_engine_hashes(self, slots: U64) -> Iterator[bool]:
        gone, remembered = self._gone.slots, self._remembered
        yield from self._pass(
            len(slots) // 2 - 1,
            lambda first, last: kernels.evict_engine_hashes(first, last, gone, slots, remembered),
        )


def _choose(held: BlockStore, num_wanted: int) -> _Cut:
    """All that can go of the units that were not used for the longest time, and a part of one."""
    starts, ends = _depths(held, runs.START), _depths(held, runs.END)
    units = _units(held, starts, ends)
    able = np.flatnonzero(units.num_depths > 0)
    order = able[np.argsort(-units.age[able], kind="stable")]
    total = np.cumsum(units.num_depths[order])
    num_chosen = int(np.searchsorted(total, num_wanted)) + 1
    is_chosen: Mask = np.zeros(len(starts), dtype=np.bool_)
    is_chosen[order[:num_chosen]] = True
    if 0 < num_chosen <= len(order):
        num_rest = num_wanted - int(total[num_chosen - 1] - units.num_depths[order[num_chosen - 1]])
        _keep_heads(units, order[num_chosen - 1], ends, num_rest)
    chosen = np.flatnonzero(is_chosen[units.of_run] & (ends > units.floors))
    new_ends = units.floors[chosen]
    return _Cut(chosen, held.runs.sets[chosen], new_ends, ends[chosen] - new_ends)


def _units(held: BlockStore, starts: I64, ends: I64) -> _Units:
    live, above, parents = held.runs.is_live, held.runs.above, held.runs.parents
    of_run, families = np.arange(len(live)), held.runs.families
    of_families = np.flatnonzero(live & (families != 0))
    if len(of_families):
        _, firsts, numbers = np.unique(
            families[of_families], return_index=True, return_inverse=True
        )
        of_run[of_families] = of_families[firsts[numbers]]
    places = held.table.find(parents)
    before = np.where(above != 0, above, places & _LOW).astype(np.int64)
    depths = np.where(above != 0, ends[above], (places >> _SHIFT).astype(np.int64))
    follows = live & (before != 0) & (of_run[before] != of_run)
    deepest: I64 = np.full(len(live), -1)
    np.maximum.at(deepest, of_run[before[follows]], depths[follows])
    floors = np.where(live, np.maximum(deepest[of_run], starts - 1), ends)
    num_depths = np.maximum(ends - floors, 0)
    age, is_reached = held.runs.age, follows | (starts == 0)
    others = of_families[of_run[of_families] != of_families]
    units = of_run[others]
    np.add.at(num_depths, units, num_depths[others])
    np.minimum.at(age, units, age[others])
    np.logical_or.at(is_reached, units, is_reached[others])
    num_depths[others] = 0
    age[~is_reached] = _OLDEST
    return _Units(of_run, floors, age, num_depths)


def _keep_heads(units: _Units, unit: int, ends: I64, num_wanted: int) -> None:
    """Raise the floors of a unit as far as it then still gives up so many depths."""
    members = np.flatnonzero((units.of_run == unit) & (ends > units.floors))
    floors, last = units.floors[members], ends[members]
    low, high = int(floors.min()), int(last.max())
    while high - low > 1:
        middle = (low + high) // 2
        if np.maximum(last - np.maximum(floors, middle), 0).sum() >= num_wanted:
            low = middle
        else:
            high = middle
    units.floors[members] = np.minimum(np.maximum(floors, low), last)


def _depths(held: BlockStore, word: np.uint64) -> I64:
    return held.runs.column(word).astype(np.int64)
