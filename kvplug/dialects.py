"""How engines write an event, brought into one form: a map with the names of a wire shape.

In:  one event as msgpack values.   Out: its shape, and what it says of the shape's fields.

    vLLM up to 0.23         an array; the order of its fields is the shape's
    SGLang 0.5.18           an array of vLLM's first fields, then a map with the cache salt
    Dynamo 1.2              vLLM's array with `block_mm_infos` before the cache group
    SGLang with EAGLE       pairs of tokens instead of tokens
    vLLM, LMCache           digests instead of 64-bit hashes, where they are told to

Nothing is checked here beyond what is needed to tell the dialects apart; the shape does that.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

from kvplug.wire import SHAPES, Reason, SkipError, Stored, Wire

# The fields of vLLM's last array; what came later is in maps only.
_NUM_ARRAY_FIELDS: Final = 11
# Where SGLang has its map, and where Dynamo 1.2 has `block_mm_infos`; the type is not counted.
_METADATA_AT: Final = 6
_MM_INFOS_AT: Final = 8
_METADATA_FIELDS: Final = ("cache_salt", "lora_name")
# Shorter bytes are no digest, and longer ones are in use nowhere.
_MIN_DIGEST_BYTES: Final = 8
_MAX_DIGEST_BYTES: Final = 64


def as_map(event: Any) -> tuple[type[Wire], dict[str, Any]]:  # noqa: ANN401 - any msgpack
    """The event's shape and its fields by name; SkipError for what is no event or misaligned."""
    shape, fields = _named_fields(event)
    for name in ("block_hashes", "parent_block_hash"):
        if name in fields:
            fields[name] = _without_digests(fields[name])
    if _is_bigram(fields.get("token_ids")):
        fields |= {"token_ids": _without_pairs(fields["token_ids"]), "bigrams": True}
    return shape, fields


def _named_fields(event: Any) -> tuple[type[Wire], dict[str, Any]]:  # noqa: ANN401
    match event:
        case {"type": str(tag)} | [str(tag), *_]:
            shape = SHAPES.get(tag)
        case _:
            raise SkipError(Reason.NOT_AN_EVENT)
    if shape is None:
        raise SkipError(Reason.UNKNOWN_TYPE)
    names = shape.__struct_fields__
    if isinstance(event, list):
        return shape, _by_position(shape, names[:_NUM_ARRAY_FIELDS], event[1:])
    return shape, {name: event[name] for name in names if name in event}


def _by_position(shape: type[Wire], names: tuple[str, ...], values: list[Any]) -> dict[str, Any]:
    if shape is not Stored:
        return dict(zip(names, values, strict=False))
    more: dict[str, Any] = {}
    if _has_mm_infos(values[_MM_INFOS_AT:]):
        more["block_mm_infos"] = values[_MM_INFOS_AT]
        values = values[:_MM_INFOS_AT] + values[_MM_INFOS_AT + 1 :]
    metadata = _at(values, _METADATA_AT)
    if isinstance(metadata, dict):
        more |= {name: metadata.get(name) for name in _METADATA_FIELDS}
    return dict(zip(names, values, strict=False)) | more


def _has_mm_infos(tail: list[Any]) -> bool:
    """Whether group, kind and window come one place later than vLLM has them.

    vLLM's group is a number or nil and its kind a string or nil, so a list, or a number where the
    kind belongs, tells.
    """
    if isinstance(_at(tail, 0), list) and tail[0]:
        return True
    return _at(tail, 0) is None and (isinstance(_at(tail, 1), int) or isinstance(_at(tail, 2), str))


def _at(values: list[Any], position: int) -> Any:  # noqa: ANN401 - whatever was sent
    return values[position] if position < len(values) else None


def _without_digests(value: object) -> object:
    """Replace each digest by the integer that vLLM would publish for it: its low 64 bits."""
    if isinstance(value, list):
        return [_low_64_bits(item) for item in value]
    return _low_64_bits(value)


def _low_64_bits(value: object) -> object:
    if isinstance(value, bytes) and _MIN_DIGEST_BYTES <= len(value) <= _MAX_DIGEST_BYTES:
        return int.from_bytes(value[-8:], "big")
    return value


def _is_bigram(token_ids: object) -> bool:
    return isinstance(token_ids, list) and bool(token_ids) and all(map(_is_pair, token_ids))


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2


def _without_pairs(pairs: list[list[Any]]) -> list[Any]:
    """[[1, 2], [2, 3]] -> [1, 2, 3]; pairs that do not overlap are of no one sequence."""
    if any(before[1] != after[0] for before, after in pairwise(pairs)):
        raise SkipError(Reason.TOKENS_MISALIGNED)
    return [*(first for first, _ in pairs), pairs[-1][1]]
