"""Bounds: how much an index may hold, and what it had to give up for that.

In:  limits; engine hashes of evicted blocks.   Out: whether a hash is among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError
from kvplug.kernels import evicting as kernels
from kvplug.setting import shown, whole

U64 = npt.NDArray[np.uint64]

_MOST = 2**63 - 1  # what the tables of an index can count to
_MIN_WORDS = 64
_WORDS_PER_HASH = 0.25  # 16 bits


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


@dataclass(slots=True)
class EvictionStats:
    """num_blocks, num_memberships: evicted so far, blocks and pairs of a block and a holder."""

    num_blocks: int = 0
    num_memberships: int = 0


def _num_words(num_hashes: int) -> int:
    return max(_MIN_WORDS, int(_WORDS_PER_HASH * num_hashes))


class EvictedHashFilter:
    """Engine hashes of evicted blocks: at least the last `capacity` of them, in two filters.

    A store behind such a block is no sign of a lost event (kvplug/index/block_index.py).
    """

    def __init__(self) -> None:
        self.words: U64 = np.zeros(0, dtype=np.uint64)
        self._before: U64 = self.words
        self._num_left = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory of both filters."""
        return int(self.words.nbytes + self._before.nbytes)

    def nbytes_for(self, capacity: int) -> int:
        """Bytes of memory after evictions from an index of so many blocks."""
        return max(self.nbytes, 2 * 8 * _num_words(capacity))

    def reserve(self, num_hashes: int, capacity: int) -> U64:
        """A filter that takes as many more hashes."""
        if self._num_left < num_hashes:
            self._before = self.words
            self.words = np.zeros(_num_words(max(capacity, num_hashes)), dtype=np.uint64)
            self._num_left = max(capacity, num_hashes)
        self._num_left -= num_hashes
        return self.words

    def __contains__(self, engine_hash: int) -> bool:
        asked = np.uint64(engine_hash)
        return any(
            len(words) and kernels.is_remembered(words, asked)
            for words in (self.words, self._before)
        )
