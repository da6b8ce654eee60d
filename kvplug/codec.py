"""Event bytes to `EventBatch` and back: the one decode door.

In:  one payload of an event stream, or the frames around it.   Out: EventBatch, Frame.

Understood are vLLM 0.11 to 0.33 (events are arrays up to 0.23, maps since 0.24), SGLang 0.5, and
kvplug's own additions (CXL, MoE); tests/vectors holds what each engine sends. A batch of maps with
integer hashes becomes wire shapes in one step; in any other batch each event is first brought into
the form of such a map, so both ways end in the same types and checks. An event that cannot be used
is skipped and counted; only bytes that are no batch raise `DecodeError`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Generic, TypeVar

import msgspec
import xxhash
from msgspec import Meta, Raw, Struct

from kvplug import events
from kvplug.errors import DecodeError
from kvplug.events import CxlMetadata, CxlState, EngineHash, EventBatch, MoeLabel, Namespace, Tier

MAX_BYTES: Final = 64 * 2**20
MAX_BLOCK_SIZE: Final = 2**16


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
    NO_TOKENS = "no_tokens"  # vLLM's offloading names blocks whose content it does not know
    BIGRAM_TOKENS = "bigram_tokens"  # SGLang with EAGLE
    TOKENS_MISALIGNED = "tokens_misaligned"
    # The kinds of vLLM 0.32 (v1/kv_cache_interface.py) that do not keep all of a prefix.
    SLIDING_WINDOW = "not_full_attention:sliding_window"
    SLIDING_WINDOW_MLA = "not_full_attention:sliding_window_mla"
    MAMBA = "not_full_attention:mamba"
    CHUNKED_LOCAL = "not_full_attention:chunked_local_attention"
    ENCODER_ONLY = "not_full_attention:encoder_only_attention"
    CROSS = "not_full_attention:cross_attention"
    UNKNOWN_ATTENTION = "not_full_attention:unknown"  # and every kind that is not in this list


class Frame(Struct, frozen=True):
    """The parts of one message on an event socket."""

    topic: str
    seq: int | None
    payload: bytes


def parse_frames(frames: list[bytes]) -> Frame:
    """Name the parts of [topic, seq, payload] or [topic, payload]; DecodeError on others."""
    try:
        match frames:
            case [topic, payload]:
                return Frame(topic.decode(), None, payload)
            case [topic, seq, payload] if len(seq) == 8:
                return Frame(topic.decode(), int.from_bytes(seq, "big"), payload)
    except UnicodeDecodeError as error:
        raise DecodeError(f"cannot read a message: expected a UTF-8 topic; {error}") from error
    sizes = ", ".join(str(len(frame)) for frame in frames[:4])
    raise DecodeError(
        "cannot read a message: expected [topic, 8-byte sequence number, payload] or "
        f"[topic, payload]; got {len(frames)} parts (bytes: {sizes})"
    )


def decode(payload: bytes, *, max_bytes: int = MAX_BYTES) -> EventBatch:
    """Read one message of an event stream; DecodeError if it is no batch."""
    head = _open(payload, max_bytes)
    read: list[events.Event] = []
    skipped: Counter[str] = Counter()
    unknown_media: dict[str, None] = {}  # a dict, to keep the order
    for item in head.events:
        try:
            wire = _parse(item) if isinstance(item, Raw) else item
            read.append(wire.event())
        except _SkipError as skip:
            skipped[skip.reason.value] += 1
            continue
        if wire.medium is not None and wire.medium.upper() not in _TIERS:
            unknown_media[wire.medium] = None
    return EventBatch(
        events=tuple(read),
        ts=head.ts,
        dp_rank=head.rank,
        skipped=dict(skipped),
        unknown_media=tuple(unknown_media),
    )


def encode(batch: EventBatch) -> bytes:
    """Write a batch as vLLM 0.32 does. `decode` gives it back, except that

    * `skipped`, `unknown_media`, and events that `decode` skips are lost;
    * a BlockStored with neither parent nor namespace gets Namespace();
    * the extra keys of a block come back sorted, and () if no block has any.

    vLLM's own decoder ignores what it has no field for (`cache_salt`, `cxl_metadata`, `moe`, the
    medium of a clear), but refuses a batch with a CxlStateTransition.
    """
    wires = [_to_wire(event) for event in batch.events]
    return msgspec.msgpack.encode((batch.ts, wires, batch.dp_rank))


# --- bytes to wire shapes -------------------------------------------------------------------------

# msgspec lets all of these out of bytes that are not valid; TypeError (a map as a key) up to 0.19.
_MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError)
_MAP_OPCODES: Final = (*range(0x80, 0x90), 0xDE, 0xDF)
_FIELD_REASONS: Final = {
    "block_hashes": Reason.BAD_HASH,
    "parent_block_hash": Reason.BAD_HASH,
    "token_ids": Reason.BAD_TOKEN_ID,
    "block_size": Reason.BAD_BLOCK_SIZE,
    "extra_keys": Reason.BAD_EXTRA_KEYS,
}


class _SkipError(Exception):
    """This event cannot be used."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


def _open(payload: bytes, max_bytes: int) -> _Batch[_Wire] | _Batch[Raw]:
    """The batch with its events as wire shapes if all of them fit, else still packed."""
    if len(payload) > max_bytes:
        raise DecodeError(
            f"cannot decode an event batch: expected at most {max_bytes} bytes, got {len(payload)}"
        )
    is_map = bool(payload) and payload[0] in _MAP_OPCODES
    with suppress(*_MALFORMED):
        return (_MAP_OF_SHAPES if is_map else _ARRAY_OF_SHAPES).decode(payload)
    try:
        return (_MAP_OF_ANY if is_map else _ARRAY_OF_ANY).decode(payload)
    except _MALFORMED as error:
        raise DecodeError(
            "cannot decode an event batch: expected msgpack [ts, events, dp_rank] or a map with "
            f"ts and events; {error}"
        ) from error


def _parse(raw: Raw) -> _Wire:
    try:
        return _EVENT.decode(raw)
    except _MALFORMED:
        return _parse_tolerantly(raw)


def _parse_tolerantly(raw: Raw) -> _Wire:
    """Bring an array, or a map with digests for hashes, into the form of a wire shape."""
    shape, fields = _named_fields(raw)
    for name in ("block_hashes", "parent_block_hash"):
        if name in fields:
            fields[name] = _without_digests(fields[name])
    try:
        return msgspec.convert(fields, shape)
    except msgspec.ValidationError:
        raise _SkipError(_misfit(shape, fields)) from None


def _named_fields(raw: Raw) -> tuple[type[_Wire], dict[str, Any]]:
    """An event's shape, and what the event says of the shape's fields."""
    try:
        event = _ANYTHING.decode(raw)
    except _MALFORMED:
        raise _SkipError(Reason.NOT_AN_EVENT) from None
    match event:
        case {"type": str(tag)} | [str(tag), *_]:
            shape = _SHAPES.get(tag)
        case _:
            raise _SkipError(Reason.NOT_AN_EVENT)
    if shape is None:
        raise _SkipError(Reason.UNKNOWN_TYPE)
    names = shape.__struct_fields__
    if isinstance(event, list):
        return shape, dict(zip(names[:_NUM_ARRAY_FIELDS], event[1:], strict=False))
    return shape, {name: event[name] for name in names if name in event}


def _without_digests(value: object) -> object:
    """Replace each digest by the integer that vLLM would publish for it: its low 64 bits."""
    if isinstance(value, list):
        return [_low_64_bits(item) for item in value]
    return _low_64_bits(value)


def _low_64_bits(value: object) -> object:
    if isinstance(value, bytes) and len(value) in (16, 32):  # XXH3-128, SHA-256
        return int.from_bytes(value[-8:], "big")
    return value


def _misfit(shape: type[_Wire], fields: dict[str, Any]) -> Reason:
    """The reason that goes with the first field that does not fit its shape."""
    for field in msgspec.structs.fields(shape):
        try:
            if field.required or field.name in fields:
                msgspec.convert(fields[field.name], field.type)
        except KeyError:
            return Reason.MISSING_FIELD
        except msgspec.ValidationError:
            break
    value = fields.get(field.name)
    if field.name == "token_ids" and isinstance(value, list) and any(map(_is_pair, value)):
        return Reason.BIGRAM_TOKENS
    return _FIELD_REASONS.get(field.name, Reason.BAD_FIELD)


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2


# --- wire shapes to events ------------------------------------------------------------------------

_TIERS: Final = {
    "GPU": Tier.DEVICE,
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1"), Tier.HOST),
    **dict.fromkeys(("DISK", "STORAGE", "EXTERNAL"), Tier.DISK),
}
_ATTENTION_REASONS: Final = {reason.partition(":")[2]: reason for reason in Reason}
_U64: Final = 2**64 - 1
_SHA256_HEX: Final = re.compile("[0-9a-fA-F]{64}")
_NUM_ARRAY_FIELDS: Final = 11

_TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_Index = Annotated[int, Meta(ge=0)]


_E = TypeVar("_E")


class _BatchArray(Struct, Generic[_E], array_like=True):
    ts: float
    events: list[_E]
    rank: _Index | None = None


class _BatchMap(Struct, Generic[_E]):
    events: list[_E]
    ts: float = 0.0
    data_parallel_rank: _Index | None = None
    attn_dp_rank: _Index | None = None
    dp_rank: _Index | None = None

    @property
    def rank(self) -> int | None:
        named = (self.data_parallel_rank, self.attn_dp_rank, self.dp_rank)
        return next((rank for rank in named if rank is not None), None)


class _Stored(Struct, tag_field="type", tag="BlockStored", kw_only=True):
    # The order of vLLM's arrays, which only ever grew at the end.
    block_hashes: tuple[EngineHash, ...]
    parent_block_hash: int | None = None
    token_ids: tuple[_TokenId, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group_idx: _Index | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    # In maps only.
    cache_salt: str | None = None
    cxl_metadata: CxlMetadata | None = None
    moe: MoeLabel | None = None

    def event(self) -> events.BlockStored:
        _require_full_attention(self.kv_cache_spec_kind, self.kv_cache_spec_sliding_window)
        block_hashes = _engine_hashes(self.block_hashes)
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
            group=self.group_idx or 0,
            attention=self.kv_cache_spec_kind or "full_attention",
            sliding_window=self.kv_cache_spec_sliding_window,
            cxl=self.cxl_metadata,
            moe=self.moe,
        )

    def _require_aligned_tokens(self) -> None:
        if not self.token_ids:
            raise _SkipError(Reason.NO_TOKENS)
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise _SkipError(Reason.BAD_BLOCK_SIZE)
        if len(self.token_ids) != len(self.block_hashes) * self.block_size:
            raise _SkipError(Reason.TOKENS_MISALIGNED)

    def _salt(self, lora: str) -> str:
        """The salt that SGLang names, or the last bare string of vLLM's first block.

        vLLM 0.18 sent multimodal identifiers (64 hex digits) bare as well; what vLLM sends since
        0.20 has a `group_idx`.
        """
        if self.cache_salt is not None:
            return self.cache_salt
        if self.parent_block_hash is not None or not self.extra_keys:
            return ""
        bare = [key for key in self.extra_keys[0] or () if isinstance(key, str) and key != lora]
        if self.group_idx is None:
            bare = [key for key in bare if not _SHA256_HEX.fullmatch(key)]
        return bare[-1] if bare else ""

    def _extra_keys(self, lora: str, salt: str) -> tuple[tuple[int, ...], ...]:
        if not self.extra_keys or not any(self.extra_keys):
            return ()
        if len(self.extra_keys) != len(self.block_hashes):
            raise _SkipError(Reason.BAD_EXTRA_KEYS)
        first, *rest = self.extra_keys
        blocks = (_keys(first, (lora, salt)), *(_keys(entry, (lora,)) for entry in rest))
        return blocks if any(blocks) else ()


class _Removed(Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: tuple[EngineHash, ...]
    medium: str | None = None
    group_idx: _Index | None = None

    def event(self) -> events.BlockRemoved:
        hashes, group = _engine_hashes(self.block_hashes), self.group_idx or 0
        return events.BlockRemoved(block_hashes=hashes, tier=_tier(self.medium), group=group)


class _Cleared(Struct, tag_field="type", tag="AllBlocksCleared"):
    medium: str | None = None

    def event(self) -> events.AllBlocksCleared:
        return events.AllBlocksCleared(tier=None if self.medium is None else _tier(self.medium))


class _Transition(Struct, tag_field="type", tag="CxlStateTransition"):
    block_hashes: tuple[EngineHash, ...]
    new_state: CxlState
    pool_id: int | None = None
    accessible_workers: tuple[str, ...] | None = None
    medium: ClassVar[None] = None

    def event(self) -> events.CxlStateTransition:
        return events.CxlStateTransition(
            block_hashes=_engine_hashes(self.block_hashes),
            new_state=self.new_state,
            pool_id=self.pool_id,
            accessible_workers=self.accessible_workers,
        )


_Wire = _Stored | _Removed | _Cleared | _Transition
_SHAPES: Final[dict[str, type[_Wire]]] = {
    "BlockStored": _Stored,
    "BlockRemoved": _Removed,
    "AllBlocksCleared": _Cleared,
    "AllCacheCleared": _Cleared,
    "CxlStateTransition": _Transition,
}
_Batch = _BatchArray[_E] | _BatchMap[_E]
_ARRAY_OF_SHAPES: Final = msgspec.msgpack.Decoder(_BatchArray[_Wire])
_ARRAY_OF_ANY: Final = msgspec.msgpack.Decoder(_BatchArray[Raw])
_MAP_OF_SHAPES: Final = msgspec.msgpack.Decoder(_BatchMap[_Wire])
_MAP_OF_ANY: Final = msgspec.msgpack.Decoder(_BatchMap[Raw])
_EVENT: Final[msgspec.msgpack.Decoder[_Wire]] = msgspec.msgpack.Decoder(_Wire)
_ANYTHING: Final = msgspec.msgpack.Decoder()


def _require_full_attention(kind: str | None, window: int | None) -> None:
    kind = kind or ("full_attention" if window is None else "sliding_window")
    if "sliding" in kind or not ("full" in kind or "mla" in kind):
        raise _SkipError(_ATTENTION_REASONS.get(kind, Reason.UNKNOWN_ATTENTION))


def _engine_hashes(hashes: tuple[EngineHash, ...]) -> tuple[EngineHash, ...]:
    if not hashes:
        raise _SkipError(Reason.NO_BLOCKS)
    if min(hashes) >= 0:
        return hashes
    return tuple(EngineHash(number & _U64) for number in hashes)  # SGLang's are signed


def _tier(medium: str | None) -> Tier:
    return Tier.DEVICE if medium is None else _TIERS.get(medium.upper(), Tier.DISK)


def _keys(entry: tuple[Any, ...] | None, names: tuple[str, ...]) -> tuple[int, ...]:
    """The 64-bit keys of one block, without those that are names known from elsewhere."""
    return tuple(sorted(_key(key) for key in entry or () if key not in names))


def _key(key: object) -> int:
    match key:
        case str(text) | [str(text), int()]:  # a multimodal item may come with its offset
            if _SHA256_HEX.fullmatch(text):
                return int(text[:16], 16)
            return xxhash.xxh3_64_intdigest(text.encode())
        case bytes():  # the digest of prompt embeddings
            return xxhash.xxh3_64_intdigest(key)
    raise _SkipError(Reason.BAD_EXTRA_KEYS)


# --- events to wire shapes ------------------------------------------------------------------------

_MEDIA: Final = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "STORAGE"}


def _to_wire(event: events.Event) -> _Wire:
    match event:
        case events.BlockStored():
            return _stored_to_wire(event)
        case events.BlockRemoved(block_hashes=hashes, tier=tier, group=group):
            return _Removed(hashes, _MEDIA[tier], group)
        case events.AllBlocksCleared(tier=tier):
            return _Cleared(None if tier is None else _MEDIA[tier])
        case events.CxlStateTransition():
            return _Transition(
                event.block_hashes, event.new_state, event.pool_id, event.accessible_workers
            )


def _stored_to_wire(event: events.BlockStored) -> _Stored:
    lora, salt = msgspec.structs.astuple(event.namespace or Namespace())
    # The salt is named besides, as a bare string could be taken for the LoRA; and without it an
    # event with a parent would inherit.
    names_salt = salt or (event.namespace is not None and event.parent is not None)
    return _Stored(
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
    )


def _wire_keys(event: events.BlockStored, lora: str, salt: str) -> Iterator[tuple[Any, ...] | None]:
    """One entry per block, as vLLM makes them: LoRA, multimodal items, salt of the first block."""
    for i in range(len(event.block_hashes)):
        keys = event.extra_keys[i] if event.extra_keys else ()
        starts = i == 0 and event.parent is None
        identifiers = [(f"{key:016x}".ljust(64, "0"), 0) for key in keys]
        entry = (*filter(None, [lora]), *identifiers, *filter(None, [salt if starts else ""]))
        yield entry or None
