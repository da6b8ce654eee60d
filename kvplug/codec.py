"""Event bytes to `EventBatch` and back: the one place where events are decoded.

In:  one payload of an event stream.   Out: EventBatch.

Understood are vLLM 0.11 to 0.33 (events are arrays up to 0.23, maps since 0.24), SGLang 0.5,
LMCache, Dynamo, and kvplug's own additions (CXL, MoE); tests/vectors holds what each one sends, and
docs/events.md says what is used of it. A batch of maps with integer hashes becomes wire shapes in
one step; in any other batch each event is first brought into the form of such a map
(kvplug/dialects.py), so both ways end in the same types and checks. An event that cannot be used
is skipped and counted; only bytes that are no batch raise `DecodeError`.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from kvplug import events
from kvplug.dialects import as_map
from kvplug.errors import DecodeError
from kvplug.events import EventBatch
from kvplug.wire import (
    POOLED_MEDIA,
    SHAPES,
    TIERS,
    Index,
    Reason,
    SkipError,
    Wire,
    in_order_of_names,
    to_wire,
)

__all__ = ["MAX_BYTES", "Reason", "decode", "encode"]

MAX_BYTES: Final = 64 * 2**20


def decode(payload: bytes, *, max_bytes: int = MAX_BYTES) -> EventBatch:
    """Read one message of an event stream; DecodeError if it is no batch."""
    head = _open(payload, max_bytes)
    read: list[events.Event] = []
    skipped: Counter[str] = Counter()
    media: dict[str, None] = {}  # a dict, to keep the order
    for item in head.events:
        try:
            wire = _parse(item) if isinstance(item, Raw) else item
            read.append(wire.event())
        except SkipError as skip:
            skipped[skip.reason.value] += 1
            continue
        if wire.medium is not None:
            media[wire.medium] = None
    return EventBatch(
        events=tuple(in_order_of_names(read)),
        ts=head.ts or 0.0,
        dp_rank=head.rank,
        skipped=dict(skipped),
        unknown_media=tuple(medium for medium in media if medium.upper() not in TIERS),
        pooled_media=tuple(medium for medium in media if medium.upper() in POOLED_MEDIA),
    )


def encode(batch: EventBatch) -> bytes:
    """Write a batch as vLLM 0.32 does. `decode` gives it back, except that

    * `skipped`, the media, and events that `decode` skips are lost;
    * a BlockStored without tokens comes back as BlockCopied, and one of a group that keeps a part
      of a prefix comes behind the event that says what it copies;
    * a BlockStored with neither parent nor namespace gets Namespace();
    * the extra keys of a block come back sorted, and () if no block has any.

    vLLM's own decoder ignores what it has no field for (`cache_salt`, `cxl_metadata`, `moe`, the
    medium of a clear, `bigrams`), but refuses a batch with a CxlStateTransition.
    """
    wires = [to_wire(event) for event in batch.events]
    return msgspec.msgpack.encode((batch.ts, wires, batch.dp_rank))


_E = TypeVar("_E")


class _BatchArray(Struct, Generic[_E], array_like=True):
    ts: float | None
    events: list[_E]
    rank: Index | None = None


class _BatchMap(Struct, Generic[_E]):
    events: list[_E]
    ts: float | None = 0.0
    data_parallel_rank: Index | None = None
    attn_dp_rank: Index | None = None
    dp_rank: Index | None = None

    @property
    def rank(self) -> int | None:
        named = (self.data_parallel_rank, self.attn_dp_rank, self.dp_rank)
        return next((rank for rank in named if rank is not None), None)


_Batch = _BatchArray[_E] | _BatchMap[_E]
_ARRAY_OF_SHAPES: Final = msgspec.msgpack.Decoder(_BatchArray[Wire])
_ARRAY_OF_ANY: Final = msgspec.msgpack.Decoder(_BatchArray[Raw])
_MAP_OF_SHAPES: Final = msgspec.msgpack.Decoder(_BatchMap[Wire])
_MAP_OF_ANY: Final = msgspec.msgpack.Decoder(_BatchMap[Raw])
_EVENT: Final[msgspec.msgpack.Decoder[Wire]] = msgspec.msgpack.Decoder(Wire)
_ANYTHING: Final = msgspec.msgpack.Decoder()


# msgspec lets all of these out of bytes that are not valid; TypeError (a map as a key) up to 0.19.
_MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError)
_MAP_OPCODES: Final = (*range(0x80, 0x90), 0xDE, 0xDF)
# Asked for each time, they would cost a misfit 0.3 ms: msgspec evaluates the annotations anew.
_FIELDS_OF: Final = {shape: msgspec.structs.fields(shape) for shape in SHAPES.values()}
_FIELD_REASONS: Final = {
    "block_hashes": Reason.BAD_HASH,
    "parent_block_hash": Reason.BAD_HASH,
    "token_ids": Reason.BAD_TOKEN_ID,
    "block_size": Reason.BAD_BLOCK_SIZE,
    "extra_keys": Reason.BAD_EXTRA_KEYS,
    "block_mm_infos": Reason.BAD_EXTRA_KEYS,
}


def _open(payload: bytes, max_bytes: int) -> _Batch[Wire] | _Batch[Raw]:
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


def _parse(raw: Raw) -> Wire:
    try:
        return _EVENT.decode(raw)
    except _MALFORMED:
        return _parse_tolerantly(raw)


def _parse_tolerantly(raw: Raw) -> Wire:
    """Bring an array, or a map in another dialect, into the form of a wire shape."""
    try:
        event = _ANYTHING.decode(raw)
    except _MALFORMED:
        raise SkipError(Reason.NOT_AN_EVENT) from None
    shape, fields = as_map(event)
    try:
        return msgspec.convert(fields, shape)
    except msgspec.ValidationError:
        raise SkipError(_misfit(shape, fields)) from None


def _misfit(shape: type[Wire], fields: dict[str, Any]) -> Reason:
    """The reason that goes with the first field that does not fit its shape."""
    for field in _FIELDS_OF[shape]:
        try:
            if field.required or field.name in fields:
                msgspec.convert(fields[field.name], field.type)
        except KeyError:
            return Reason.MISSING_FIELD
        except msgspec.ValidationError:
            break
    return _FIELD_REASONS.get(field.name, Reason.BAD_FIELD)
