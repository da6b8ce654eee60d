"""Which messages were applied last: tells a repetition from another life of the publisher.

In:  numbers and payloads.   Out: whether a payload is the one that had this number.

The stock wire has no epoch, but a payload begins with the time of its batch, so two lives of an
engine do not send the same bytes under one number.
"""

from __future__ import annotations

import xxhash

_CAPACITY = 1024


class RecentMessages:
    """remember, forget, knows; the last 1024 numbers."""

    def __init__(self) -> None:
        self._digests: list[tuple[int, int]] = [(-1, 0)] * _CAPACITY

    def remember(self, number: int, payload: bytes) -> None:
        """This payload had this number."""
        self._digests[number % _CAPACITY] = number, xxhash.xxh3_64_intdigest(payload)

    def forget(self) -> None:
        """Another life begins."""
        self._digests = [(-1, 0)] * _CAPACITY

    def knows(self, number: int) -> bool:
        """Whether a message with this number is remembered."""
        return self._digests[number % _CAPACITY][0] == number

    def is_same(self, number: int, payload: bytes) -> bool:
        """Whether this is the payload that had this number."""
        return self._digests[number % _CAPACITY] == (number, xxhash.xxh3_64_intdigest(payload))
