"""Bounds of an index: how much it may hold, whether blocks may come, and what goes for them.

In:  limits; blocks of a holder that want to come.   Out: whether they fit, or an Eviction that
makes room (kvplug/index/evicting.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError
from kvplug.index.block_store import BlockStore, HashSpaceArrays
from kvplug.index.evicting import EvictedHashFilter, Eviction, EvictionStats
from kvplug.index.hash_spaces import HashSpace
from kvplug.setting import shown, whole

U64 = npt.NDArray[np.uint64]

# Of the blocks, to go at once: a sweep costs as much for one block as for many.
_PART_TO_EVICT = 8
_MOST = 2**63 - 1  # what the tables of an index can count to


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """max_blocks: distinct blocks; max_bytes: memory of all tables, without the buffers that
    unusually large events pass through. None is no bound.
    """

    max_blocks: int | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_blocks", 1), ("max_bytes", 2**16)):
            value = getattr(self, name)
            if value is not None and not least <= whole(value) <= _MOST:
                is_small = whole(value) < least
                expected = f"at least {least}" if is_small else "a whole number below 2**63"
                raise ConfigError(f"{name} of an index must be {expected}, got {shown(value)}")


class CapacityGuard:
    """is_over_bytes, eviction, make_room; `stats` and `evicted_hashes` say what had to go.

    others_nbytes(hash space, n): bytes of all that is not in the block store, with the table of the
    hash space as large as n more engine hashes make it. hash_spaces(): the arrays of each one.
    erase_gone(): called when `make_room` has evicted blocks.
    """

    def __init__(
        self,
        bounds: Bounds,
        block_store: BlockStore,
        others_nbytes: Callable[[HashSpace | None, int], int],
        hash_spaces: Callable[[], Sequence[HashSpaceArrays]],
        erase_gone: Callable[[], None],
    ) -> None:
        self.bounds, self.stats, self.evicted_hashes = bounds, EvictionStats(), EvictedHashFilter()
        self.block_store, self._others_nbytes = block_store, others_nbytes
        self._hash_spaces = hash_spaces
        self._erase_gone = erase_gone
        block_store.table.limit = bounds.max_blocks or 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory of what is remembered of evicted blocks."""
        return self.evicted_hashes.nbytes

    def is_over_bytes(self, hash_space: HashSpace, holder: int, num_blocks: int) -> bool:
        """Whether arrays would have to grow beyond the bound for an event of so many blocks.

        What is there already is no reason to evict: arrays do not shrink.
        """
        if self.bounds.max_bytes is None:
            return False
        now = self.block_store.nbytes + self._others_nbytes(None, 0)
        grown = self.block_store.grown_nbytes(holder, num_blocks)
        grown += self._others_nbytes(hash_space, num_blocks)
        remembered = self.evicted_hashes.nbytes_for(len(self.block_store) + num_blocks)
        return grown > now and grown + remembered > self.bounds.max_bytes

    def eviction(self, num_blocks: int) -> Eviction:
        """What makes room for so many blocks, and for many more; it may find nothing to evict."""
        num_wanted = max(num_blocks, len(self.block_store) // _PART_TO_EVICT)
        return Eviction(
            self.block_store, self._hash_spaces(), num_wanted, self.stats, self.evicted_hashes
        )

    def make_room(self, hash_space: HashSpace, holder: int, hashes: U64) -> bool:
        """Evict what is in the way of these blocks, all at once; False if nothing more can go."""
        while self._is_over(hash_space, holder, hashes):
            eviction = self.eviction(len(hashes))
            eviction.finish()
            self._erase_gone()
            if not eviction.num_blocks:
                return False
        return True

    def _is_over(self, hash_space: HashSpace, holder: int, hashes: U64) -> bool:
        held, limit = self.block_store, self.bounds.max_blocks
        if limit is not None and len(held) + len(hashes) > limit:
            num_new = int((held.table.find(hashes) == 0).sum())
            return len(held) + num_new > limit
        return self.is_over_bytes(hash_space, holder, len(hashes))
