"""Packed events: blocks that are hashed already, as arrays on the wire.

In:  engine hashes and sequence hashes.   Out: msgpack bytes that BlockIndex.apply_packed reads;
and back.

    [version, event, ...]
    stored      [0, tier, parent, seed, engine_hashes, hashes]  or with a map of details behind it
    removed     [1, tier, engine_hashes]                        or with a group behind it
    cleared     [2, tier]                                       tier nil: everything
    copied      [3, tier, engine_hashes, details]               of content that was stored before
    transition  [4, state, pool_id, accessible_workers, engine_hashes]
    adapter     [5, seed, lora_name]                            the seed is of this LoRA adapter

`engine_hashes` (engine hashes) and `hashes` (sequence hashes) are byte strings of little-endian
u64, one per block. `parent` is the engine hash before the first block, nil at the start of a
sequence. `seed` is hashing.seed_of the namespace; a continuation's is its parent's, whatever it
says. `details`: group, attention and sliding_window of a KV cache group, block_size and bigrams
where they are not those of the stream, cxl and moe; what is left out has its default. A reader
refuses another version by name, and passes over details that it does not know. No tokens, names of
salts or keys are on this wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvplug.errors import DecodeError
from kvplug.events import CxlMetadata, CxlState, EngineHash, MoeLabel, Tier

U64 = npt.NDArray[np.uint64]
U64Like = U64 | Sequence[int]

VERSION = 2
STORED, REMOVED, CLEARED, COPIED, TRANSITION, ADAPTER = range(6)
_BASE_SEED = 1337  # kvplug/hashing.py: of tokens without LoRA and salt
_FULL_ATTENTION = "full_attention"


@dataclass(frozen=True, slots=True)
class PackedStored:
    """A run of consecutive blocks: what the engine calls them, and their sequence hashes.

    Each brings a copy, as each PackedRemoved takes one. The rest is as of events.BlockStored;
    block_size and bigrams are None where they are those of the index.
    """

    engine_hashes: U64Like
    hashes: U64Like
    parent: EngineHash | int | None = None
    tier: Tier = Tier.DEVICE
    seed: int = _BASE_SEED
    group: int = 0
    attention: str = _FULL_ATTENTION
    sliding_window: int | None = None
    block_size: int | None = None
    bigrams: bool | None = None
    cxl: CxlMetadata | None = None
    moe: MoeLabel | None = None


@dataclass(frozen=True, slots=True)
class PackedRemoved:
    """One copy of each of these blocks is gone."""

    engine_hashes: U64Like
    tier: Tier = Tier.DEVICE
    group: int = 0


@dataclass(frozen=True, slots=True)
class PackedCleared:
    """The rank holds nothing any more; only in one tier, if it names one."""

    tier: Tier | None = None


@dataclass(frozen=True, slots=True)
class PackedCopied:
    """As events.BlockCopied."""

    engine_hashes: U64Like
    tier: Tier = Tier.DEVICE
    group: int = 0
    attention: str = _FULL_ATTENTION
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class PackedTransition:
    """As events.CxlStateTransition."""

    engine_hashes: U64Like
    new_state: CxlState
    pool_id: int | None = None
    accessible_workers: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """Blocks with this seed are of this LoRA adapter; said once, before the first of them."""

    seed: int
    lora_name: str


PackedEvent = (
    PackedStored | PackedRemoved | PackedCleared | PackedCopied | PackedTransition | PackedAdapter
)


class _Details(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is said of a few blocks only. The limits are those of kvplug/wire.py."""

    group: int = 0
    attention: str = _FULL_ATTENTION
    sliding_window: int | None = None
    block_size: int | None = None
    bigrams: bool | None = None
    cxl: CxlMetadata | None = None
    moe: MoeLabel | None = None


_NO_DETAILS = _Details()
_MAX_GROUP = 2**16
_MAX_JOINED_BYTES, _MAX_JOINED_EVENTS = 2**18, 2**12  # as messages have them
_MAX_WORKERS = 1024  # that can read a pool
_VERSION_BYTE = bytes([VERSION])


def encode(events: Iterable[PackedEvent]) -> bytes:
    """One payload with these events."""
    return msgspec.msgpack.encode([VERSION, *map(as_array, events)])


def num_events(payload: bytes) -> int:
    """How many events a payload has, sound or not; DecodeError for what is no payload of ours."""
    return len(_items_of(payload, list[msgspec.Raw])) - 1


def num_claimed(payload: bytes) -> int:
    """How many events the head of a payload claims; -1 for a head that `encode` does not write."""
    return _head_of(payload)[0] - 1


def kinds_of(payload: bytes) -> list[int]:
    """The kind of each event, -1 for what is none; DecodeError for what is no payload of ours."""
    # The first byte of an event says how many parts it has, the second one what it is.
    return [_kind_of(bytes(event)) for event in _items_of(payload, list[msgspec.Raw])[1:]]


def joined(payloads: Sequence[bytes]) -> tuple[bytes, int]:
    """One payload with the events of the first ones, and of how many payloads: at least one, and no
    more when it would be long, or when one has a head that `encode` does not write.
    """
    num_events = num_bytes = 0
    bodies: list[bytes] = []
    for payload in payloads:
        num_items, start = _head_of(payload)
        num_bytes += len(payload)
        is_full = num_bytes > _MAX_JOINED_BYTES or num_events + num_items > _MAX_JOINED_EVENTS
        if num_items < 1 or (bodies and is_full):
            break
        num_events += num_items - 1
        bodies.append(payload[start:])
    if len(bodies) < 2:
        return payloads[0], 1
    head = b"\xdd" + (num_events + 1).to_bytes(4, "big") + _VERSION_BYTE
    return b"".join((head, *bodies)), len(bodies)


def _head_of(payload: bytes) -> tuple[int, int]:
    """(items of the array, position behind the version); 0, 0 for another head."""
    first, width = payload[:1], 0
    if b"\x91" <= first <= b"\x9f":
        num_items = first[0] & 0xF
    else:
        width = {b"\xdc": 2, b"\xdd": 4}.get(first, 0)
        num_items = int.from_bytes(payload[1 : 1 + width], "big")
    start = 1 + width
    return (num_items, start + 1) if payload[start : start + 1] == _VERSION_BYTE else (0, 0)


def decode(payload: bytes) -> list[PackedEvent]:
    """The events of a payload; DecodeError if it is none."""
    try:
        return [_from_array(event) for event in _items_of(payload)[1:]]
    except (TypeError, ValueError, OverflowError) as error:
        raise DecodeError(f"cannot read packed events: {error}") from error


def as_array(event: PackedEvent) -> list[object]:
    """The event as it is in a payload, to be encoded."""
    match event:
        case PackedStored():
            engine_hashes, hashes = _as_bytes(event.engine_hashes), _as_bytes(event.hashes)
            head: list[object] = [STORED, int(event.tier), event.parent, event.seed]
            plain = [*head, engine_hashes, hashes]
            details = _details_of(event)
            return plain if details == _NO_DETAILS else [*plain, details]
        case PackedRemoved():
            removed = [REMOVED, int(event.tier), _as_bytes(event.engine_hashes)]
            return [*removed, event.group] if event.group else [*removed]
        case PackedCleared():
            return [CLEARED, None if event.tier is None else int(event.tier)]
        case PackedCopied(engine_hashes, tier, group, attention, window):
            details = _Details(group, attention, window)
            return [COPIED, int(tier), _as_bytes(engine_hashes), details]
        case PackedTransition(engine_hashes, state, pool_id, workers):
            return [TRANSITION, state.value, pool_id, workers, _as_bytes(engine_hashes)]
        case PackedAdapter(seed, lora_name):
            return [ADAPTER, seed, lora_name]


def _kind_of(event: bytes) -> int:
    return event[1] if len(event) > 1 and 0x92 <= event[0] <= 0x97 else -1


def _items_of(payload: bytes, kind: Any = Any) -> list[Any]:  # noqa: ANN401 - a type
    try:
        items = msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, TypeError, BufferError, RecursionError) as error:
        raise DecodeError(f"cannot read packed events: {error}") from error
    if not isinstance(items, list) or not items:
        raise DecodeError(f"cannot read packed events: expected an array, got {items!r:.40}")
    version = items[0]
    if isinstance(version, msgspec.Raw):
        version = msgspec.msgpack.decode(version)
    if version != VERSION:
        raise DecodeError(
            f"cannot read packed events: expected version {VERSION}, got {version!r:.40}"
        )
    return items


def _from_array(items: object) -> PackedEvent:
    match items:
        case [0, int(tier), (int() | None) as parent, int(seed), bytes(names), bytes(hashes)]:
            return _stored(tier, parent, seed, (names, hashes), _NO_DETAILS)
        case [
            0,
            int(tier),
            (int() | None) as parent,
            int(seed),
            bytes(names),
            bytes(hashes),
            dict(details),
        ]:
            return _stored(tier, parent, seed, (names, hashes), _as_details(details))
        case [1, int(tier), bytes(names)]:
            return PackedRemoved(_as_numbers(names), Tier(tier))
        case [1, int(tier), bytes(names), int(group)]:
            return PackedRemoved(_as_numbers(names), Tier(tier), _as_group(group))
        case [2, (int() | None) as tier]:
            return PackedCleared(None if tier is None else Tier(tier))
        case [kind, *values] if kind in _RARE:
            return _RARE[kind](*values)
    raise ValueError("expected an event of a kind and form that this version has")


def _stored(
    tier: int, parent: int | None, seed: int, words: tuple[bytes, bytes], details: _Details
) -> PackedStored:
    names, hashes = map(_as_numbers, words)
    at = _as_u64(parent), Tier(tier), _as_u64(seed) or 0
    return PackedStored(names, hashes, *at, **msgspec.structs.asdict(details))


def _copied(tier: int, names: bytes, details: dict[str, object]) -> PackedCopied:
    said = _as_details(details)
    kind = said.group, said.attention, said.sliding_window
    return PackedCopied(_as_numbers(names), Tier(tier), *kind)


def _transition(state: str, pool_id: object, workers: object, names: bytes) -> PackedTransition:
    said = _as_place(CxlMetadata(CxlState(state), *msgspec.convert((pool_id, workers), _Place)))
    return PackedTransition(_as_numbers(names), said.state, said.pool_id, said.accessible_workers)


def _adapter(seed: int, lora_name: str) -> PackedAdapter:
    return PackedAdapter(_as_u64(msgspec.convert(seed, int)) or 0, msgspec.convert(lora_name, str))


_Place = tuple[int | None, tuple[str, ...] | None]
_RARE: Final[dict[object, Callable[..., PackedEvent]]] = {
    COPIED: _copied,
    TRANSITION: _transition,
    ADAPTER: _adapter,
}


def _as_details(details: dict[str, object]) -> _Details:
    said = msgspec.convert(details, _Details)
    _as_group(said.group)
    if said.cxl is not None:
        _as_place(said.cxl)
    return said


def _as_place(place: CxlMetadata) -> CxlMetadata:
    if len(place.accessible_workers or ()) > _MAX_WORKERS:
        got = len(place.accessible_workers or ())
        raise ValueError(f"expected at most {_MAX_WORKERS} workers that read a pool, got {got}")
    return place


def _as_group(group: int) -> int:
    if not 0 <= group < _MAX_GROUP:
        raise ValueError(f"expected a group in [0, {_MAX_GROUP}), got {group}")
    return group


def _details_of(event: PackedStored) -> _Details:
    names = _Details.__struct_fields__
    return _Details(**{name: getattr(event, name) for name in names})


def _as_u64(number: int | None) -> int | None:
    if number is not None and not 0 <= number < 2**64:
        raise ValueError(f"expected an integer in [0, 2**64), got {number}")
    return number


def _as_numbers(words: bytes) -> U64:
    return np.frombuffer(words, dtype="<u8")


def _as_bytes(numbers: U64Like) -> bytes:
    return np.asarray(numbers, dtype="<u8").tobytes()
