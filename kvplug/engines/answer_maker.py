"""What is said to a follower that asks, whatever carries it.

In:  a Life, asks.   Out: the messages of an answer, in order.

All that ask while a resident set is made get the same one; the next one waits for a time in
proportion, so that answers take a fifth of a core at most.
"""

from __future__ import annotations

import time
from typing import Final

from kvplug import protocol
from kvplug.engines.life import Answer, Life, Numbered, end_of, parts_of
from kvplug.protocol import Ask, ProtocolError

# Between two resident sets, at least; and so many times what the last one took.
_SHORTEST_PAUSE_S: Final = 0.1
_PAUSE_RATIO: Final = 4.0


class AnswerMaker:
    """read, may_answer, answer, one call at a time; read num_resident_sets."""

    def __init__(self, life: Life) -> None:
        self.num_resident_sets = 0
        self._life = life
        self._parts: tuple[tuple[int, int], list[bytes]] = (0, 0), []
        self._not_before = 0.0

    @property
    def pause_s(self) -> float:
        """How long until another resident set may be made."""
        return max(self._not_before - time.monotonic(), 0.0)

    def read(self, request: bytes) -> Ask | None:
        """The ask in a message; None if it is none."""
        try:
            ask = protocol.decode(request)
        except ProtocolError:
            return None
        return ask if isinstance(ask, Ask) else None

    def may_answer(self, ask: Ask) -> bool:
        """Whether past events, the last resident set or a new one may be said now."""
        if self._life.has(ask) or self._life.position == self._parts[0]:
            return True
        return not self.pause_s

    def answer(self, ask: Ask) -> list[Numbered]:
        """A hello, past events or the parts of a resident set, and an end."""
        # Not a generator: the parts belong to the moment of the answer.
        answer = self._life.answer(ask)
        parts = [] if answer.listing is None else self._parts_of(answer)
        return [
            Numbered(answer.next, answer.hello),
            *answer.events,
            *(Numbered(answer.next, part) for part in parts),
            Numbered(answer.next, end_of(answer)),
        ]

    def _parts_of(self, answer: Answer) -> list[bytes]:
        position = answer.life, answer.next
        if position != self._parts[0]:
            started = time.monotonic()
            try:
                self._parts = position, parts_of(answer)
            finally:
                ended = time.monotonic()
                pause = max(_SHORTEST_PAUSE_S, _PAUSE_RATIO * (ended - started))
                self._not_before = ended + pause
            self.num_resident_sets += 1
        return self._parts[1]
