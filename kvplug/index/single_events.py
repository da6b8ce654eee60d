"""Events one by one: whatever needs a decision, and forms that the kernels do not read.

In:  an event of a rank.   Out: the block store, engine hashes and what is known besides, changed;
counts.

What is not certain is refused and counted, never guessed (kvplug/index/apply_result.py).
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
from kvplug.index.annotations import BlockAnnotations
from kvplug.index.apply_result import ApplyResult, RejectReason
from kvplug.index.block_store import BlockSpan
from kvplug.index.bounds import CapacityGuard
from kvplug.index.cxl import RankBlocks
from kvplug.index.hash_spaces import HashSpaces
from kvplug.index.holder_numbers import HolderNumbers
from kvplug.packed import PackedCleared, PackedEvent, PackedRemoved, PackedStored, U64Like

U64 = npt.NDArray[np.uint64]


class SingleEvents:
    """apply, apply_packed."""

    def __init__(
        self,
        hasher: BlockHasher,
        numbers: HolderNumbers,
        hash_spaces: HashSpaces,
        capacity_guard: CapacityGuard,
        annotations: BlockAnnotations,
        clear: Callable[[Rank, Tier | None], int],
    ) -> None:
        self._hasher, self._numbers, self._hash_spaces = hasher, numbers, hash_spaces
        self._capacity_guard, self._block_store, self._clear = (
            capacity_guard,
            capacity_guard.block_store,
            clear,
        )
        self._speculative, self._cxl, self._labels = annotations

    def apply(self, rank: Rank, event: Event, applied: ApplyResult) -> None:
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

    def apply_packed(self, rank: Rank, event: PackedEvent, applied: ApplyResult) -> None:
        """Remember one packed event."""
        match event:
            case PackedRemoved():
                removed = BlockRemoved(
                    block_hashes=_as_engine_hashes(event.engine_hashes), tier=event.tier
                )
                return self._remove(rank, removed, applied)
            case PackedCleared():
                number = self._clear(rank, event.tier)
                return applied.clear(number, everything=event.tier is None)
            case PackedStored():
                parent = self._hash_spaces.hash_of(rank, event.parent)
                if event.parent is not None and parent is None:
                    return applied.reject(self._why_unknown(event.parent), len(event.engine_hashes))
                if len(event.engine_hashes) != len(event.hashes):
                    return applied.reject(RejectReason.MISALIGNED, len(event.engine_hashes))
                seed = event.seed if parent is None else self._block_store.seed_of(parent)
                engine_hashes, hashes = as_hashes(event.engine_hashes), as_hashes(event.hashes)
                return self._hold(
                    rank, event.tier, BlockSpan(hashes, parent or 0, seed, engine_hashes), applied
                )

    def _store(self, rank: Rank, event: BlockStored, applied: ApplyResult) -> None:
        num_blocks = len(event.block_hashes)
        if event.block_size != self._hasher.block_size:
            return applied.reject(RejectReason.BLOCK_SIZE, num_blocks)
        if event.block_size + event.bigrams != self._hasher.window:
            return applied.reject(RejectReason.BIGRAM_TOKENS, num_blocks)
        parent = self._hash_spaces.hash_of(rank, event.parent)
        if event.parent is not None and parent is None:
            return applied.reject(self._why_unknown(event.parent), num_blocks)
        seed = self._namespace_seed(event, parent)
        hashes = self._hasher.sequence_hashes(
            as_tokens(event.token_ids), seed, parent=parent, extra_keys=event.extra_keys
        )
        if len(hashes) != num_blocks:
            return applied.reject(RejectReason.MISALIGNED, num_blocks)
        engine_hashes, num_stored = _as_u64(event.block_hashes), applied.num_stored
        self._hold(rank, event.tier, BlockSpan(hashes, parent or 0, seed, engine_hashes), applied)
        if applied.num_stored > num_stored and (event.cxl is not None or event.moe is not None):
            self._annotate(self._blocks(rank, engine_hashes, hashes), event, applied)
        return None

    def _annotate(self, blocks: RankBlocks, event: BlockStored, applied: ApplyResult) -> None:
        if event.cxl is not None:
            self._cxl.store(blocks, event.tier, event.cxl, applied)
        if event.moe is not None:
            self._labels.put(blocks.rank_number, blocks.hashes, event.moe)

    def _hold(self, rank: Rank, tier: Tier, span: BlockSpan, applied: ApplyResult) -> None:
        number, num_blocks = self._numbers.number_of(rank), len(span.hashes)
        holder, hash_space = self._numbers.holder(number, tier), self._hash_spaces.of(rank)
        if not self._capacity_guard.make(hash_space, holder, span.hashes):
            return applied.reject(RejectReason.INDEX_FULL, num_blocks)
        if span.parent and not self._block_store.table.find(_as_u64((span.parent,)))[0]:
            return applied.reject(RejectReason.PARENT_EVICTED, num_blocks)
        hash_space.table.reserve(num_blocks)
        if (
            self._block_store.store(holder, span, self._hash_spaces.arrays_of(hash_space))
            is not None
        ):
            self._speculative.confirm(number, span.hashes)
            applied.num_stored += num_blocks
        elif len(hash_space.ranks) > 1 and len(np.unique(span.engine_hashes)) == num_blocks:
            # Its engine hashes are not the others': another algorithm, another seed.
            self._hash_spaces.part(rank)
            self._hold(rank, tier, span, applied)
        else:
            applied.reject(RejectReason.CONFLICTING_HASH, num_blocks)
        return None

    def _copy(self, rank: Rank, event: BlockCopied, applied: ApplyResult) -> None:
        """The engine hash stands for a content, which is known if a rank here holds the block."""
        hashes = self._hash_spaces.of(rank).table.find(_as_u64(event.block_hashes))
        known = hashes[hashes != 0]
        number = self._numbers.number_of(rank)
        self._block_store.copy(self._numbers.holder(number, event.tier), known)
        applied.num_stored += len(known)
        applied.reject(RejectReason.NO_TOKENS, len(hashes) - len(known))

    def _remove(self, rank: Rank, event: BlockRemoved, applied: ApplyResult) -> None:
        number, hash_space = self._numbers.number_of(rank), self._hash_spaces.of(rank)
        engine_hashes, holder = (
            _as_u64(event.block_hashes),
            self._numbers.holder(number, event.tier),
        )
        hashes = hash_space.table.find(engine_hashes) if len(self._labels) else engine_hashes[:0]
        num_had = self._block_store.drop_engine_hashes(
            holder, engine_hashes, self._hash_spaces.arrays_of(hash_space)
        )
        self._labels.erase_gone(number, hashes)
        applied.num_removed += num_had
        applied.reject(RejectReason.UNKNOWN_BLOCK, len(engine_hashes) - num_had)

    def _why_unknown(self, parent: int) -> RejectReason:
        # A parent that the index gave up itself is no sign of a lost event.
        is_lost = parent in self._capacity_guard.evicted_hashes
        return RejectReason.PARENT_EVICTED if is_lost else RejectReason.UNKNOWN_PARENT

    def _move(self, rank: Rank, event: CxlStateTransition, applied: ApplyResult) -> None:
        engine_hashes = _as_u64(tuple(dict.fromkeys(event.block_hashes)))
        hashes = self._hash_spaces.of(rank).table.find(engine_hashes)
        applied.reject(RejectReason.UNKNOWN_BLOCK, int((hashes == 0).sum()))
        blocks = self._blocks(rank, engine_hashes, hashes).only(hashes != 0)
        said = CxlMetadata(event.new_state, event.pool_id, event.accessible_workers)
        self._speculative.confirm(blocks.rank_number, blocks.hashes)
        self._cxl.move(blocks, said, applied)
        self._labels.erase_gone(blocks.rank_number, blocks.hashes)

    def _blocks(self, rank: Rank, engine_hashes: U64, hashes: U64) -> RankBlocks:
        hash_space = partial(self._hash_spaces.arrays_of, self._hash_spaces.of(rank))
        return RankBlocks(self._numbers.number_of(rank), engine_hashes, hashes, hash_space)

    def _namespace_seed(self, event: BlockStored, parent: SequenceHash | None) -> int:
        # Real vLLM (0.32) names the salt of a prompt with its first chunk only.
        if event.namespace is not None:
            return seed_of(event.namespace)
        return BASE_SEED if parent is None else self._block_store.seed_of(parent)


def _as_engine_hashes(numbers: U64Like) -> tuple[EngineHash, ...]:
    return tuple(map(EngineHash, np.asarray(numbers).tolist()))


def _as_u64(numbers: Sequence[int]) -> U64:
    return np.frombuffer(array("Q", numbers), dtype=np.uint64)
