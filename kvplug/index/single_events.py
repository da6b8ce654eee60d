"""Events one by one: whatever needs a decision, and forms that the kernels do not read.

In:  an event of a rank.   Out: holdings, names and what is known besides, changed; counts.

What is not certain is refused and counted, never guessed (kvplug/index/applied.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvplug.events import (
    AllBlocksCleared,
    BlockCopied,
    BlockRemoved,
    BlockStored,
    CxlMetadata,
    CxlStateTransition,
    EngineHash,
    Event,
    Rank,
    SequenceHash,
    Tier,
)
from kvplug.hashing import BASE_SEED, BlockHasher, as_hashes, as_tokens, seed_of
from kvplug.index.applied import Applied, Refusal
from kvplug.index.besides import Besides
from kvplug.index.cxl import Named
from kvplug.index.domains import Domains
from kvplug.index.holder_numbers import HolderNumbers
from kvplug.index.holdings import Stretch
from kvplug.index.room import Room
from kvplug.packed import PackedCleared, PackedEvent, PackedRemoved, PackedStored, U64Like

U64 = npt.NDArray[np.uint64]


class SingleEvents:
    """apply, apply_packed."""

    def __init__(
        self,
        hasher: BlockHasher,
        numbers: HolderNumbers,
        domains: Domains,
        room: Room,
        besides: Besides,
        clear: Callable[[Rank, Tier | None], int],
    ) -> None:
        self._hasher, self._numbers, self._domains = hasher, numbers, domains
        self._room, self._holdings, self._clear = room, room.holdings, clear
        self._speculative, self._cxl, self._labels = besides

    def apply(self, rank: Rank, event: Event, applied: Applied) -> None:
        """Remember one event."""
        match event:
            case BlockStored():
                self._store(rank, event, applied)
            case BlockCopied():
                self._copy(rank, event, applied)
            case BlockRemoved():
                self._remove(rank, event, applied)
            case AllBlocksCleared():
                applied.clear(self._clear(rank, event.tier), everything=event.tier is None)
            case CxlStateTransition():
                self._move(rank, event, applied)

    def apply_packed(self, rank: Rank, event: PackedEvent, applied: Applied) -> None:
        """Remember one packed event."""
        match event:
            case PackedRemoved():
                removed = BlockRemoved(block_hashes=_names(event.names), tier=event.tier)
                return self._remove(rank, removed, applied)
            case PackedCleared():
                number = self._clear(rank, event.tier)
                return applied.clear(number, everything=event.tier is None)
            case PackedStored():
                parent = self._domains.hash_of(rank, event.parent)
                if event.parent is not None and parent is None:
                    return applied.refuse(self._why_unknown(event.parent), len(event.names))
                if len(event.names) != len(event.hashes):
                    return applied.refuse(Refusal.MISALIGNED, len(event.names))
                seed = event.seed if parent is None else self._holdings.seed_of(parent)
                names, hashes = as_hashes(event.names), as_hashes(event.hashes)
                return self._hold(
                    rank, event.tier, Stretch(hashes, parent or 0, seed, names), applied
                )

    def _store(self, rank: Rank, event: BlockStored, applied: Applied) -> None:
        num_blocks = len(event.block_hashes)
        if event.block_size != self._hasher.block_size:
            return applied.refuse(Refusal.BLOCK_SIZE, num_blocks)
        if event.block_size + event.bigrams != self._hasher.window:
            return applied.refuse(Refusal.BIGRAM_TOKENS, num_blocks)
        parent = self._domains.hash_of(rank, event.parent)
        if event.parent is not None and parent is None:
            return applied.refuse(self._why_unknown(event.parent), num_blocks)
        seed = self._namespace_seed(event, parent)
        hashes = self._hasher.sequence_hashes(
            as_tokens(event.token_ids), seed, parent=parent, extra_keys=event.extra_keys
        )
        if len(hashes) != num_blocks:
            return applied.refuse(Refusal.MISALIGNED, num_blocks)
        names, num_stored = _as_u64(event.block_hashes), applied.num_stored
        self._hold(rank, event.tier, Stretch(hashes, parent or 0, seed, names), applied)
        if applied.num_stored > num_stored and (event.cxl is not None or event.moe is not None):
            self._annotate(self._blocks(rank, names, hashes), event, applied)
        return None

    def _annotate(self, blocks: Named, event: BlockStored, applied: Applied) -> None:
        if event.cxl is not None:
            self._cxl.store(blocks, event.tier, event.cxl, applied)
        if event.moe is not None:
            self._labels.put(blocks.rank_number, blocks.hashes, event.moe)

    def _hold(self, rank: Rank, tier: Tier, stretch: Stretch, applied: Applied) -> None:
        number, num_blocks = self._numbers.number_of(rank), len(stretch.hashes)
        holder, domain = self._numbers.holder(number, tier), self._domains.of(rank)
        if not self._room.make(domain, holder, stretch.hashes):
            return applied.refuse(Refusal.INDEX_FULL, num_blocks)
        if stretch.parent and not self._holdings.table.find(_as_u64((stretch.parent,)))[0]:
            return applied.refuse(Refusal.PARENT_EVICTED, num_blocks)
        domain.table.reserve(num_blocks)
        if self._holdings.store(holder, stretch, self._domains.named(domain)) is not None:
            self._speculative.confirm(number, stretch.hashes)
            applied.num_stored += num_blocks
        elif len(domain.ranks) > 1 and len(np.unique(stretch.names)) == num_blocks:
            # Its engine hashes are not the others': another algorithm, another seed.
            self._domains.part(rank)
            self._hold(rank, tier, stretch, applied)
        else:
            applied.refuse(Refusal.CONFLICTING_HASH, num_blocks)
        return None

    def _copy(self, rank: Rank, event: BlockCopied, applied: Applied) -> None:
        """The engine hash stands for a content, which is known if a rank here holds the block."""
        hashes = self._domains.of(rank).table.find(_as_u64(event.block_hashes))
        known = hashes[hashes != 0]
        number = self._numbers.number_of(rank)
        self._holdings.copy(self._numbers.holder(number, event.tier), known)
        applied.num_stored += len(known)
        applied.refuse(Refusal.NO_TOKENS, len(hashes) - len(known))

    def _remove(self, rank: Rank, event: BlockRemoved, applied: Applied) -> None:
        number, domain = self._numbers.number_of(rank), self._domains.of(rank)
        names, holder = _as_u64(event.block_hashes), self._numbers.holder(number, event.tier)
        hashes = domain.table.find(names) if len(self._labels) else names[:0]
        num_had = self._holdings.drop_named(holder, names, self._domains.named(domain))
        self._labels.erase_gone(number, hashes)
        applied.num_removed += num_had
        applied.refuse(Refusal.UNKNOWN_BLOCK, len(names) - num_had)

    def _why_unknown(self, parent: int) -> Refusal:
        # A parent that the index gave up itself is no sign of a lost event.
        is_lost = parent in self._room.lost_names
        return Refusal.PARENT_EVICTED if is_lost else Refusal.UNKNOWN_PARENT

    def _move(self, rank: Rank, event: CxlStateTransition, applied: Applied) -> None:
        names = _as_u64(tuple(dict.fromkeys(event.block_hashes)))
        hashes = self._domains.of(rank).table.find(names)
        applied.refuse(Refusal.UNKNOWN_BLOCK, int((hashes == 0).sum()))
        blocks = self._blocks(rank, names, hashes).only(hashes != 0)
        said = CxlMetadata(event.new_state, event.pool_id, event.accessible_workers)
        self._speculative.confirm(blocks.rank_number, blocks.hashes)
        self._cxl.move(blocks, said, applied)
        self._labels.erase_gone(blocks.rank_number, blocks.hashes)

    def _blocks(self, rank: Rank, names: U64, hashes: U64) -> Named:
        domain = partial(self._domains.named, self._domains.of(rank))
        return Named(self._numbers.number_of(rank), names, hashes, domain)

    def _namespace_seed(self, event: BlockStored, parent: SequenceHash | None) -> int:
        # Real vLLM (0.32) names the salt of a prompt with its first chunk only.
        if event.namespace is not None:
            return seed_of(event.namespace)
        return BASE_SEED if parent is None else self._holdings.seed_of(parent)


def _names(numbers: U64Like) -> tuple[EngineHash, ...]:
    return tuple(map(EngineHash, np.asarray(numbers).tolist()))


def _as_u64(numbers: Sequence[int]) -> U64:
    return np.frombuffer(array("Q", numbers), dtype=np.uint64)
