"""The vocabulary: what an engine says about its KV cache.

In:  nothing; this file imports only msgspec.   Out: the types that codec, ingest and index share.

An engine publishes an `EventBatch` per scheduler step: blocks stored, blocks removed, everything
cleared, blocks moved between CXL states. Two kinds of hash occur and are never mixed:

* an **engine hash** is the opaque 64-bit id that the engine gives a block; removals and parents
  are named by it;
* a **sequence hash** is kvplug's own, computed from the tokens (kvplug/hashing.py); it identifies
  a whole prefix and is the key of the index.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NewType

import msgspec

MAX_BLOCK_SIZE = 2**16
"""Tokens per block; what is larger is taken for a mistake."""

MAX_DP_SIZE = 1024
"""Data-parallel ranks of one worker; what is more is taken for a mistake."""

WINDOWED_ATTENTION = frozenset({"sliding_window", "sliding_window_mla"})
"""Kinds of attention, in vLLM's words, for which an engine keeps the last blocks of a prefix."""

MAMBA = "mamba"
"""Linear attention, whatever the model calls it: an engine keeps states, each of a whole prefix."""

PARTIAL_ATTENTION = WINDOWED_ATTENTION | {MAMBA}
"""Kinds that do not keep all of a prefix."""

EngineHash = NewType("EngineHash", int)
"""The engine's id of a block, 0 <= id < 2**64. Signed and byte forms are folded to this."""

SequenceHash = NewType("SequenceHash", int)
"""kvplug's hash of a prefix, 0 <= hash < 2**64."""


class Tier(IntEnum):
    """How far a copy is from the GPU; smaller is nearer."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class CxlState(StrEnum):
    """Where a block of a CXL-pooled cache is."""

    LOCAL_GPU = "local_gpu"
    CXL_POOLED = "cxl_pooled"
    IN_TRANSIT = "in_transit"
    EVICTED = "evicted"


class Rank(msgspec.Struct, frozen=True, order=True):
    """One data-parallel rank of one worker: the unit that is scored and chosen."""

    worker: str
    dp_rank: int = 0

    def __str__(self) -> str:
        return f"{self.worker}#{self.dp_rank}" if self.dp_rank else self.worker

    def named_by(self, dp_rank: int | None) -> Rank:
        """The rank of this worker that a message names; this one if it names none."""
        return self if dp_rank in (None, self.dp_rank) else Rank(self.worker, dp_rank)


class Namespace(msgspec.Struct, frozen=True):
    """What separates equal tokens from each other: the LoRA adapter and the cache salt."""

    lora_name: str = ""
    salt: str = ""


def salt_with_extra_key(salt: str, extra_key: str) -> str:
    """The salt of a namespace that also has SGLang's extra_key, which is kept apart from all salts
    that a client can send; `salt` itself without an extra_key.
    """
    return f"\0extra_key\0{extra_key}\0{salt}" if extra_key else salt


class MoeLabel(msgspec.Struct, frozen=True):
    """The expert that a stored block belongs to in a mixture-of-experts model."""

    layer: int
    expert: int
    group: int = 0


class CxlMetadata(msgspec.Struct, frozen=True):
    """Where a stored block is in a CXL pool, and which workers can read it there."""

    state: CxlState = CxlState.LOCAL_GPU
    pool_id: int | None = None
    accessible_workers: tuple[str, ...] | None = None


class BlockStored(msgspec.Struct, frozen=True, kw_only=True):
    """A run of consecutive blocks is now cached.

    `token_ids` holds `len(block_hashes) * block_size` ids. `parent` is the engine hash of the block
    before the first one, None at the start of a sequence. `namespace` is None when the event does
    not say, and then the parent's holds. `extra_keys[i]`, if any, are further 64-bit keys
    (multimodal items and the like) of block i.

    `group`: the KV cache group of a hybrid model; `attention`: its kind; `sliding_window`: in
    tokens, if it has one (kvplug/index/cache_groups.py says what that means for a prefix).

    `bigrams`: the engine keys a block by its pairs (token, next token), as SGLang does with EAGLE.
    `token_ids` then has one id more, as a block depends on the token after it: of block i are the
    `block_size + 1` ids from `i * block_size`.
    """

    block_hashes: tuple[EngineHash, ...]
    token_ids: tuple[int, ...]
    block_size: int
    parent: EngineHash | None = None
    namespace: Namespace | None = None
    tier: Tier = Tier.DEVICE
    extra_keys: tuple[tuple[int, ...], ...] = ()
    group: int = 0
    attention: str = "full_attention"
    sliding_window: int | None = None
    cxl: CxlMetadata | None = None
    moe: MoeLabel | None = None
    bigrams: bool = False


class BlockCopied(msgspec.Struct, frozen=True, kw_only=True):
    """These blocks are in this tier now, too; their content is not said, only their engine hashes.

    vLLM's offloading connectors write it, and its groups with a sliding window where they skip
    blocks. An engine hash stands for one content, so whoever has seen the block stored under it
    knows what was copied; for anyone else it says nothing.
    """

    block_hashes: tuple[EngineHash, ...]
    tier: Tier = Tier.DEVICE
    group: int = 0
    attention: str = "full_attention"
    sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """One copy of each of these blocks is gone."""

    block_hashes: tuple[EngineHash, ...]
    tier: Tier = Tier.DEVICE
    group: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True):
    """The rank holds nothing any more; only in one tier, if it names one."""

    tier: Tier | None = None


class CxlStateTransition(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks moved between CXL states; an omitted pool or worker list is inherited."""

    block_hashes: tuple[EngineHash, ...]
    new_state: CxlState
    pool_id: int | None = None
    accessible_workers: tuple[str, ...] | None = None


Event = BlockStored | BlockCopied | BlockRemoved | AllBlocksCleared | CxlStateTransition


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What one message of an event stream said.

    `skipped` counts, by reason, the events that could not be understood; the rest is in `events`.
    `unknown_media` names medium strings that were taken for the lowest tier, `pooled_media` those
    of a memory that other workers can reach as well (CXL); it counts as host memory.
    """

    events: tuple[Event, ...]
    ts: float = 0.0
    dp_rank: int | None = None
    skipped: dict[str, int] = {}
    unknown_media: tuple[str, ...] = ()
    pooled_media: tuple[str, ...] = ()
