"""Calls of BlockIndex and BlockHasher that are not there yet, made of what is.

In:  packed events.   Out: the index, changed. Goes away with `Index = BlockIndex`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from kvplug.events import BlockRemoved, EngineHash, Rank, Tier
from kvplug.hashing import BASE_SEED, BlockHasher, Hashes, Tokens
from kvplug.index.applied import Applied
from kvplug.index.block_index import BlockIndex, Overlap
from kvplug.packed import REMOVED, STORED


class StandIn(BlockIndex):
    """apply_packed, and overlap from a list."""

    def apply_packed(self, rank: Rank, payload: bytes) -> Applied:
        """Counts of a payload of packed.encode."""
        applied = Applied()
        for kind, tier, *rest in msgspec.msgpack.decode(payload)[1:]:
            if kind == STORED:
                _, seed, names, hashes = rest
                names, hashes = np.frombuffer(names, "<u8"), np.frombuffer(hashes, "<u8")
                self._hold(rank, Tier(tier), names, hashes, seed)
                applied.num_stored += len(names)
            elif kind == REMOVED:
                names = tuple(map(EngineHash, np.frombuffer(rest[0], "<u8").tolist()))
                self._remove(rank, BlockRemoved(block_hashes=names, tier=Tier(tier)), applied)
            else:
                applied.clear(self.clear(rank), everything=True)
        return applied

    def overlap(self, sequence_hashes: Hashes | list[int], now_s: float) -> Overlap:
        """As BlockIndex.overlap."""
        if isinstance(sequence_hashes, list):
            sequence_hashes = np.frombuffer(array("Q", sequence_hashes), dtype=np.uint64)
        return super().overlap(sequence_hashes, now_s)


def block_hashes(block_size: int) -> Callable[[Tokens], Hashes]:
    """The call that hashes the blocks of tokens."""
    hasher = BlockHasher(block_size)
    call: Callable[[Tokens], Hashes] | None = getattr(hasher, "block_hashes", None)
    return call or partial(hasher._block_hashes, seed=BASE_SEED, extra_keys=())


Index: Any = BlockIndex if hasattr(BlockIndex, "apply_packed") else StandIn
