"""The shapes that events have on the wire, and what each of them means.

In:  a wire shape with fields of the right types.   Out: an event of the vocabulary, and back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final

import msgspec
import xxhash
from msgspec import UNSET, Meta, Struct, UnsetType

from kvplug import events
from kvplug.events import (
    MAX_BLOCK_SIZE,
    PARTIAL_ATTENTION,
    CxlMetadata,
    CxlState,
    EngineHash,
    MoeLabel,
    Namespace,
    Tier,
)


class Reason(StrEnum):
    """Why an event was skipped: all that `EventBatch.skipped` can count, fit for a metric label."""

    NOT_AN_EVENT = "not_an_event"  # neither a map nor an array that names its type
    UNKNOWN_TYPE = "unknown_type"
    MISSING_FIELD = "missing_field"
    BAD_FIELD = "bad_field"  # a field without a reason of its own is not what it should be
    BAD_HASH = "bad_hash"
    BAD_TOKEN_ID = "bad_token_id"
    BAD_BLOCK_SIZE = "bad_block_size"
    BAD_EXTRA_KEYS = "bad_extra_keys"
    NO_BLOCKS = "no_blocks"
    TOKENS_MISALIGNED = "tokens_misaligned"
    CHUNKED_OFFLOAD = "chunked_offload"  # a chunk of blocks, found by its last one
    # The kinds of vLLM 0.32 (v1/kv_cache_interface.py) of which it is not known what they need of a
    # prefix.
    CHUNKED_LOCAL = "attention:chunked_local_attention"
    ENCODER_ONLY = "attention:encoder_only_attention"
    CROSS = "attention:cross_attention"
    UNKNOWN_ATTENTION = "attention:unknown"  # and every kind that is not in a list


class SkipError(Exception):
    """This event cannot be used."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


TIERS: Final = {
    "GPU": Tier.DEVICE,
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1", "CXL"), Tier.HOST),
    **dict.fromkeys(("DISK", "STORAGE", "EXTERNAL", "CPU_TIER2"), Tier.DISK),
}
POOLED_MEDIA: Final = frozenset({"CXL"})
_ATTENTION_REASONS: Final = {reason.partition(":")[2]: reason for reason in Reason}
_U64: Final = 2**64 - 1
_SHA256_HEX: Final = re.compile("[0-9a-fA-F]{64}")

_TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Index = Annotated[int, Meta(ge=0)]
# What is larger is no group of a model; a follower remembers those that it has seen.
_Group = Annotated[int, Meta(ge=0, le=2**16 - 1)]


class _MmObject(Struct):
    """A multimodal item in Dynamo's form; its hash is what vLLM's identifier begins with."""

    mm_hash: Annotated[int, Meta(ge=-(2**63))]


class _MmInfo(Struct):
    """The multimodal items of one block."""

    mm_objects: tuple[_MmObject, ...]

    def keys(self) -> tuple[int, ...]:
        return tuple(sorted(item.mm_hash & _U64 for item in self.mm_objects))


class Stored(Struct, tag_field="type", tag="BlockStored", kw_only=True):
    """Blocks came into a cache.

    In every field that has a default nil means that it is absent, here and in the kernels.
    """

    # The order of vLLM's arrays, which only ever grew at the end.
    block_hashes: tuple[EngineHash, ...]
    parent_block_hash: int | None = None
    token_ids: tuple[_TokenId, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group_idx: _Group | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    # In maps only.
    cache_salt: str | None = None
    block_mm_infos: tuple[_MmInfo | None, ...] | None = None
    cxl_metadata: CxlMetadata | None = None
    moe: MoeLabel | None = None
    # Left out unless it is true: vllm-router 0.1.17 refuses an event with `bigrams: false`.
    bigrams: bool | UnsetType | None = UNSET

    def event(self) -> events.BlockStored | events.BlockCopied:
        """Check what must hold together, and translate; SkipError if it does not."""
        attention = _attention(self.kv_cache_spec_kind, self.kv_cache_spec_sliding_window)
        if not self.token_ids or self._skips_blocks(attention):
            return self._copied(attention)
        if self._is_offloaded():
            if len(self.block_hashes) > 1:
                raise SkipError(Reason.CHUNKED_OFFLOAD)
            if self.parent_block_hash is None:  # its salt is not said
                return self._copied(attention)
        block_hashes, group = _engine_hashes(self.block_hashes), self.group_idx or 0
        self._require_aligned_tokens()
        parent = self.parent_block_hash
        lora = self.lora_name or (str(self.lora_id) if self.lora_id else "")
        salt = self._salt(lora)
        inherits = parent is not None and self.cache_salt is None
        return events.BlockStored(
            block_hashes=block_hashes,
            token_ids=self.token_ids,
            block_size=self.block_size,
            parent=None if parent is None else EngineHash(parent & _U64),
            namespace=None if inherits else Namespace(lora, salt),
            tier=_tier(self.medium),
            extra_keys=self._extra_keys(lora, salt),
            group=group,
            attention=attention,
            sliding_window=self.kv_cache_spec_sliding_window,
            cxl=self.cxl_metadata,
            moe=self.moe,
            bigrams=bool(self.bigrams),
        )

    def _copied(self, attention: str) -> events.BlockCopied:
        # A group that has skipped all blocks is known from then on.
        as_unsigned = _unsigned if attention in PARTIAL_ATTENTION else _engine_hashes
        return events.BlockCopied(
            block_hashes=as_unsigned(self.block_hashes),
            tier=_tier(self.medium),
            group=self.group_idx or 0,
            attention=attention,
            sliding_window=self.kv_cache_spec_sliding_window,
        )

    def _is_offloaded(self) -> bool:
        """Whether vLLM's offloading connector (0.32) has described a chunk: it names the group, and
        no extra keys, whatever the chunk has.
        """
        is_lower = _tier(self.medium) is not Tier.DEVICE
        return is_lower and self.group_idx is not None and self.extra_keys is None

    def _skips_blocks(self, attention: str) -> bool:
        """Whether it is of vLLM, which leaves out blocks that a window has moved past, but not
        their tokens.
        """
        num_blocks = (len(self.token_ids) - bool(self.bigrams)) // max(1, self.block_size)
        return attention in PARTIAL_ATTENTION and len(self.block_hashes) < num_blocks

    def _require_aligned_tokens(self) -> None:
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise SkipError(Reason.BAD_BLOCK_SIZE)
        if len(self.token_ids) != len(self.block_hashes) * self.block_size + bool(self.bigrams):
            raise SkipError(Reason.TOKENS_MISALIGNED)

    def _salt(self, lora: str) -> str:
        """The salt that SGLang names, or the last bare string of vLLM's first block.

        vLLM 0.18 sent multimodal identifiers (64 hex digits) bare as well; what vLLM sends since
        0.20 has a `group_idx`.
        """
        if self.cache_salt is not None:
            return self.cache_salt
        if self.parent_block_hash is not None or not self.extra_keys:
            return ""
        bare = [key for key in self.extra_keys[0] or () if isinstance(key, str)]
        if lora in bare:
            bare.remove(lora)  # once: the salt may have the name of the adapter
        if self.group_idx is None:
            bare = [key for key in bare if not _SHA256_HEX.fullmatch(key)]
        return bare[-1] if bare else ""

    def _extra_keys(self, lora: str, salt: str) -> tuple[tuple[int, ...], ...]:
        if self.block_mm_infos is not None:
            return self._keys_of_mm_infos(self.block_mm_infos)
        if not self.extra_keys or not any(self.extra_keys):
            return ()
        if len(self.extra_keys) != len(self.block_hashes):
            raise SkipError(Reason.BAD_EXTRA_KEYS)
        first, *rest = self.extra_keys
        blocks = (_keys(first, (lora, salt)), *(_keys(entry, (lora,)) for entry in rest))
        return blocks if any(blocks) else ()

    def _keys_of_mm_infos(self, infos: tuple[_MmInfo | None, ...]) -> tuple[tuple[int, ...], ...]:
        if len(infos) != len(self.block_hashes):
            raise SkipError(Reason.BAD_EXTRA_KEYS)
        blocks = tuple(info.keys() if info else () for info in infos)
        return blocks if any(blocks) else ()


class Removed(Struct, tag_field="type", tag="BlockRemoved"):
    """A copy of each of these blocks is gone."""

    block_hashes: tuple[EngineHash, ...]
    medium: str | None = None
    group_idx: _Group | None = None

    def event(self) -> events.BlockRemoved:
        """Check what must hold together, and translate; SkipError if it does not."""
        hashes, group = _engine_hashes(self.block_hashes), self.group_idx or 0
        return events.BlockRemoved(block_hashes=hashes, tier=_tier(self.medium), group=group)


class Cleared(Struct, tag_field="type", tag="AllBlocksCleared"):
    """A cache was emptied."""

    medium: str | None = None

    def event(self) -> events.AllBlocksCleared:
        """Check what must hold together, and translate; SkipError if it does not."""
        return events.AllBlocksCleared(tier=None if self.medium is None else _tier(self.medium))


class Transition(Struct, tag_field="type", tag="CxlStateTransition"):
    """Blocks moved between CXL states."""

    block_hashes: tuple[EngineHash, ...]
    new_state: CxlState
    pool_id: int | None = None
    accessible_workers: tuple[str, ...] | None = None
    medium: ClassVar[None] = None

    def event(self) -> events.CxlStateTransition:
        """Check what must hold together, and translate; SkipError if it does not."""
        return events.CxlStateTransition(
            block_hashes=_engine_hashes(self.block_hashes),
            new_state=self.new_state,
            pool_id=self.pool_id,
            accessible_workers=self.accessible_workers,
        )


Wire = Stored | Removed | Cleared | Transition
SHAPES: Final[dict[str, type[Wire]]] = {
    "BlockStored": Stored,
    "BlockRemoved": Removed,
    "AllBlocksCleared": Cleared,
    "AllCacheCleared": Cleared,
    "CxlStateTransition": Transition,
}


def in_order_of_names(read: list[events.Event]) -> list[events.Event]:
    """The events of a batch, such that the content of a block comes before a copy by its hash.

    vLLM lists groups by number, and a group that leaves out blocks may come before the one with
    full attention, which says what the others are.
    """
    if not any(_is_of_part(event) for event in read):
        return read
    after: dict[int, list[events.Event]] = {}
    for at, event in enumerate(read):
        after.setdefault(at, []).append(event)
    for at, stored_at in _copies_before_content(read):
        after[stored_at] += after.pop(at)
    return [event for at in sorted(after) for event in after[at]]


def _is_of_part(event: events.Event) -> bool:
    return isinstance(event, events.BlockCopied) and event.attention in PARTIAL_ATTENTION


def _copies_before_content(read: list[events.Event]) -> list[tuple[int, int]]:
    """Of each copy that comes before its content: its place, and that of the content."""
    found, stored_at = [], dict[EngineHash, int]()
    for at in range(len(read) - 1, -1, -1):
        event = read[at]
        if isinstance(event, events.BlockStored):
            stored_at.update(dict.fromkeys(event.block_hashes, at))
        elif not isinstance(event, events.BlockCopied):
            stored_at.clear()  # it may take the blocks away again
        elif _is_of_part(event):
            places = [stored_at[each] for each in event.block_hashes if each in stored_at]
            found += [(at, max(places))] if places else []
    return found[::-1]


def _attention(kind: str | None, window: int | None) -> str:
    kind = kind or ("full_attention" if window is None else "sliding_window")
    if kind in PARTIAL_ATTENTION or ("sliding" not in kind and ("full" in kind or "mla" in kind)):
        return kind
    raise SkipError(_ATTENTION_REASONS.get(kind, Reason.UNKNOWN_ATTENTION))


def _engine_hashes(hashes: tuple[EngineHash, ...]) -> tuple[EngineHash, ...]:
    if not hashes:
        raise SkipError(Reason.NO_BLOCKS)
    return _unsigned(hashes)


def _unsigned(hashes: tuple[EngineHash, ...]) -> tuple[EngineHash, ...]:
    if min(hashes, default=0) >= 0:
        return hashes
    return tuple(EngineHash(number & _U64) for number in hashes)  # SGLang's are signed


def _tier(medium: str | None) -> Tier:
    return Tier.DEVICE if medium is None else TIERS.get(medium.upper(), Tier.DISK)


def _keys(entry: tuple[Any, ...] | None, names: tuple[str, ...]) -> tuple[int, ...]:
    """The 64-bit keys of one block, without those that are names known from elsewhere."""
    return tuple(sorted(extra_key(key) for key in entry or () if key not in names))


def extra_key(key: object) -> int:
    """Of a key as vLLM names it; SkipError for what is none."""
    match key:
        case str(text) | [str(text), int()]:  # a multimodal item may come with its offset
            if _SHA256_HEX.fullmatch(text):
                return int(text[:16], 16)
            return xxhash.xxh3_64_intdigest(text.encode())
        case bytes():  # the digest of prompt embeddings
            return xxhash.xxh3_64_intdigest(key)
    raise SkipError(Reason.BAD_EXTRA_KEYS)


_MEDIA: Final = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "STORAGE"}


def to_wire(event: events.Event) -> Wire:
    """The shape that vLLM 0.32 would send for this event."""
    match event:
        case events.BlockStored():
            return _stored_to_wire(event)
        case events.BlockCopied():
            return Stored(
                block_hashes=event.block_hashes,
                token_ids=(),
                block_size=0,
                medium=_MEDIA[event.tier],
                group_idx=event.group,
                kv_cache_spec_kind=event.attention,
                kv_cache_spec_sliding_window=event.sliding_window,
            )
        case events.BlockRemoved(block_hashes=hashes, tier=tier, group=group):
            return Removed(hashes, _MEDIA[tier], group)
        case events.AllBlocksCleared(tier=tier):
            return Cleared(None if tier is None else _MEDIA[tier])
        case events.CxlStateTransition():
            return Transition(
                event.block_hashes, event.new_state, event.pool_id, event.accessible_workers
            )


def _stored_to_wire(event: events.BlockStored) -> Stored:
    lora, salt = msgspec.structs.astuple(event.namespace or Namespace())
    # The salt is named besides, as a bare string could be taken for the LoRA; and without it an
    # event with a parent would inherit.
    names_salt = salt or (event.namespace is not None and event.parent is not None)
    return Stored(
        block_hashes=event.block_hashes,
        parent_block_hash=event.parent,
        token_ids=event.token_ids,
        block_size=event.block_size,
        medium=_MEDIA[event.tier],
        lora_name=lora or None,
        extra_keys=tuple(_wire_keys(event, lora, salt)),
        group_idx=event.group,
        kv_cache_spec_kind=event.attention,
        kv_cache_spec_sliding_window=event.sliding_window,
        cache_salt=salt if names_salt else None,
        cxl_metadata=event.cxl,
        moe=event.moe,
        bigrams=event.bigrams or UNSET,
    )


def _wire_keys(event: events.BlockStored, lora: str, salt: str) -> Iterator[tuple[Any, ...] | None]:
    """One entry per block, as vLLM makes them: LoRA, multimodal items, salt of the first block."""
    for i in range(len(event.block_hashes)):
        keys = event.extra_keys[i] if event.extra_keys else ()
        starts = i == 0 and event.parent is None
        identifiers = [(f"{key:016x}".ljust(64, "0"), 0) for key in keys]
        entry = (*filter(None, [lora]), *identifiers, *filter(None, [salt if starts else ""]))
        yield entry or None
