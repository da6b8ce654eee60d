"""Packed events: blocks that are hashed already, as arrays on the wire.

In:  engine hashes and sequence hashes.   Out: msgpack bytes that BlockIndex.apply_packed reads;
and back.

    [version, event, ...]
    stored   [0, tier, parent, seed, engine_hashes, hashes]
    removed  [1, tier, engine_hashes]
    cleared  [2, tier]                                tier nil: everything

`engine_hashes` (engine hashes) and `hashes` (sequence hashes) are byte strings of little-endian
u64, one per block. `parent` is the engine hash before the first block, nil at the start of a
sequence. `seed` is hashing.seed_of the namespace; a continuation's is its parent's, whatever it
says. A reader refuses another version by name. No tokens are on this wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvplug.errors import DecodeError
from kvplug.events import EngineHash, Tier

U64 = npt.NDArray[np.uint64]
U64Like = U64 | Sequence[int]

VERSION = 1
STORED, REMOVED, CLEARED = 0, 1, 2
_BASE_SEED = 1337  # kvplug/hashing.py: of tokens without LoRA and salt


@dataclass(frozen=True, slots=True)
class PackedStored:
    """A run of consecutive blocks: what the engine calls them, and their sequence hashes.

    Each brings a copy, as each PackedRemoved takes one.
    """

    engine_hashes: U64Like
    hashes: U64Like
    parent: EngineHash | int | None = None
    tier: Tier = Tier.DEVICE
    seed: int = _BASE_SEED


@dataclass(frozen=True, slots=True)
class PackedRemoved:
    """One copy of each of these blocks is gone."""

    engine_hashes: U64Like
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class PackedCleared:
    """The rank holds nothing any more; only in one tier, if it names one."""

    tier: Tier | None = None


PackedEvent = PackedStored | PackedRemoved | PackedCleared


def encode(events: Iterable[PackedEvent]) -> bytes:
    """One payload with these events."""
    return msgspec.msgpack.encode([VERSION, *map(_as_array, events)])


def num_events(payload: bytes) -> int:
    """How many events a payload has; DecodeError for what is no payload of ours."""
    return len(_items_of(payload)) - 1


def decode(payload: bytes) -> list[PackedEvent]:
    """The events of a payload; DecodeError if it is none."""
    try:
        return [_from_array(event) for event in _items_of(payload)[1:]]
    except (TypeError, ValueError, OverflowError) as error:
        raise DecodeError(f"cannot read packed events: {error}") from error


def _items_of(payload: bytes) -> list[Any]:
    try:
        items = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, TypeError, BufferError) as error:
        raise DecodeError(f"cannot read packed events: {error}") from error
    if not isinstance(items, list) or not items:
        raise DecodeError(f"cannot read packed events: expected an array, got {items!r:.40}")
    if items[0] != VERSION:
        raise DecodeError(
            f"cannot read packed events: expected version {VERSION}, got {items[0]!r:.40}"
        )
    return items


def _from_array(items: object) -> PackedEvent:
    match items:
        case [
            0,
            int(tier),
            (int() | None) as parent,
            int(seed),
            bytes(engine_hashes),
            bytes(hashes),
        ]:
            pair = _as_numbers(engine_hashes), _as_numbers(hashes)
            return PackedStored(*pair, _as_u64(parent), Tier(tier), _as_u64(seed) or 0)
        case [1, int(tier), bytes(engine_hashes)]:
            return PackedRemoved(_as_numbers(engine_hashes), Tier(tier))
        case [2, (int() | None) as tier]:
            return PackedCleared(None if tier is None else Tier(tier))
    raise ValueError("expected a stored, removed or cleared event")


def _as_u64(number: int | None) -> int | None:
    if number is not None and not 0 <= number < 2**64:
        raise ValueError(f"expected an integer in [0, 2**64), got {number}")
    return number


def _as_numbers(words: bytes) -> U64:
    return np.frombuffer(words, dtype="<u8")


def _as_array(event: PackedEvent) -> list[object]:
    match event:
        case PackedStored():
            engine_hashes, hashes = _as_bytes(event.engine_hashes), _as_bytes(event.hashes)
            return [STORED, int(event.tier), event.parent, event.seed, engine_hashes, hashes]
        case PackedRemoved():
            return [REMOVED, int(event.tier), _as_bytes(event.engine_hashes)]
        case PackedCleared():
            return [CLEARED, None if event.tier is None else int(event.tier)]


def _as_bytes(numbers: U64Like) -> bytes:
    return np.asarray(numbers, dtype="<u8").tobytes()
