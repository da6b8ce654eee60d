"""Bounds of an index: how much it may hold, whether blocks may come, and what goes for them.

In:  limits; blocks of a holder that want to come.   Out: whether they fit, or an Eviction that
makes room (kvplug/index/evicting.py); after anything else that has taken memory, the index back
within its bound.

Of `max_bytes`, fixed shares are taken at the start: for speculative blocks, and for the filter of
evicted hashes. The rest is for tables, which give memory back (`shrink`) before blocks have to go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError
from kvplug.index.evicting import EvictedHashFilter, Eviction, EvictionStats
from kvplug.index.hash_spaces import HashSpace, HashSpaces
from kvplug.setting import shown, whole

U64 = npt.NDArray[np.uint64]

# Of the blocks, to go at once: a sweep costs as much for one block as for many.
_PART_TO_EVICT = 8
_MOST = 2**63 - 1  # what the tables of an index can count to
# Of max_bytes: speculative blocks, of at most so many bytes each, and the filter.
_SHARE, _NBYTES_OF_SPECULATIVE = 16, 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """max_blocks: distinct blocks; max_bytes: memory of all tables. None is no bound.

    An event may take the memory of its own blocks besides, while it is applied.
    """

    max_blocks: int | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_blocks", 1), ("max_bytes", 2**18)):
            value = getattr(self, name)
            if value is not None and not least <= whole(value) <= _MOST:
                is_small = whole(value) < least
                expected = f"at least {least}" if is_small else "a whole number below 2**63"
                raise ConfigError(f"{name} of an index must be {expected}, got {shown(value)}")

    @property
    def filter_nbytes(self) -> int | None:
        """Bytes for the hashes of evicted blocks; None: as many as it takes."""
        return None if self.max_bytes is None else self.max_bytes // _SHARE

    @property
    def max_speculative(self) -> int | None:
        """Speculative blocks there may be; None: the usual number."""
        most = None if self.max_bytes is None else self.max_bytes // _SHARE
        return most and most // _NBYTES_OF_SPECULATIVE


class Others(Protocol):
    """What an index has besides the block store and the hash spaces."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""

    def shrink(self) -> bool:
        """Give memory back that is not needed; False if there is not much of it."""

    def erase_gone(self) -> None:
        """Blocks have left the index by an eviction."""


class CapacityGuard:
    """is_over_bytes, can_ever_hold, eviction, make_room, settle; `stats` and `evicted_hashes` say
    what had to go.
    """

    def __init__(self, bounds: Bounds, hash_spaces: HashSpaces, others: Others) -> None:
        self.bounds, self.stats = bounds, EvictionStats()
        self.evicted_hashes = EvictedHashFilter(bounds.filter_nbytes)
        self.block_store, self._hash_spaces = hash_spaces.block_store, hash_spaces
        self._others = others
        self.block_store.table.limit = bounds.max_blocks or 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the whole index."""
        besides = self.evicted_hashes.nbytes + self._others.nbytes
        return besides + self.block_store.nbytes + self._hash_spaces.nbytes

    def is_over_bytes(self, hash_space: HashSpace, holder: int, num_blocks: int) -> bool:
        """Whether arrays would have to grow beyond the bound for an event of so many blocks."""
        if self.bounds.max_bytes is None:
            return False
        held, table = self.block_store, hash_space.table
        more = held.grown_nbytes(holder, num_blocks) - held.nbytes
        more += table.grown_nbytes(num_blocks) - table.nbytes
        return more > 0 and self.nbytes + more > self.bounds.max_bytes

    def can_ever_hold(self, num_blocks: int) -> bool:
        """Whether an event of so many distinct blocks fits if nothing else is there."""
        max_blocks, max_bytes = self.bounds.max_blocks, self.bounds.max_bytes
        if max_blocks is not None and num_blocks > max_blocks:
            return False
        least = self.block_store.least_nbytes(num_blocks) + self._others.nbytes
        least += self._hash_spaces.least_nbytes(num_blocks) + self.evicted_hashes.nbytes
        return max_bytes is None or least <= max_bytes

    def shrink(self) -> bool:
        """Have something give memory back that it does not need; False if there is not much."""
        return self._others.shrink() or self.block_store.shrink() or self._hash_spaces.shrink()

    def eviction(self, num_blocks: int) -> Eviction:
        """What makes room for so many blocks, and for many more; it may find nothing to evict."""
        num_wanted = max(num_blocks, len(self.block_store) // _PART_TO_EVICT)
        arrays = [self._hash_spaces.arrays_of(each) for each in self._hash_spaces.in_use]
        return Eviction(self.block_store, arrays, num_wanted, self.stats, self.evicted_hashes)

    def make_room(self, hash_space: HashSpace, holder: int, hashes: U64) -> bool:
        """Evict what is in the way of these blocks, all at once; False if nothing more can go."""
        num_blocks = len(hashes)
        while self._is_over_blocks(hashes):
            if not self.can_ever_hold(len(np.unique(hashes))) or not self._evict(num_blocks):
                return False
        while self.is_over_bytes(hash_space, holder, num_blocks):
            if not self.can_ever_hold(num_blocks):
                return False
            if not self.shrink() and not self._evict(num_blocks):
                return False
        return True

    def settle(self) -> None:
        """Bring the index back within `max_bytes`, if it has left it."""
        max_bytes = self.bounds.max_bytes
        while max_bytes is not None and self.nbytes > max_bytes:
            if not self.shrink() and not self._evict(1):
                return

    def _evict(self, num_blocks: int) -> bool:
        """Whether there was something to evict."""
        eviction = self.eviction(num_blocks)
        eviction.finish()
        self._others.erase_gone()
        return eviction.num_blocks > 0

    def _is_over_blocks(self, hashes: U64) -> bool:
        held, limit = self.block_store, self.bounds.max_blocks
        if limit is None or len(held) + len(hashes) <= limit:
            return False
        num_new = int((held.table.find(hashes) == 0).sum())
        return len(held) + num_new > limit
