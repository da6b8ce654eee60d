"""Typed events as the packed ones that mean the same.

In:  an index, a rank, an event.   Out: packed events, with sequence hashes as a publisher has them.
"""

from kvplug.events import (
    AllBlocksCleared,
    BlockCopied,
    BlockRemoved,
    BlockStored,
    CxlStateTransition,
)
from kvplug.hashing import BASE_SEED, as_tokens, seed_of
from kvplug.packed import (
    PackedAdapter,
    PackedCleared,
    PackedCopied,
    PackedRemoved,
    PackedStored,
    PackedTransition,
)


def as_packed(index, rank, event):
    """One, or two for blocks of a LoRA adapter. Where the parent is unknown, so are the hashes."""
    match event:
        case BlockStored():
            return as_packed_stores(index, rank, event)
        case BlockCopied():
            kind = event.group, event.attention, event.sliding_window
            return [PackedCopied(event.block_hashes, event.tier, *kind)]
        case BlockRemoved():
            return [PackedRemoved(event.block_hashes, event.tier, event.group)]
        case AllBlocksCleared():
            return [PackedCleared(event.tier)]
        case CxlStateTransition():
            place = event.new_state, event.pool_id, event.accessible_workers
            return [PackedTransition(event.block_hashes, *place)]


def as_packed_stores(index, rank, event):
    hash_of = index.hash_spaces.hash_of
    parent = hash_of(rank, event.parent) if rank in index.numbers else None
    seed = BASE_SEED if parent is None else index.block_store.seed_of(parent)
    if event.namespace is not None:
        seed = seed_of(event.namespace)
    hashes = index.hasher.sequence_hashes(
        as_tokens(event.token_ids), seed, parent=parent, extra_keys=event.extra_keys
    )
    stored = PackedStored(
        event.block_hashes, hashes, event.parent, event.tier, seed,
        event.group, event.attention, event.sliding_window, cxl=event.cxl, moe=event.moe,
    )  # fmt: skip
    if event.namespace is None or not event.namespace.lora_name:
        return [stored]
    return [PackedAdapter(seed, event.namespace.lora_name), stored]
