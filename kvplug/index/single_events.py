"""Events one by one: whatever needs a decision, and forms that the kernels do not read.

In:  an event of a rank.   Out: block store, engine hashes, speculative blocks and annotations
changed; counts.

What is not certain is refused and counted, never guessed (kvplug/index/apply_result.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.errors import HashingError
from kvplug.events import (
    PARTIAL_ATTENTION,
    AllBlocksCleared,
    BlockCopied,
    BlockRemoved,
    BlockStored,
    CxlStateTransition,
    EngineHash,
    Event,
    Namespace,
    Rank,
    SequenceHash,
    Tier,
)
from kvplug.hashing import BASE_SEED, BlockHasher, as_hashes, seed_of
from kvplug.index.adapters import AdapterSeeds
from kvplug.index.annotations import Annotations
from kvplug.index.apply_result import ApplyResult, RejectReason
from kvplug.index.block_annotation import EventBlocks, NamesBlocks
from kvplug.index.block_store import BlockSpan
from kvplug.index.bounds import CapacityGuard
from kvplug.index.cache_groups import CacheGroups
from kvplug.index.event_buffers import EventBuffers
from kvplug.index.event_values import is_sound
from kvplug.index.expiring import ExpiringBlocks
from kvplug.index.hash_spaces import HashSpaces
from kvplug.index.lower_tiers import LowerTiers
from kvplug.index.repeated_stores import RepeatedStores
from kvplug.packed import (
    PackedAdapter,
    PackedCleared,
    PackedCopied,
    PackedEvent,
    PackedRemoved,
    PackedStored,
    PackedTransition,
    U64Like,
)

U64 = npt.NDArray[np.uint64]


class IndexParts(NamedTuple):
    """What events change, and the buffers that they pass through; `hash_spaces` has the numbers,
    `capacity_guard` the block store.
    """

    hasher: BlockHasher
    hash_spaces: HashSpaces
    capacity_guard: CapacityGuard
    speculative: ExpiringBlocks
    annotations: Annotations
    cache_groups: CacheGroups
    repeated_stores: RepeatedStores
    adapters: AdapterSeeds
    lower_tiers: LowerTiers
    buffers: EventBuffers


class SingleEvents:
    """apply, apply_packed, forget_adapter.

    `clear` takes a rank and a tier, None for all of them, and returns how many copies it dropped.
    """

    def __init__(self, parts: IndexParts, clear: Callable[[Rank, Tier | None], int]) -> None:
        self._hasher, self._speculative = parts.hasher, parts.speculative
        self._hash_spaces, self._numbers = parts.hash_spaces, parts.hash_spaces.numbers
        self._capacity_guard = parts.capacity_guard
        self._block_store = parts.capacity_guard.block_store
        self._annotations, self._cache_groups = parts.annotations, parts.cache_groups
        self._repeated_stores, self._adapters = parts.repeated_stores, parts.adapters
        self._lower_tiers = parts.lower_tiers
        self._clear = clear

    def apply(self, rank: Rank, event: Event, applied: ApplyResult) -> None:
        """Remember one event; one with a value that no event can have is refused as a whole."""
        if not is_sound(event):
            return applied.reject(RejectReason.BAD_VALUE, _num_blocks(event))
        try:
            return self._apply(rank, event, applied)
        except HashingError:
            return applied.reject(RejectReason.BAD_VALUE, _num_blocks(event))

    def _apply(self, rank: Rank, event: Event, applied: ApplyResult) -> None:
        match event:
            case BlockStored() | BlockCopied():
                self._take(rank, event, applied)
            case BlockRemoved():
                self._remove(rank, event, applied)
            case AllBlocksCleared():
                tier = self.tier_to_clear(rank, event)
                applied.clear(self._clear(rank, tier), everything=tier is None)
            case _:
                self._annotate(rank, event, applied)

    def _take(self, rank: Rank, event: BlockStored | BlockCopied, applied: ApplyResult) -> None:
        if self._lower_tiers.refuses(self._numbers.number_of(rank), event.tier):
            applied.reject(RejectReason.REFUSED_TIER, len(event.block_hashes))
        elif isinstance(event, BlockStored):
            self._store(rank, event, applied)
        else:
            self._copy(rank, event, applied)

    def tier_to_clear(self, rank: Rank, event: AllBlocksCleared | PackedCleared) -> Tier | None:
        """The tier that is empty; None for all of them."""
        number = self._numbers.number_of(rank)
        is_of_device = event.tier is None and self._lower_tiers.outlive_clears(number)
        return Tier.DEVICE if is_of_device else event.tier

    def apply_packed(self, rank: Rank, event: PackedEvent, applied: ApplyResult) -> None:
        """Remember one packed event, but for a clear."""
        match event:
            case PackedStored():
                self._store_hashed(rank, event, applied)
            case PackedRemoved(names, tier, group):
                removed = BlockRemoved(
                    block_hashes=_as_engine_hashes(names), tier=tier, group=group
                )
                self._remove(rank, removed, applied)
            case PackedCopied(names, tier, group, attention, window):
                copied = BlockCopied(
                    block_hashes=_as_engine_hashes(names), tier=tier, group=group,
                    attention=attention, sliding_window=window,
                )  # fmt: skip
                self._take(rank, copied, applied)
            case PackedTransition(names, state, pool_id, workers):
                transition = CxlStateTransition(
                    block_hashes=_as_engine_hashes(names), new_state=state, pool_id=pool_id,
                    accessible_workers=workers,
                )  # fmt: skip
                self._annotate(rank, transition, applied)
            case PackedAdapter(seed, lora_name):
                self._adapters.note(Namespace(lora_name), seed)
            case PackedCleared():
                raise AssertionError("clears are applied in slices")

    def _store_hashed(self, rank: Rank, event: PackedStored, applied: ApplyResult) -> None:
        num_blocks = len(event.engine_hashes)
        if self._lower_tiers.refuses(self._numbers.number_of(rank), event.tier):
            return applied.reject(RejectReason.REFUSED_TIER, num_blocks)
        bigrams = self._hasher.window - self._hasher.block_size
        if event.block_size not in (None, self._hasher.block_size):
            return applied.reject(self._why_other_size(event), num_blocks)
        if event.bigrams not in (None, bool(bigrams)):
            return applied.reject(RejectReason.BIGRAM_TOKENS, num_blocks)
        parent = self._hash_spaces.hash_of(rank, event.parent)
        if event.parent is not None and parent is None:
            return applied.reject(self._why_unknown(event.parent), num_blocks)
        if num_blocks != len(event.hashes):
            return applied.reject(RejectReason.MISALIGNED, num_blocks)
        seed = event.seed if parent is None else self._block_store.seed_of(parent)
        hashes, names = as_hashes(event.hashes), as_hashes(event.engine_hashes)
        return self._store_span(rank, event, BlockSpan(hashes, parent or 0, seed, names), applied)

    def _why_other_size(self, event: BlockStored | PackedStored) -> RejectReason:
        is_part = event.attention in PARTIAL_ATTENTION
        return RejectReason.GROUP_BLOCK_SIZE if is_part else RejectReason.BLOCK_SIZE

    def _store(self, rank: Rank, event: BlockStored, applied: ApplyResult) -> None:
        num_blocks = len(event.block_hashes)
        if event.block_size != self._hasher.block_size:
            return applied.reject(self._why_other_size(event), num_blocks)
        if event.block_size + event.bigrams != self._hasher.window:
            return applied.reject(RejectReason.BIGRAM_TOKENS, num_blocks)
        parent = self._hash_spaces.hash_of(rank, event.parent)
        if event.parent is not None and parent is None:
            return applied.reject(self._why_unknown(event.parent), num_blocks)
        seed = self._namespace_seed(event, parent)
        hashes = self._hasher.sequence_hashes(
            event.token_ids, seed, parent=parent, extra_keys=event.extra_keys
        )
        if len(hashes) != num_blocks or len(event.extra_keys) > num_blocks:
            return applied.reject(RejectReason.MISALIGNED, num_blocks)
        span = BlockSpan(hashes, parent or 0, seed, as_hashes(event.block_hashes))
        return self._store_span(rank, event, span, applied)

    def _store_span(
        self, rank: Rank, event: BlockStored | PackedStored, span: BlockSpan, applied: ApplyResult
    ) -> None:
        holder = self._cache_groups.holder_to_store(self._numbers.number_of(rank), event)
        if holder is None:
            return applied.reject(RejectReason.GROUP_TIER, len(span.hashes))
        return self._hold(rank, event, span, holder, applied)

    def _hold(
        self, rank: Rank, event: BlockStored | PackedStored, span: BlockSpan, holder: int,
        applied: ApplyResult,
    ) -> None:  # fmt: skip
        number, num_blocks = self._numbers.number_of(rank), len(span.hashes)
        hash_space = self._hash_spaces.of(rank)
        if not self._capacity_guard.make_room(hash_space, holder, span.hashes):
            return applied.reject(RejectReason.INDEX_FULL, num_blocks)
        if span.parent and not self._block_store.table.find(as_hashes((span.parent,)))[0]:
            return applied.reject(RejectReason.PARENT_EVICTED, num_blocks)
        hash_space.table.reserve(num_blocks)
        arrays = self._hash_spaces.arrays_of(hash_space)
        concerns_annotation = self._annotations.concern(event)
        if not concerns_annotation and self._is_report(number, event, span, holder):
            self._speculative.confirm(number, span.hashes)
            applied.num_stored += num_blocks
        elif self._block_store.store(holder, span, arrays) is not None:
            self._speculative.confirm(number, span.hashes)
            applied.num_stored += num_blocks
            if concerns_annotation:
                blocks = self._blocks(rank, span.engine_hashes, span.hashes)
                self._annotations.on_stored(blocks, event, applied)
        elif len(hash_space.ranks) > 1 and len(np.unique(span.engine_hashes)) == num_blocks:
            # Its engine hashes are not the others': another algorithm, another seed.
            self._hash_spaces.part(rank)
            self._hold(rank, event, span, holder, applied)
        elif self._is_reloaded(rank, span, applied):
            self._hold(rank, event, span, holder, applied)
        else:
            applied.reject(RejectReason.CONFLICTING_HASH, num_blocks)
        return None

    def _is_reloaded(self, rank: Rank, span: BlockSpan, applied: ApplyResult) -> bool:
        """Whether an adapter has other weights now, as its blocks have other engine hashes than the
        same ones before, which are gone from the index then.
        """
        adapter = self._adapters.adapter_of(span.seed)
        known = self._hash_spaces.of(rank).table.find(span.engine_hashes)
        has_two_contents = ((known != 0) & (known != span.hashes)).any()
        if not adapter or has_two_contents:
            return False
        num_forgotten = self.forget_adapter(rank, adapter)
        applied.reject(RejectReason.ADAPTER_RELOADED, num_forgotten)
        return num_forgotten > 0

    def forget_adapter(self, rank: Rank, lora_name: str) -> int:
        """Drop the rank's blocks of an adapter; returns how many copies they were.

        The engine may still name them, as parents of what it computed with the former weights.
        """
        number, hash_space = self._numbers.number_of(rank), self._hash_spaces.of(rank)
        holders = self._numbers.holders(number, None)
        engine_hashes, hashes = hash_space.table.items()
        is_mine = self._block_store.which_held(hashes, holders)
        is_mine &= np.isin(self._block_store.seeds_of(hashes), self._adapters.of(lora_name))
        engine_hashes, hashes = engine_hashes[is_mine], hashes[is_mine]
        num_dropped = sum(self._drop_all(rank, holder, engine_hashes) for holder in holders)
        self._capacity_guard.evicted_hashes.remember(engine_hashes)
        self._annotations.erase_gone()
        return num_dropped

    def _drop_all(self, rank: Rank, holder: int, engine_hashes: U64) -> int:
        """Every copy that the holder has of these blocks."""
        hash_space, num_dropped, num_now = self._hash_spaces.of(rank), 0, 1
        while num_now:
            arrays = self._hash_spaces.arrays_of(hash_space)
            num_now = self._block_store.drop_engine_hashes(holder, engine_hashes, arrays)
            num_dropped += num_now
        return num_dropped

    def _is_report(
        self, rank_number: int, event: BlockStored | PackedStored, span: BlockSpan, holder: int
    ) -> bool:
        """Whether an event brings no further copies (kvplug/index/repeated_stores.py).

        The groups of hybrid models lose blocks apart, and what one lacks all compute anew.
        """
        if span.parent or event.tier is not Tier.DEVICE or isinstance(event, PackedStored):
            return False
        flag = self._repeated_stores.flag_of(rank_number)
        if rank_number in self._cache_groups or (len(span.hashes) == 1 and not flag[0]):
            return False
        hash_space = self._hash_spaces.of(self._numbers.rank(rank_number))
        is_held = self._block_store.which_held(span.hashes, [holder])
        if is_held.all() and (hash_space.table.find(span.engine_hashes) == span.hashes).all():
            flag[0] = 1
            return True
        return False

    def _copy(self, rank: Rank, event: BlockCopied, applied: ApplyResult) -> None:
        """An engine hash stands for one content, known if a rank of the hash space holds it."""
        engine_hashes = as_hashes(event.block_hashes)
        number = self._numbers.number_of(rank)
        holder = self._cache_groups.holder_to_store(number, event)
        if holder is None:
            return applied.reject(RejectReason.GROUP_TIER, len(engine_hashes))
        hashes = self._hash_spaces.of(rank).table.find(engine_hashes)
        blocks = self._blocks(rank, engine_hashes, hashes).only(hashes != 0)
        num_known = len(blocks.hashes)
        if event.tier is not Tier.DEVICE and num_known:
            depths = self._block_store.depths_of(blocks.hashes)
            if not self._lower_tiers.note_copies(number, depths):
                if self._block_store.num_held(holder):  # taken before that was known
                    applied.clear(self._clear(rank, event.tier), everything=False)
                return applied.reject(RejectReason.CHUNKED_OFFLOAD, len(engine_hashes))
        self._block_store.copy(holder, blocks.hashes)
        applied.num_stored += num_known
        applied.reject(RejectReason.NO_TOKENS, len(hashes) - num_known)
        if self._annotations.concern(event):
            self._annotations.on_stored(blocks, event, applied)
        return None

    def _remove(self, rank: Rank, event: BlockRemoved, applied: ApplyResult) -> None:
        number, hash_space = self._numbers.number_of(rank), self._hash_spaces.of(rank)
        engine_hashes = as_hashes(event.block_hashes)
        holder = self._cache_groups.holder_of(number, event.group, event.tier)
        if holder is None:
            return applied.reject(RejectReason.UNKNOWN_BLOCK, len(engine_hashes))
        # With the last copy in a hash space goes the engine hash: look before.
        hashes = hash_space.table.find(engine_hashes) if self._annotations.need_all_events else None
        arrays = self._hash_spaces.arrays_of(hash_space)
        num_had = self._block_store.drop_engine_hashes(holder, engine_hashes, arrays)
        applied.num_removed += num_had
        applied.reject(RejectReason.UNKNOWN_BLOCK, len(engine_hashes) - num_had)
        if hashes is not None:
            is_known = hashes != 0
            blocks = self._blocks(rank, engine_hashes[is_known], hashes[is_known])
            self._annotations.on_removed(blocks)
        return None

    def _why_unknown(self, parent: int) -> RejectReason:
        # A parent that the index gave up itself is no sign of a lost event.
        is_lost = parent in self._capacity_guard.evicted_hashes
        return RejectReason.PARENT_EVICTED if is_lost else RejectReason.UNKNOWN_PARENT

    def _annotate(self, rank: Rank, event: NamesBlocks, applied: ApplyResult) -> None:
        """An event that only an annotation understands."""
        engine_hashes = as_hashes(tuple(dict.fromkeys(event.block_hashes)))
        hashes = self._hash_spaces.of(rank).table.find(engine_hashes)
        applied.reject(RejectReason.UNKNOWN_BLOCK, int((hashes == 0).sum()))
        blocks = self._blocks(rank, engine_hashes, hashes).only(hashes != 0)
        self._speculative.confirm(blocks.rank_number, blocks.hashes)
        self._annotations.on_event(blocks, event, applied)

    def _blocks(self, rank: Rank, engine_hashes: U64, hashes: U64) -> EventBlocks:
        hash_space = partial(self._hash_spaces.arrays_of, self._hash_spaces.of(rank))
        return EventBlocks(self._numbers.number_of(rank), engine_hashes, hashes, hash_space)

    def _namespace_seed(self, event: BlockStored, parent: SequenceHash | None) -> int:
        # Real vLLM (0.32) names the salt of a prompt with its first chunk only.
        if event.namespace is not None:
            seed = seed_of(event.namespace)
            self._adapters.note(event.namespace, seed)
            return seed
        return BASE_SEED if parent is None else self._block_store.seed_of(parent)


def _num_blocks(event: Event) -> int:
    hashes = getattr(event, "block_hashes", None)
    return len(hashes) if isinstance(hashes, Sized) else 1


def _as_engine_hashes(numbers: U64Like) -> tuple[EngineHash, ...]:
    return tuple(map(EngineHash, np.asarray(numbers).tolist()))
