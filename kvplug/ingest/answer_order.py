"""Whether an answer to an ask is one: a hello, then events or a resident set, then an end.

In:  messages of the answer, in the order of their arrival.
Out: for each, the reason why it is refused, if it is; an answer is refused with its first one.

An answer has at most as many parts and bytes as a resident set can have; for how long it may take
is in the request (kvplug/ingest/replay.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvplug.ingest.replay import Request
from kvplug.protocol import (
    MAX_PACKED_BYTES,
    MAX_PARTS,
    End,
    Events,
    Hello,
    ProtocolMessage,
    Resident,
)

OTHER_LIFE: Final = "other_life"
"""It is not of the life that the stream has shown: another engine's, or of a former process."""

OUT_OF_ORDER: Final = "out_of_order"
"""A message where it does not belong, or a number that does not follow."""

INCOMPLETE: Final = "incomplete_answer"
"""It ended before all of it was there."""

TOO_LONG: Final = "too_long"
"""More than a resident set may have."""

_MAX_BYTES: Final = MAX_PARTS * MAX_PACKED_BYTES


class AnswerOrder:
    """refuses, of each message; `is_resident`: it replaces what was known."""

    def __init__(self, life: int, first: int | None) -> None:
        """`first`: the number of the events that were asked for; None: everything was."""
        self._life, self._first, self._next = life, first, first
        self._num_parts = self._num_expected = self._num_bytes = 0
        self._has_hello = False

    @property
    def is_resident(self) -> bool:
        """Whether a part of a resident set has come."""
        return self._num_parts > 0

    def refuses(self, said: ProtocolMessage) -> str | None:
        """Why the message does not belong here; None if it does."""
        if said.life != self._life:
            return OTHER_LIFE
        if isinstance(said, Hello):
            is_first, self._has_hello = not self._has_hello, True
            return None if is_first else OUT_OF_ORDER
        if not self._has_hello:
            return OUT_OF_ORDER
        match said:
            case Events():
                return self._of_events(said)
            case Resident():
                return self._of_part(said)
            case End():
                return self._of_end(said)
        return OUT_OF_ORDER

    def _of_events(self, said: Events) -> str | None:
        if self._first is None or self.is_resident or said.number != self._next:
            return OUT_OF_ORDER
        self._next = said.number + 1
        return None

    def _of_part(self, said: Resident) -> str | None:
        if not self.is_resident:
            if self._next != self._first:
                return OUT_OF_ORDER  # events have come
            self._next, self._num_expected = said.next, said.num_parts
        shape = said.part, said.num_parts, said.next
        if shape != (self._num_parts, self._num_expected, self._next):
            return OUT_OF_ORDER
        self._num_parts += 1
        self._num_bytes += len(said.packed)
        return TOO_LONG if self._num_bytes > _MAX_BYTES else None

    def _of_end(self, said: End) -> str | None:
        is_complete = self._num_parts == self._num_expected and said.next == self._next
        return None if is_complete else INCOMPLETE


@dataclass(slots=True, eq=False, kw_only=True)
class AskRequest(Request):
    """A publisher is asked. hello_next: what it had said it would answer up to, at least."""

    order: AnswerOrder
    hello_next: int
