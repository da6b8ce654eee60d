"""Hybrid models on engines that publish the blocks of full attention alone.

In:  batches of events.   Out: the same, with a KV cache group more: of the ends of prefixes.

SGLang (0.5.23, mem_cache/unified_cache/components/swa.py) reuses a prefix of such a model if it has
kept the window, or the state, that its end needs. It keeps one where a request ended, and frees
those on the way; its events do not say so. So the end of each run of stored blocks counts as a
state, and a prefix counts if it is one of these. What is kept elsewhere is not known; nor is what
is freed while the blocks of full attention stay, so the rank is STALE.
"""

from __future__ import annotations

from itertools import chain
from typing import Final

from msgspec import structs

from kvplug.events import (
    MAMBA,
    AllBlocksCleared,
    BlockCopied,
    BlockRemoved,
    BlockStored,
    EngineHash,
    Event,
    EventBatch,
    Tier,
)

GROUP: Final = 1
"""The number of the group; the engine itself names none."""


class HiddenStates:
    """with_ends of each batch of a rank, in order; forget when its blocks are forgotten."""

    def __init__(self) -> None:
        self._ends: set[EngineHash] = set()

    def with_ends(self, batch: EventBatch) -> EventBatch:
        """Each end behind the blocks that it ends, and gone before they are."""
        events = chain.from_iterable(map(self._with_ends, batch.events))
        return structs.replace(batch, events=tuple(events))

    def forget(self) -> None:
        """Nothing is stored."""
        self._ends.clear()

    def _with_ends(self, event: Event) -> tuple[Event, ...]:
        match event:
            case BlockStored(tier=Tier.DEVICE, block_hashes=(*_, end)) if end not in self._ends:
                self._ends.add(end)
                return event, BlockCopied(block_hashes=(end,), group=GROUP, attention=MAMBA)
            case BlockRemoved(tier=Tier.DEVICE):
                gone = tuple(each for each in event.block_hashes if each in self._ends)
                self._ends.difference_update(gone)
                ends = (BlockRemoved(block_hashes=gone, group=GROUP),) if gone else ()
                return *ends, event
            case AllBlocksCleared(tier=Tier.DEVICE | None):
                self.forget()
        return (event,)
