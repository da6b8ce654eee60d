"""The messages of a stream on their way: those that wait, those that were applied last, and what
applying them did.

In:  messages.   Out: the same, later; whether a message was applied before; an Effect.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Protocol

import xxhash

from kvplug.index.apply_result import RejectReason
from kvplug.protocol import WorkerHello
from kvplug.transports.base import Message

_REPAIRABLE: Final = frozenset({RejectReason.UNKNOWN_PARENT.value, "undecodable"})
_NUM_DIGESTS: Final = 1024
# What a message without a payload takes in memory.
_MESSAGE_OVERHEAD_BYTES: Final = 200


class PendingMessages:
    """Live messages that wait for a replay to end: add, drop, take; first, is_rising; len."""

    def __init__(self, max_bytes: int) -> None:
        self._messages: list[Message] = []
        self._num_bytes, self._max_bytes = 0, max_bytes

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: Message) -> bool:
        """Keep it, if there is room: what is left out is a gap, and asked for later."""
        has_room = self._num_bytes <= self._max_bytes
        if has_room:
            self._messages.append(message)
            self._num_bytes += _size_of(message)
        return has_room

    def first(self, num_messages: int) -> list[Message]:
        """Those that came first."""
        return self._messages[:num_messages]

    def has_up_to(self, sequence: int | None) -> bool:
        """Whether a message with at most this number waits."""
        if sequence is None:
            return False
        return any(m.sequence is not None and m.sequence <= sequence for m in self._messages)

    def is_rising(self) -> bool:
        """Whether none overtook another."""
        numbers = [m.sequence for m in self._messages if m.sequence is not None]
        return all(one < other for one, other in pairwise(numbers))

    def drop(self, num_messages: int) -> None:
        """Leave out the first ones."""
        self._num_bytes -= sum(map(_size_of, self._messages[:num_messages]))
        del self._messages[:num_messages]

    def take(self) -> list[Message]:
        """All messages; none waits any more."""
        messages = self._messages
        self._messages, self._num_bytes = [], 0
        return messages


class WaitingEvents(PendingMessages):
    """Numbered events that wait for those before them: begin, keep, has_all_up_to, take_in_order.

    A publisher over NATS sends again all from the first message that the stream did not get, so
    what waits may become complete without an ask.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._gapless_to = self._behind_last = 0

    def begin(self, first: int) -> None:
        """Events wait from now on; `first` is the number of the one that is missing."""
        self._gapless_to, self._behind_last = first, first

    def keep(self, message: Message, number: int) -> None:
        """Keep it, if there is room."""
        if self.add(Message(message.topic, number, message.payload, is_live=message.is_live)):
            self._gapless_to += number == self._gapless_to
            self._behind_last = max(self._behind_last, number + 1)

    @property
    def behind_last(self) -> int:
        """The number after the highest that waits; 0 if nothing does."""
        return self._behind_last if self._messages else 0

    def has_all_up_to(self, next_: int) -> bool:
        """Whether none is missing before this number, nor before the highest that waits."""
        return self._gapless_to >= max(next_, self._behind_last)

    def take_in_order(self, first: int) -> list[Message]:
        """Those from this number on, once each; none waits any more."""
        by_number = {each.sequence or 0: each for each in self.take()}
        return [by_number[number] for number in sorted(by_number) if number >= first]


def _size_of(message: Message) -> int:
    return len(message.payload) + _MESSAGE_OVERHEAD_BYTES


# Sequence number, digest of the payload, whether it came live. Plain tuples: one is made for every
# message.
_Digest = tuple[int, int, bool]
_NONE: Final[_Digest] = (-1, 0, False)


class RecentDigests:
    """remember, forget, knows, is_same, was_live; the last 1024 numbers.

    The stock wire names no incarnation of a publisher, but a payload begins with the time of its
    batch, so two incarnations do not send the same bytes under one number.
    """

    def __init__(self) -> None:
        self._digests: list[_Digest] = [_NONE] * _NUM_DIGESTS

    def remember(self, messages: list[Message], *, is_live: bool) -> None:
        """They were applied; `is_live`: the stream itself brought them, not a replay."""
        digests, digest_of = self._digests, xxhash.xxh3_64_intdigest
        for message in messages:
            sequence = message.sequence
            if sequence is not None:
                digest = sequence, digest_of(message.payload), is_live
                digests[sequence % _NUM_DIGESTS] = digest

    def forget(self) -> None:
        """Another incarnation begins."""
        self._digests = [_NONE] * _NUM_DIGESTS

    def knows(self, sequence: int) -> bool:
        """Whether a message with this number is remembered."""
        return self._digests[sequence % _NUM_DIGESTS][0] == sequence

    def is_same(self, message: Message) -> bool:
        """Whether this very message is remembered."""
        if message.sequence is None:
            return False
        sequence, digest, _ = self._digests[message.sequence % _NUM_DIGESTS]
        return sequence == message.sequence and digest == _digest(message)

    def was_live(self, sequence: int) -> bool:
        """Whether the message with this number came live, as far as that is remembered."""
        known, _, is_live = self._digests[sequence % _NUM_DIGESTS]
        return known == sequence and is_live


def _digest(message: Message) -> int:
    return xxhash.xxh3_64_intdigest(message.payload)


@dataclass(slots=True)
class Effect:
    """What payloads did to what is known of an engine.

    cleared: the engine dropped everything, so what was missed before no longer matters;
    defects: by reason, what came after that (or at all) and leaves blocks unknown.
    """

    cleared: bool = False
    defects: Counter[str] = field(default_factory=Counter)

    @property
    def is_repairable(self) -> bool:
        """Whether a replay may help: what came before was lost or damaged on the way."""
        return bool(self.defects.keys() & _REPAIRABLE)


class Sink(Protocol):
    """Where payloads go."""

    def apply(self, payloads: list[bytes]) -> Effect:
        """Apply them in order."""

    def clear(self) -> None:
        """Forget all that the publisher said."""


class LifeSink(Protocol):
    """Where packed events go, and what a publisher says of its engine."""

    def apply_packed(self, packed: bytes, sent_at: float) -> Effect | None:
        """Apply what was sent at this time (0: not known); None if there is nothing to say."""

    def introduce(self, about: WorkerHello) -> str | None:
        """Take what it says; returns why its events are of no use, if they are not."""

    def clear(self) -> None:
        """Forget all that the publisher said."""
