"""The messages of kvplug's own event stream: one form for every transport.

In:  a life of a publisher, numbers, packed events, what the publisher says of its engine.
Out: msgpack bytes, and back; a ProtocolError with its reason for what is none (docs/protocol.md).

    ["kvplug", major, minor, kind, life, number, ...]

    hello     [..., "hello", life, next, sent_at, {about}]          every 2 s, and to each newcomer
    events    [..., "events", life, number, sent_at, packed]
    resident  [..., "resident", life, next, part, num_parts, packed]
    end       [..., "end", life, next]                              of an answer
    ask       [..., "ask", life, next]                              from a follower

A *life* is 64 random bits for as long as a publisher's numbers mean something: of each start of its
process, and of each time that it could not keep its numbers. Events are numbered from 0 in a life;
`next` is the number of the next one. `packed` is a payload of kvplug/packed.py.

A follower asks with the last life that it knows and the number that it needs (0, 0 for a newcomer).
The answer is a hello, then either the events from that number on or the resident set, which is all
that the engine holds before number `next`, parents first, and then an end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import Struct

from kvplug.errors import DecodeError

MAGIC: Final = "kvplug"
MAJOR: Final = 1
MINOR: Final = 0
HASH_SCHEME: Final = "xxh3-64"
"""How `hashes` are computed: kvplug/hashing.py."""

HEARTBEAT_S: Final = 2.0
"""Between two hellos of a publisher."""

MAX_MESSAGE_BYTES: Final = 2**20
"""What is longer is refused unread; a publisher divides what it says far below that."""

MAX_PACKED_BYTES: Final = 2**18
"""Of the events of one message, and of one part of a resident set."""

MAX_EVENTS: Final = 2**12
"""Of one message: those that are not plain are applied one by one."""

MAX_PARTS: Final = 2**12
"""Of a resident set: 64 million blocks."""

_U64: Final = 2**64
_MAX_NUMBER: Final = 2**63
_OURS: Final = msgspec.msgpack.encode(MAGIC)


class ProtocolError(DecodeError):
    """A message of the stream cannot be used; `reason` is fit for a metric label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class GroupAbout(Struct, frozen=True, kw_only=True):
    """A KV cache group of the model, as kvplug.events.BlockStored has it."""

    group: int = 0
    attention: str = "full_attention"
    sliding_window: int | None = None


class WorkerHello(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a publisher says of its engine; "" , None and () are what it does not know.

    block_size: tokens per block; bigrams: blocks are keyed by pairs of tokens; hash_scheme: of the
    sequence hashes; hash_space: ranks with the same one give equal blocks equal engine hashes;
    tokenizer: the first 16 hex digits of the SHA-256 of tokenizer.json; capacity_blocks: on the
    device; dp_rank, dp_size: of data-parallel ranks; url: of the engine's API, in which a
    host of all addresses (0.0.0.0) stands for the one that the stream came from; topology: names of
    what it is part of ({"zone": "a"}); cxl_pools: that it can read; answers_at: the endpoint that
    takes asks, with `*` for the host if it is bound to all addresses; defects: by reason, how much
    the publisher could not use since the cache was last empty, so that blocks are missing;
    hides_states: whether the model has windows or states of which the engine says nothing;
    names_extra_keys: whether blocks of requests with an extra_key have a namespace of their own.
    """

    engine: str = ""
    engine_version: str = ""
    kvplug_version: str = ""
    model: str = ""
    block_size: int | None = None
    bigrams: bool = False
    hash_scheme: str = HASH_SCHEME
    hash_space: str = ""
    tokenizer: str = ""
    capacity_blocks: int | None = None
    dp_rank: int = 0
    dp_size: int = 1
    groups: tuple[GroupAbout, ...] = ()
    url: str = ""
    topology: dict[str, str] = {}
    cxl_pools: tuple[int, ...] = ()
    answers_at: str | None = None
    defects: dict[str, int] = {}
    hides_states: bool = False
    names_extra_keys: bool = False


class Hello(Struct, frozen=True):
    """A sign of life: `next` is the number of the next events. `sent_at` is Unix time."""

    life: int
    next: int
    sent_at: float
    about: WorkerHello


class Events(Struct, frozen=True, gc=False):
    """Events in order, number `number` of this life."""

    life: int
    number: int
    sent_at: float
    packed: bytes


class Resident(Struct, frozen=True, gc=False):
    """Part `part` of `num_parts` of all that the engine holds before number `next`."""

    life: int
    next: int
    part: int
    num_parts: int
    packed: bytes


class End(Struct, frozen=True):
    """The answer is complete; `next` is the number of the first events that are not in it."""

    life: int
    next: int


class Ask(Struct, frozen=True):
    """A follower needs the events from number `next` of this life on, or all; 0, 0: it knows
    nothing.
    """

    life: int
    next: int


ProtocolMessage = Hello | Events | Resident | End | Ask
_KINDS: Final[dict[str, type[ProtocolMessage]]] = {
    "hello": Hello,
    "events": Events,
    "resident": Resident,
    "end": End,
    "ask": Ask,
}
_KIND_OF: Final = {kind: name for name, kind in _KINDS.items()}


class _Head(Struct, array_like=True, frozen=True):
    """Of any major version; what is behind `major` may be anything in another one."""

    magic: str
    major: int
    minor: Any = 0
    kind: Any = ""


def _as_array(kind: type[ProtocolMessage]) -> type[Struct]:
    """The message behind its head; what a newer minor version has behind that is passed over."""
    fields = [(field.name, field.type) for field in msgspec.structs.fields(kind)]
    head = [(field.name, field.type) for field in msgspec.structs.fields(_Head)]
    return msgspec.defstruct(f"_{kind.__name__}", [*head, *fields], array_like=True, gc=False)


# Behind the head of an array of eight parts; a newer minor version goes the general way.
_EVENTS: Final = b"\x98" + msgspec.msgpack.encode((MAGIC, MAJOR, MINOR, "events"))[1:]
_decode_head: Final = msgspec.msgpack.Decoder(_Head).decode
_DECODERS: Final[dict[str, tuple[type[ProtocolMessage], Callable[[bytes], Any]]]] = {
    name: (kind, msgspec.msgpack.Decoder(_as_array(kind)).decode) for name, kind in _KINDS.items()
}
_decode_events: Final = _DECODERS["events"][1]
_MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError)


def is_ours(payload: bytes) -> bool:
    """Whether a payload claims to be one of these messages, and no batch of a stock publisher."""
    return payload[1 : 1 + len(_OURS)] == _OURS


def is_events(payload: bytes) -> bool:
    """Whether a message of our own making has events, and so takes a number."""
    return payload.startswith(_EVENTS)


def encode(message: ProtocolMessage) -> bytes:
    """The bytes of a message."""
    head = (MAGIC, MAJOR, MINOR, _KIND_OF[type(message)])
    return msgspec.msgpack.encode((*head, *msgspec.structs.astuple(message)))


def decode(payload: bytes) -> ProtocolMessage:
    """Read a message; ProtocolError, with its reason: `too_long`, `unsupported_version`,
    `unknown_kind` or `undecodable`.
    """
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            "too_long",
            f"cannot read a message of {len(payload)} bytes: expected at most {MAX_MESSAGE_BYTES}",
        )
    try:
        if payload.startswith(_EVENTS):  # one decoder: most messages are of this kind
            events = _decode_events(payload)
            # msgpack has nothing beyond 64 bits.
            if events.life >= 0 and 0 <= events.number < _MAX_NUMBER:
                return Events(events.life, events.number, events.sent_at, events.packed)
        head = _decode_head(payload)
        if head.magic != MAGIC:
            raise ProtocolError(
                "undecodable", f"expected {MAGIC!r} in front, got {head.magic!r:.40}"
            )
        _require_version(head)
        kind, decode_kind = _DECODERS[_required_kind(head.kind)]
        values = msgspec.structs.astuple(decode_kind(payload))[len(_Head.__struct_fields__) :]
    except _MALFORMED as error:
        raise ProtocolError(
            "undecodable", f"cannot read a message of the stream: {error}"
        ) from error
    message = kind(*values)
    _require_numbers(message)
    return message


def _require_version(head: _Head) -> None:
    if head.major != MAJOR:
        raise ProtocolError(
            "unsupported_version",
            f"cannot read version {head.major}.{head.minor} of the protocol: expected {MAJOR}.x; "
            "install the same release of kvplug in the engine and the router",
        )


def _required_kind(kind: object) -> str:
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ProtocolError("unknown_kind", f"cannot read a message of the kind {kind!r:.40}")
    return kind


def _require_numbers(message: ProtocolMessage) -> None:
    """Lives are u64, numbers leave room for the next one; parts are counted."""
    number = message.number if isinstance(message, Events) else message.next
    is_sound = 0 <= message.life < _U64 and 0 <= number < _MAX_NUMBER
    if isinstance(message, Resident):
        is_sound &= 0 <= message.part < message.num_parts <= MAX_PARTS
    if not is_sound:
        raise ProtocolError(
            "undecodable",
            "cannot read a message of the stream: expected a life in [0, 2**64), a number in "
            f"[0, 2**63) and at most {MAX_PARTS} parts",
        )
