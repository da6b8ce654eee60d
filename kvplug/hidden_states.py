"""Hybrid models on engines that publish the blocks of full attention alone.

In:  batches of events.   Out: the same, with a KV cache group more: of the ends of prefixes.

SGLang (0.5.23, mem_cache/unified_cache/components/swa.py) reuses a prefix of such a model if it has
kept the window, or the state, that its end needs. It keeps one where a request ended. Of a prefix
that another one continues it may free the window alone, and no event says so; one that none
continues it frees as a whole. So the end of a run of stored blocks counts as a state until blocks
are stored behind it, and a prefix counts if it is one of these. What else is kept is not known, so
the rank is STALE.
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
        """Each end comes behind the blocks that it ends, and goes before they do."""
        events = chain.from_iterable(map(self._with_ends, batch.events))
        return structs.replace(batch, events=tuple(events))

    def forget(self) -> None:
        """Nothing is stored."""
        self._ends.clear()

    def _with_ends(self, event: Event) -> tuple[Event, ...]:
        match event:
            case BlockStored(tier=Tier.DEVICE, block_hashes=(*_, end)):
                return *self._without((event.parent,)), event, *self._with(end)
            case BlockRemoved(tier=Tier.DEVICE):
                return *self._without(event.block_hashes), event
            case AllBlocksCleared(tier=None | Tier.DEVICE):
                self.forget()
        return (event,)

    def _with(self, end: EngineHash) -> tuple[Event, ...]:
        if end in self._ends:
            return ()
        self._ends.add(end)
        return (BlockCopied(block_hashes=(end,), group=GROUP, attention=MAMBA),)

    def _without(self, names: tuple[EngineHash | None, ...]) -> tuple[Event, ...]:
        gone = tuple(name for name in names if name is not None and name in self._ends)
        self._ends.difference_update(gone)
        return (BlockRemoved(block_hashes=gone, group=GROUP),) if gone else ()
