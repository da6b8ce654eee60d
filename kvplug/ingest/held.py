"""Live messages that wait for a replay to end.

In:  numbers and payloads in the order of their arrival.   Out: the same, later.
"""

from __future__ import annotations

from itertools import pairwise


class HeldMessages:
    """add, drop, take; has_up_to, is_rising; len."""

    def __init__(self, max_bytes: int) -> None:
        self._messages: list[tuple[int, bytes]] = []
        self._num_bytes, self._max_bytes = 0, max_bytes

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, number: int, payload: bytes) -> None:
        """Keep a message, if there is room: what is left out is a gap, and asked for later."""
        if self._num_bytes <= self._max_bytes:
            self._messages.append((number, payload))
            self._num_bytes += len(payload)

    def has_up_to(self, number: int | None) -> bool:
        """Whether a message with at most this number waits."""
        return number is not None and any(held <= number for held, _ in self._messages)

    def is_rising(self) -> bool:
        """Whether none overtook another."""
        return all(one[0] < other[0] for one, other in pairwise(self._messages))

    def drop(self, num_messages: int) -> None:
        """Leave out the first ones."""
        self._num_bytes -= sum(len(payload) for _, payload in self._messages[:num_messages])
        del self._messages[:num_messages]

    def take(self) -> list[tuple[int, bytes]]:
        """All messages; none is held any more."""
        messages = self._messages
        self._messages, self._num_bytes = [], 0
        return messages
