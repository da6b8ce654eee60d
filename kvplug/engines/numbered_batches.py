"""Numbered batches of the stock wire; what carries them is another's.

In:  batches of events, from the engine's own thread.
Out: a number for each, before anything can go wrong with it: what is lost is a gap that followers
see.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any


class NumberedBatches(ABC):
    """publish from one thread, shutdown from any. `encode` runs in the sender's thread.

    Read: the counters num_published (numbers given out), num_sent, num_dropped (the queue was
    full), num_lost (`lose`), failures by cause.
    """

    def __init__(
        self, max_queue_size: int, encode: Callable[[Any], bytes], logger: logging.Logger
    ) -> None:
        """`max_queue_size`: in batches; 0 is no limit, as in the engines' own publishers."""
        self.num_published = self.num_sent = self.num_dropped = self.num_lost = 0
        self.failures: Counter[str] = Counter()
        self._max_queue_size = max_queue_size
        self._encode, self._logger = encode, logger
        self._stopping = self._drops_are_named = False

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """Where batches are published."""

    @property
    @abstractmethod
    def answers_at(self) -> str | None:
        """Where past batches can be asked for, if the stream's address does not say it."""

    @abstractmethod
    def shutdown(self) -> None:
        """Send what is queued and close, in three seconds at worst; again is harmless."""

    @property
    @abstractmethod
    def _num_queued(self) -> int:
        """Batches that wait."""

    @abstractmethod
    def _enqueue(self, number: int, batch: object) -> None:
        """Does not wait."""

    def publish(self, batch: object) -> None:
        """Hand over a batch, which nobody changes any more. Does not wait and does not raise."""
        number = self.num_published
        self.num_published += 1
        if self._stopping or 0 < self._max_queue_size <= self._num_queued:
            self.num_dropped += 1
        else:
            self._enqueue(number, batch)

    def lose(self, num_lost: int, reason: str) -> None:
        """`num_lost` batches will never come; their numbers are used, so followers see it."""
        self.num_published += num_lost
        self.num_lost += num_lost

    def position(self) -> tuple[int, int]:
        """How many batches are sent, and the number of the next one."""
        return self.num_sent, self.num_published

    def _count_failure(self, error: Exception) -> None:
        cause = type(error).__name__
        self.failures[cause] += 1
        if self.failures[cause] == 1:
            self._logger.warning("kvplug: batches of KV events are lost: %s: %s", cause, error)

    def _name_drops(self) -> None:
        # In the sender's thread: writing a log may wait, and the engine must not.
        if self.num_dropped and not self._drops_are_named:
            self._drops_are_named = True
            self._logger.warning(
                "kvplug: batches of KV events are lost: the queue was full; expected at most %d "
                "waiting (max_queue_size). Followers see the gap in the numbers",
                self._max_queue_size,
            )
