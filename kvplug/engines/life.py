"""A life of a publisher: what has been said in it, and what there is to say to a newcomer.

In:  batches of typed events.
Out: messages of kvplug/protocol.py with their numbers, and answers to asks.

The sender's thread applies batches; another one answers. Both hold the lock, the one for a message,
the other for as long as it takes to copy arrays (76 ms for a million blocks).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from msgspec import structs

from kvplug import protocol
from kvplug.engines.listing import MAX_BLOCKS, Packed, packed_parts, payloads_of
from kvplug.engines.listing import packed as with_length
from kvplug.engines.resident_set import Listing, ResidentSet
from kvplug.events import EventBatch
from kvplug.hidden_states import HiddenStates
from kvplug.packed import (
    PackedCopied,
    PackedEvent,
    PackedRemoved,
    PackedStored,
    PackedTransition,
    encode,
)
from kvplug.protocol import (
    MAX_PACKED_BYTES,
    Ask,
    End,
    Events,
    GroupAbout,
    Hello,
    Resident,
    WorkerHello,
)

# Why blocks are unknown, beside the reasons of events that cannot be used.
QUEUE_FULL: Final = "queue_full"
SENDER_LOST: Final = "sender_lost"
RECORDER_FAILED: Final = "recorder_failed"
UNDECODABLE: Final = "undecodable"
BAD_VALUE: Final = "bad_value"
HISTORY_BYTES: Final = 2**24
"""Of the last events, for followers that missed a few."""


class Numbered(NamedTuple):
    """A message as it is sent."""

    number: int
    payload: bytes


class Answer(NamedTuple):
    """To one ask: a hello, then `events`, or if there is a listing its parts, then an end."""

    life: int
    next: int
    hello: bytes
    events: list[Numbered]
    listing: Listing | None


class Life:
    """apply, begin_again, begin_anew, doubt, hello, answer; from any thread."""

    def __init__(self, about: WorkerHello, history_bytes: int = HISTORY_BYTES) -> None:
        self._lock = threading.Lock()
        self._history_bytes = history_bytes
        self._about = self._said = about
        self._resident = ResidentSet(about.block_size, bigrams=about.bigrams)
        self._noted: tuple[object, ...] = ()
        self._doubts: dict[str, int] = {}
        self._hidden = HiddenStates() if about.hides_states else None
        self._begin()

    def _begin(self) -> None:
        self._life = secrets.randbits(64) or 1  # 0 is a newcomer's
        self._next = self._num_history_bytes = 0
        self._history: deque[Numbered] = deque()

    @property
    def about(self) -> WorkerHello:
        """What is said of the engine."""
        return self._about

    @property
    def has_news(self) -> bool:
        """Whether what is said of the engine has changed since the last hello."""
        return self._about is not self._said and self._about != self._said

    @property
    def num_blocks(self) -> int:
        """How many blocks the engine holds."""
        return len(self._resident)

    def note(self, **more: object) -> None:
        """Say this of the engine from now on."""
        with self._lock:
            self._about = structs.replace(self._about, **more)

    def hello(self) -> Numbered:
        """A sign of life, for all."""
        with self._lock:
            return self._hello_to_all()

    def beat(self, next_: int) -> bytes:
        """A hello that says this number, when those who hear it lack what is behind it."""
        with self._lock:
            self._hello()  # which takes up the defects
            return protocol.encode(Hello(self._life, next_, time.time(), self._about))

    def renew(self) -> None:
        """Another life with the same blocks. It begins at number 1, as one at 0 holds nothing."""
        with self._lock:
            self._begin()
            self._next = 1

    def begin_again(self, num_dropped: int, reason: str = QUEUE_FULL) -> None:
        """Batches were lost: nobody knows what the engine holds, until its cache is empty."""
        with self._lock:
            self._lose(reason, num_dropped)

    def begin_anew(self) -> None:
        """The engine, or who tells of it, starts over: it holds nothing, and nothing is missing."""
        with self._lock:
            self._forget()
            self._resident.defects.clear()
            self._note_resident()
            self._begin()

    def doubt(self, doubts: Mapping[str, int]) -> None:
        """Blocks are missing for these reasons, beside those that events show; {}: none are. For
        who takes the events off another stream.
        """
        with self._lock:
            self._doubts = dict(doubts)
            self._note_defects()

    @property
    def num_cleared(self) -> int:
        """How often the engine's cache was emptied."""
        return self._resident.num_cleared

    @property
    def defects(self) -> Counter[str]:
        """Of events, by reason, how much could not be used since the cache was last empty."""
        return self._resident.defects

    def _forget(self) -> None:
        self._resident.forget()
        if self._hidden is not None:
            self._hidden.forget()

    def _lose(self, reason: str, num_lost: int) -> None:
        self._forget()
        self._resident.defects[reason] += num_lost
        self._note_resident()
        self._begin()

    def apply(self, batches: Iterable[EventBatch]) -> list[Numbered]:
        """Remember what an engine said; the messages that tell it, a hello before them if what is
        said of the engine has changed.

        After any exception nobody knows what was said, so the life begins again with nothing.
        """
        with self._lock:
            try:
                return self._messages(batches)
            except BaseException:
                self._lose(BAD_VALUE, 1)
                raise

    def _messages(self, batches: Iterable[EventBatch]) -> list[Numbered]:
        packed = [each for batch in batches for each in self._packed(batch)]
        self._resident.settle()
        self._note_resident()
        hello = [self._hello_to_all()] if self.has_news else []
        return hello + [self._events(part) for part in payloads_of(packed, MAX_PACKED_BYTES)]

    def answer(self, ask: Ask) -> Answer:
        """What to say to a follower."""
        with self._lock:
            about = self._life, self._next, self._hello().payload
            if ask.life == self._life and self._oldest <= ask.next <= self._next:
                skipped = ask.next - self._oldest
                return Answer(*about, list(self._history)[skipped:], None)
            return Answer(*about, [], self._resident.listing())

    @property
    def position(self) -> tuple[int, int]:
        """Life and next number."""
        return self._life, self._next

    def settled(self) -> tuple[int, int]:
        """The same, once the batches are in that are being applied."""
        with self._lock:
            return self.position

    def has(self, ask: Ask) -> bool:
        """Whether it can be answered with past events."""
        with self._lock:
            return ask.life == self._life and self._oldest <= ask.next <= self._next

    @property
    def _oldest(self) -> int:
        return self._next - len(self._history)

    def _packed(self, batch: EventBatch) -> Iterator[Packed]:
        # Before the events: a clear among them ends what was wrong before it, not this.
        events = batch.events if self._hidden is None else self._hidden.with_ends(batch).events
        for event in events:
            for packed in self._resident.apply(event):
                yield from map(with_length, _in_pieces(packed))
        self._resident.defects.update(batch.skipped)

    def _note_resident(self) -> None:
        resident, kinds = self._resident, self._resident.groups
        if resident.said == self._noted:
            return
        self._noted = resident.said
        groups = [GroupAbout(group=kinds.main)] if kinds.main is not None else []
        groups += [
            GroupAbout(group=n, attention=kind.attention, sliding_window=kind.sliding_window)
            for n, kind in sorted(kinds.others.items())
        ]
        more = {"groups": tuple(groups)} if kinds.is_hybrid else {}
        self._about = structs.replace(
            self._about,
            block_size=resident.block_size,
            bigrams=resident.bigrams,
            **more,
        )
        self._note_defects()

    def _note_defects(self) -> None:
        defects = dict(sorted({**self._doubts, **self._resident.defects}.items()))
        if defects != self._about.defects:
            self._about = structs.replace(self._about, defects=defects)

    def _hello_to_all(self) -> Numbered:
        hello = self._hello()
        self._said = self._about
        return hello

    def _hello(self) -> Numbered:
        self._note_defects()  # a new reason is said at once, a higher count with the next hello
        hello = Hello(self._life, self._next, time.time(), self._about)
        return Numbered(self._next, protocol.encode(hello))

    def _events(self, packed: bytes) -> Numbered:
        events = Events(self._life, self._next, time.time(), packed)
        message = Numbered(self._next, protocol.encode(events))
        self._next += 1
        self._history.append(message)
        self._num_history_bytes += len(message.payload)
        while self._num_history_bytes > self._history_bytes:
            self._num_history_bytes -= len(self._history.popleft().payload)
        return message


def parts_of(answer: Answer) -> list[bytes]:
    """The resident set of an answer, as messages; one at least, so that it says what it says."""
    assert answer.listing is not None
    parts = list(packed_parts(answer.listing, MAX_PACKED_BYTES)) or [encode(())]
    about = answer.life, answer.next
    return [
        protocol.encode(Resident(*about, part, len(parts), packed))
        for part, packed in enumerate(parts)
    ]


def end_of(answer: Answer) -> bytes:
    """The message that ends an answer."""
    return protocol.encode(End(answer.life, answer.next))


def _in_pieces(event: PackedEvent) -> Iterator[PackedEvent]:
    """Events of at most MAX_BLOCKS blocks: a message has its limit."""
    names = getattr(event, "engine_hashes", ())
    if len(names) <= MAX_BLOCKS:
        yield event
        return
    assert isinstance(event, PackedStored | PackedRemoved | PackedCopied | PackedTransition)
    for first in range(0, len(names), MAX_BLOCKS):
        at = slice(first, first + MAX_BLOCKS)
        if isinstance(event, PackedStored):
            parent = names[first - 1] if first else event.parent
            yield _replaced(event, names[at], hashes=event.hashes[at], parent=parent)
        else:
            yield _replaced(event, names[at])


def _replaced(event: PackedEvent, names: object, **more: object) -> PackedEvent:
    return replace(event, engine_hashes=names, **more)  # type: ignore[arg-type]
