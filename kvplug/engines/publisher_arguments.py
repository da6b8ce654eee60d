"""Arguments of a KvEventPublisher as its events have them, or the reason why they cannot be.

In:  what a caller passes: lists, arrays, numbers of NumPy, names.
Out: whole numbers, texts and types of kvplug/events.py; ConfigError in one sentence.

No token id is ever named: it is part of a prompt.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from kvplug.errors import ConfigError
from kvplug.events import (
    MAX_BLOCK_SIZE,
    CxlMetadata,
    CxlState,
    EngineHash,
    MoeLabel,
    Rank,
    Tier,
)
from kvplug.setting import shown
from kvplug.wire import TIERS

MAX_ID: Final = 2**63
"""Event ids, pools and experts are below it."""

_U64: Final = 2**64
_TIERS: Final = {**{tier.name.lower(): tier for tier in Tier}, **TIERS}
# An array would take these as raw memory, or in no order.
_NO_ROW: Final = str, bytes, bytearray, memoryview, set, frozenset, Mapping


def whole_number(said: object, what: str, limit: int = MAX_ID) -> int:
    """In [0, limit)."""
    try:
        number = operator.index(said)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < limit:
        exponent = limit.bit_length() - 1
        raise ConfigError(f"{what} must be a whole number in [0, 2**{exponent}), got {shown(said)}")
    return number


def text(said: object, what: str) -> str:
    """Unicode, as it is hashed."""
    if not isinstance(said, str):
        raise ConfigError(f"{what} must be a str, got {shown(said)}")
    try:
        said.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what} must be Unicode text, got {said!a}") from None
    return str(said)


def event_id_of(said: object) -> int:
    """An id that a caller chose."""
    if not hasattr(said, "__index__") or hasattr(said, "__len__"):
        raise ConfigError(
            f"event_id must be a whole number, got {type(said).__name__}: it is the first "
            "parameter, so name the others, as in block_hashes=..., or give None for it"
        )
    return whole_number(said, "event_id")


def block_size_of(said: object) -> int:
    """Tokens per block."""
    try:
        size = operator.index(said)  # type: ignore[arg-type]
    except TypeError:
        size = 0
    if not 1 <= size <= MAX_BLOCK_SIZE:
        raise ConfigError(f"kv_block_size must be in [1, {MAX_BLOCK_SIZE}], got {shown(said)}")
    return size


def block_ids(said: Sequence[int]) -> tuple[EngineHash, ...]:
    """Of one block at least."""
    names = tuple(block_id(each) for each in row(said, "block_hashes"))
    if not names:
        raise ConfigError("cannot publish an event of no blocks: expected ids in block_hashes")
    return names


def block_id(said: object) -> EngineHash:
    """Unsigned; engines that count in i64 are folded."""
    try:
        number = operator.index(said)  # type: ignore[arg-type]
    except TypeError:
        number = _U64
    if not -(2**63) <= number < _U64:
        raise ConfigError(f"a block id must be a 64-bit integer, signed or not, got {shown(said)}")
    return EngineHash(number % _U64)


def token_ids_of(said: Iterable[int]) -> tuple[int, ...]:
    """In [0, 2**32)."""
    try:
        if not isinstance(said, _NO_ROW):
            return tuple(array("I", said))  # which checks as it converts
    except (TypeError, ValueError, OverflowError):
        pass
    # `from None` and without values: a token id is part of a prompt.
    raise ConfigError("token ids must be in [0, 2**32), whole numbers in a row, in token_ids")


def row(said: Iterable[object], what: str) -> tuple[object, ...]:
    """What comes in an order."""
    if isinstance(said, _NO_ROW) or not hasattr(said, "__iter__"):
        raise ConfigError(f"{what} must be a sequence, got {type(said).__name__}")
    try:
        return tuple(said)
    except TypeError:  # an array without dimensions
        raise ConfigError(f"{what} must be a sequence, got {type(said).__name__}") from None


def extra_keys_of(said: Iterable[Iterable[int]], num_blocks: int) -> tuple[tuple[int, ...], ...]:
    """Of each block, or of the first ones."""
    keys = row(said, "extra_keys")
    if len(keys) > num_blocks:
        raise ConfigError(f"cannot use extra_keys of {len(keys)} blocks for {num_blocks} blocks")
    return tuple(
        tuple(whole_number(key, "a key of extra_keys", _U64) for key in row(each, "extra_keys"))  # type: ignore[arg-type]
        for each in keys
    )


def tier_of(said: object) -> Tier:
    """By itself, its name, or a medium of vLLM."""
    if isinstance(said, Tier):
        return said
    name = said if isinstance(said, str) else ""
    found = _TIERS.get(name.lower(), _TIERS.get(name.upper()))
    if found is None:
        raise ConfigError(f"tier must be one of {', '.join(sorted(_TIERS))}, got {shown(said)}")
    return found


def state_of(said: object, what: str = "new_state") -> CxlState:
    """By itself or its value."""
    try:
        return CxlState(said)  # type: ignore[arg-type]
    except ValueError:
        expected = ", ".join(CxlState)
        raise ConfigError(f"{what} must be one of {expected}, got {shown(said)}") from None


def pool_of(said: object) -> int | None:
    """None is the pool of before."""
    return None if said is None else whole_number(said, "pool_id")


def workers_of(said: object) -> tuple[str, ...] | None:
    """Their names; ranks and whole numbers are written out. None are those of before."""
    if said is None:
        return None
    return tuple(map(_worker, row(said, "accessible_workers")))  # type: ignore[arg-type]


def _worker(said: object) -> str:
    what = "a worker of accessible_workers"
    if isinstance(said, str | Rank):
        return text(str(said), what)
    return str(whole_number(said, what, _U64))


def cxl_of(said: object) -> CxlMetadata | None:
    """CXL metadata, or a dict of its fields."""
    if said is None:
        return None
    known = msgspec.structs.asdict(said) if isinstance(said, CxlMetadata) else said
    fields = CxlMetadata.__struct_fields__
    if not isinstance(known, Mapping) or not set(known) <= set(fields):
        raise ConfigError(
            f"cannot use cxl_metadata: expected {', '.join(fields)} or some of them, got "
            f"{shown(said)}"
        )
    return CxlMetadata(
        state_of(known.get("state", CxlState.LOCAL_GPU), "state of cxl_metadata"),
        pool_of(known.get("pool_id")),
        workers_of(known.get("accessible_workers")),
    )


def moe_of(said: object) -> MoeLabel | None:
    """The label with plain numbers."""
    if said is None:
        return None
    if not isinstance(said, MoeLabel):
        raise ConfigError(f"moe must be a MoeLabel, got {shown(said)}")
    numbers = msgspec.structs.asdict(said)
    return MoeLabel(**{name: whole_number(each, f"moe {name}") for name, each in numbers.items()})
