"""Which life of a publisher is the present one, and when it last gave a sign.

In:  the life of each message, whether it is live, and the time.   Out: whether to listen to it.

A message from a stream that keeps messages may be an hour old, and may come again. So it begins a
life that nobody has heard of, but none that was left, and it is no sign of life.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import Final

from kvplug.protocol import HEARTBEAT_S

NUM_PAST_LIVES: Final = 8
SILENCE_S: Final = 2 * HEARTBEAT_S
"""Without a sign of life for so long, nobody knows whether what was heard is all."""


class Lives:
    """admits, begin, heard, silenced; read `present` and `past`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.present: int | None = None
        self.past: deque[int] = deque(maxlen=NUM_PAST_LIVES)
        self._clock, self._heard_at_s = clock, clock()

    @property
    def is_overdue(self) -> bool:
        """Whether the present life has given no sign for too long."""
        return self._clock() - self._heard_at_s > SILENCE_S

    def heard(self) -> None:
        """A sign of the present life."""
        self._heard_at_s = self._clock()

    def silenced(self) -> None:
        """Only a sign from now on counts."""
        self._heard_at_s = -inf

    def admits(self, life: int, *, is_live: bool) -> bool:
        """Whether messages of another life than the present one are listened to."""
        return life not in self.past or (is_live and self.is_overdue)

    def begin(self, life: int, *, is_live: bool) -> None:
        """This one is the present one; the former one is past."""
        if self.present is not None:
            self.past.append(self.present)
        if life in self.past:
            self.past.remove(life)
        self.present = life
        if is_live:
            self.heard()
        else:
            self.silenced()

    def forget(self) -> None:
        """Nothing is known of the present one."""
        self.present = None

    def restore(self, present: int, past: Iterable[int]) -> None:
        """As they were in a snapshot."""
        self.present = present
        self.past.clear()
        self.past.extend(past)
        self.silenced()
