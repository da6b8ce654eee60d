"""What an engine holds, kept up event by event, so that a newcomer can be told without the engine.

In:  typed events of one rank.
Out: the packed events to send for them; a Listing of all that is held (kvplug/engines/listing.py).

It holds what an index holds that has applied the same events: copies by tier and KV cache group,
CXL states, MoE labels. What an index would refuse is not in it; of that, `defects` counts what the
engine holds and nobody can find. An engine that says again what it has stores nothing, and what is
not there cannot be removed: neither is sent (kvplug/index/repeated_stores.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvplug.engines.block_hashes import BASE_SEED, BlockHashes, seed_of
from kvplug.engines.resident_blocks import DEVICE, FrozenBlocks, ResidentBlocks
from kvplug.engines.resident_groups import GroupKind, OffloadedCopies, ResidentGroups
from kvplug.engines.resident_pools import ResidentPools
from kvplug.errors import HashingError
from kvplug.events import (
    PARTIAL_ATTENTION,
    AllBlocksCleared,
    BlockCopied,
    BlockRemoved,
    BlockStored,
    CxlMetadata,
    CxlStateTransition,
    Event,
    MoeLabel,
    Tier,
)
from kvplug.packed import (
    PackedAdapter,
    PackedCleared,
    PackedCopied,
    PackedEvent,
    PackedRemoved,
    PackedStored,
    PackedTransition,
)

_MAX_ADAPTER_SEEDS: Final = 4096


@dataclass(frozen=True, slots=True)
class Listing:
    """All that is held at one moment, as it is kept; for kvplug/engines/listing.py.

    metadata and labels: by sequence hash; main: the group of full attention, None without one;
    others: further groups; offloaded: (how many copies in lower tiers, blocks per chunk).
    """

    blocks: FrozenBlocks
    metadata: dict[int, CxlMetadata]
    labels: dict[int, MoeLabel]
    is_hybrid: bool
    main: int | None
    others: dict[int, GroupKind]
    offloaded: tuple[int, int]
    adapters: dict[int, str]


@dataclass(slots=True)
class _Counted:
    """has_reported: set once an engine has said again what it has."""

    has_reported: bool = False
    num_cleared: int = 0
    defects: Counter[str] = field(default_factory=Counter)


class ResidentSet:
    """apply, settle, forget, listing; read block_size, bigrams, groups and defects.

    block_size: tokens per block, None before the first event that says it.
    """

    def __init__(self, block_size: int | None = None, *, bigrams: bool = False) -> None:
        self.block_size, self.bigrams = block_size, bigrams
        self._counted = _Counted()
        self._hashes = None if block_size is None else BlockHashes(block_size, bigrams=bigrams)
        self._adapters: dict[int, str] = {}
        self._offloaded = OffloadedCopies()
        self._empty()
        self.groups = ResidentGroups(self._has_main, self._is_on_device)

    def _empty(self) -> None:
        self._pools, self._labels = ResidentPools(), dict[int, MoeLabel]()
        self._blocks = ResidentBlocks(self._pools.is_kept, self._on_gone)
        self._pools.blocks = self._blocks

    @property
    def said(self) -> tuple[object, ...]:
        """What followers must know before the next events; to be compared."""
        return self.block_size, self.bigrams, self.groups.num_changes, *self.defects

    def __len__(self) -> int:
        """How many blocks are held."""
        return len(self._blocks)

    @property
    def defects(self) -> Counter[str]:
        """Blocks, by the reason why they are not here; empty again with the cache."""
        return self._counted.defects

    @property
    def num_cleared(self) -> int:
        """How often the engine emptied its cache, in all tiers."""
        return self._counted.num_cleared

    def forget(self) -> None:
        """Nothing is known of what the engine holds; what kind of engine it is stays known."""
        self._adapters.clear()
        self._empty()

    def settle(self) -> None:
        """Give back memory; call it now and then between events."""
        self._blocks.squeeze()

    def listing(self) -> Listing:
        """What is held now; nothing that happens later changes it."""
        return Listing(
            self._blocks.freeze(),
            dict(self._pools.metadata),
            dict(self._labels),
            self.groups.is_hybrid,
            self.groups.main,
            dict(self.groups.others),
            (self._offloaded.num_copies, self._offloaded.blocks_per_chunk),
            dict(self._adapters),
        )

    def apply(self, event: Event) -> list[PackedEvent]:
        """Remember an event; what to send for it, nothing if it changes nothing."""
        num_changes = self.groups.num_changes
        try:
            packed = _APPLY[type(event)](self, event)
        except HashingError:
            self.defects["bad_value"] += 1
            return []
        if not packed and num_changes != self.groups.num_changes:
            return [_declared(event)]
        return packed

    # Stored and copied blocks.

    def _store(self, event: BlockStored) -> list[PackedEvent]:
        if not self._fits_blocks(event):
            return []
        names, known = event.block_hashes, self._blocks
        parent = None if event.parent is None else known.slot_of.get(event.parent)
        if event.parent is not None and parent is None:
            return self._refuse("unknown_parent", names)
        seed = self._seed(event, parent)
        before = None if parent is None else known.hashes[parent]
        assert self._hashes is not None
        hashes = self._hashes.sequence_hashes(
            event.token_ids, seed, parent=before, extra_keys=event.extra_keys
        )
        if len(hashes) != len(names) or len(event.extra_keys) > len(names):
            return self._refuse("misaligned", names)
        holder = self.groups.holder_to_store(event)
        if holder is None or (parent is None and self._is_report(event, hashes, holder)):
            return []
        adapter = self._new_adapter(event, seed)
        packed = _packed_store(event, hashes, seed)
        slots = known.store(names, hashes, parent, seed, holder)
        if slots is None and self._forget_reloaded(names, hashes, seed):
            slots = known.store(names, hashes, parent, seed, holder)
        if slots is not None:
            self._annotate(slots, event)
        return [*adapter, packed]

    def _fits_blocks(self, event: BlockStored) -> bool:
        """Whether its blocks are of the size of the others; the first ones say what that is."""
        is_part = event.attention in PARTIAL_ATTENTION
        if self._hashes is None or (not len(self) and not is_part):
            self._set_blocks(event.block_size, event.bigrams)
        if event.block_size != self.block_size:
            self._refuse("group_block_size" if is_part else "block_size", event.block_hashes)
            return False
        if event.bigrams != self.bigrams:
            self._refuse("bigram_tokens", event.block_hashes)
            return False
        return True

    def _set_blocks(self, block_size: int, bigrams: bool) -> None:
        if (block_size, bigrams) != (self.block_size, self.bigrams) or self._hashes is None:
            self.block_size, self.bigrams = block_size, bigrams
            self._hashes = BlockHashes(block_size, bigrams=bigrams)

    def _seed(self, event: BlockStored, parent: int | None) -> int:
        if event.namespace is not None:
            return seed_of(event.namespace)
        return BASE_SEED if parent is None else self._blocks.seeds[parent]

    def _new_adapter(self, event: BlockStored, seed: int) -> list[PackedEvent]:
        """The name of the adapter, the first time that its seed occurs."""
        if event.namespace is None or not event.namespace.lora_name or seed in self._adapters:
            return []
        if len(self._adapters) >= _MAX_ADAPTER_SEEDS:
            used = set(self._blocks.seeds)
            self._adapters = {seed: name for seed, name in self._adapters.items() if seed in used}
        self._adapters[seed] = event.namespace.lora_name
        return [PackedAdapter(seed, event.namespace.lora_name)]

    def _annotate(self, slots: Sequence[int], event: BlockStored) -> None:
        if event.cxl is not None:
            self._pools.on_stored(slots, event, event.cxl)
        if event.moe is not None:
            held = [slot for slot in slots if self._blocks.names[slot] in self._blocks.slot_of]
            self._labels.update(dict.fromkeys((self._blocks.hashes[s] for s in held), event.moe))

    def _is_report(self, event: BlockStored, hashes: list[int], holder: int) -> bool:
        """Whether the engine says again what it has, which brings no copies."""
        if event.tier is not Tier.DEVICE or event.cxl is not None or event.moe is not None:
            return False
        if self.groups.is_hybrid or (len(hashes) == 1 and not self._counted.has_reported):
            return False
        if event.block_hashes and event.block_hashes[0] not in self._blocks.slot_of:
            return False
        counts = self._blocks.counts_of(holder)
        slots = list(map(self._blocks.slot_of.get, event.block_hashes))
        if any(slot is None or not counts[slot] for slot in slots):
            return False
        is_same = [self._blocks.hashes[slot] for slot in slots if slot is not None] == hashes
        self._counted.has_reported |= is_same
        return is_same

    def _forget_reloaded(self, names: Iterable[int], hashes: list[int], seed: int) -> bool:
        """Whether an adapter came with other weights: then its blocks of before are forgotten."""
        adapter = self._adapters.get(seed)
        slots = [self._blocks.slot_of.get(name) for name in names]
        if adapter is None or any(
            slot is not None and self._blocks.hashes[slot] != hash_
            for slot, hash_ in zip(slots, hashes, strict=True)
        ):
            return False
        seeds = {seed for seed, name in self._adapters.items() if name == adapter}
        old = [slot for slot in self._blocks.slot_of.values() if self._blocks.seeds[slot] in seeds]
        for slot in old:
            self._pools.forget_pool(self._blocks.hashes[slot])
            self._blocks.drop_everywhere(slot)
        return bool(old)

    def _copy(self, event: BlockCopied) -> list[PackedEvent]:
        holder = self.groups.holder_to_store(event)
        if holder is None:
            return []
        known = [(name, self._blocks.slot_of.get(name)) for name in event.block_hashes]
        slots = [slot for _, slot in known if slot is not None]
        if len(slots) < len(known):
            self._refuse("no_tokens", known[len(slots) :])
        if not slots and event.block_hashes:
            return []
        names = [name for name, slot in known if slot is not None]
        kind = event.group, event.attention, event.sliding_window
        packed = PackedCopied(names, event.tier, *kind)
        if event.tier is not Tier.DEVICE and not self._note_offloaded(slots, event.tier):
            self._refuse("chunked_offload", names)
        else:
            self._blocks.add_copies(slots, holder)
        return [packed]

    def _note_offloaded(self, slots: list[int], tier: Tier) -> bool:
        """Whether these copies count; if not, none in that tier does."""
        if self._offloaded.note([self._blocks.depths[slot] for slot in slots]):
            return True
        self._drop_tier(int(tier))
        return False

    def _refuse(self, reason: str, blocks: Iterable[object]) -> list[PackedEvent]:
        self.defects[reason] += sum(1 for _ in blocks)
        return []

    # Blocks that go or move.

    def _remove(self, event: BlockRemoved) -> list[PackedEvent]:
        holder = self.groups.holder_of(event.group, event.tier)
        if holder is None:
            return []
        removed = self._blocks.remove(event.block_hashes, holder)
        return [PackedRemoved(removed, event.tier, event.group)] if removed else []

    def _clear(self, event: AllBlocksCleared) -> list[PackedEvent]:
        tier = event.tier
        if tier is None and self._offloaded.outlive_clears:
            tier = Tier.DEVICE
        if tier is None:
            self._empty()
            self.defects.clear()
            self._counted.num_cleared += 1
        else:
            self._drop_tier(int(tier))
        return [PackedCleared(tier)]

    def _drop_tier(self, tier: int) -> None:
        holders = [tier, *(self._blocks.groups if tier == DEVICE else ())]
        for holder in holders:
            for slot in self._blocks.held_by(holder):
                self._blocks.drop_all(slot, holder)

    def _move(self, event: CxlStateTransition) -> list[PackedEvent]:
        names = [name for name in dict.fromkeys(event.block_hashes) if name in self._blocks.slot_of]
        if not names:
            return []
        self._pools.move([self._blocks.slot_of[name] for name in names], event)
        return [PackedTransition(names, event.new_state, event.pool_id, event.accessible_workers)]

    def _on_gone(self, hash_: int) -> None:
        if self._labels:
            self._labels.pop(hash_, None)
        if self._pools.metadata:
            self._pools.on_gone(hash_)

    def _has_main(self) -> bool:
        return self._blocks.num_held.get(DEVICE, 0) > 0

    def _is_on_device(self) -> bool:
        return any(self._blocks.num_held.get(each) for each in (DEVICE, *self._blocks.groups))


_APPLY: Final[dict[type[Event], Callable[..., list[PackedEvent]]]] = {
    BlockStored: ResidentSet._store,
    BlockCopied: ResidentSet._copy,
    BlockRemoved: ResidentSet._remove,
    AllBlocksCleared: ResidentSet._clear,
    CxlStateTransition: ResidentSet._move,
}


def _declared(event: Event) -> PackedEvent:
    """What an event says of its group, and nothing of its blocks."""
    assert isinstance(event, BlockStored | BlockCopied)
    return PackedCopied((), event.tier, event.group, event.attention, event.sliding_window)


def _packed_store(event: BlockStored, hashes: list[int], seed: int) -> PackedStored:
    return PackedStored(
        event.block_hashes,
        hashes,
        event.parent,
        event.tier,
        seed,
        event.group,
        event.attention,
        event.sliding_window,
        cxl=event.cxl,
        moe=event.moe,
    )
