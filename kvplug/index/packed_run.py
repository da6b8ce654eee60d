"""A payload of packed events on its way into an index, in slices.

In:  a payload; how far kernels came with it.   Out: where they go on; events for whoever takes them
one by one.
"""

from __future__ import annotations

from functools import cached_property

from kvplug import packed
from kvplug.packed import PackedEvent

_UNKNOWN = -1


class PackedRun:
    """next: the number of the first event that was not applied; at: where it is in the payload, 0
    before the first slice, -1 if only `event` knows.
    """

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.next = self.at = 0
        self._behind = _UNKNOWN  # where the event after `next` is
        self._is_done = False

    @property
    def is_done(self) -> bool:
        """Whether all events were applied."""
        return self._is_done or self.next == self.num_events

    @property
    def is_begun(self) -> bool:
        """Whether kernels have seen the payload."""
        return self.at > 0

    @property
    def is_for_kernels(self) -> bool:
        """Whether kernels can go on with it."""
        return self.at >= 0

    @cached_property
    def num_events(self) -> int:
        """DecodeError for what is no payload; whether it is a sound one is seen later."""
        return packed.num_events(self.payload)

    @cached_property
    def kinds(self) -> list[int]:
        """The kind of each event (kvplug/packed.py)."""
        return packed.kinds_of(self.payload)

    @cached_property
    def _events(self) -> list[PackedEvent]:
        return packed.decode(self.payload)

    @property
    def event(self) -> PackedEvent:
        """The next one; DecodeError if the payload is none, and that before anything is done."""
        return self._events[self.next]

    def check(self) -> None:
        """DecodeError if it is no payload."""
        _ = self._events

    def go_to(self, number: int, at: int, behind: int) -> None:
        """Kernels came to this event, at this position; `behind` is where the next one is."""
        self.next, self.at, self._behind = number, at, behind

    def advance(self, is_applied: bool = True) -> None:
        """The next event was applied otherwise."""
        if is_applied:
            self.next += 1
            self.at, self._behind = self._behind or _UNKNOWN, _UNKNOWN

    def lose_position(self) -> None:
        """From now on events are taken one by one."""
        self.at = self._behind = _UNKNOWN

    def pass_over(self, end: int) -> None:
        """Nothing is done with the events before number `end`."""
        self.next = end

    def finish(self) -> None:
        """All events were applied."""
        self._is_done = True
