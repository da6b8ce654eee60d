"""An engine's batches on their way into the messages of a life; what carries these is another's.

In:  batches of events, from the engine's own thread.
Out: hellos and events of kvplug/protocol.py, in order.

`publish` appends to a queue and returns. A thread takes what is queued meanwhile into one message:
no batch waits for a time to pass. If the queue is full, batches are lost, and nobody can know what
the engine holds until its cache is empty: a new life begins with nothing, and the hello names the
defect.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from kvplug.engines.life import (
    QUEUE_FULL,
    RECORDER_FAILED,
    SENDER_LOST,
    UNDECODABLE,
    Life,
    Numbered,
)
from kvplug.engines.wake import Wake
from kvplug.events import EventBatch
from kvplug.protocol import WorkerHello

STOP_LIMIT_S: Final = 1.0
"""How long `shutdown` waits for what is queued, for answers, for subscribers that still read."""

_SAID: Final = {
    QUEUE_FULL: "the queue was full; at most %(size)d wait (max_queue_size)",
    SENDER_LOST: "the process that sends them ended",
    RECORDER_FAILED: "the recorder of the engine failed",
    UNDECODABLE: "one cannot be read",
}

# Batches that go into one message, so that a resident set need not wait for more.
_MAX_BATCHES: Final = 64


class _Loss(NamedTuple):
    """Stands in the queue for batches that never came."""

    num_lost: int
    reason: str


class LifeStream(ABC):
    """publish from the engine's thread, note and shutdown from any. `decode` runs in the sender's.

    Read: endpoint and answers_at (as they are now), life, and the counters num_published (batches
    handed over), num_applied, num_sent (messages), num_dropped (the queue was full), num_lost
    (`lose`), failures by cause.
    """

    def __init__(
        self,
        max_queue_size: int,
        about: WorkerHello,
        decode: Callable[[Any], EventBatch],
        logger: logging.Logger,
    ) -> None:
        """`max_queue_size`: in batches; 0 is no limit."""
        self.num_published = self.num_applied = self.num_sent = self.num_dropped = 0
        self.failures: Counter[str] = Counter()
        self.num_lost, self._named_losses = 0, set[str]()
        self._max_queue_size, self._decode, self._logger = max_queue_size, decode, logger
        self._queue: deque[object] = deque()
        self._stopping, self._is_asleep, self._num_dropped_before = False, False, 0
        self._wake = Wake()
        self.life = Life(about)

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """Where events are published."""

    @property
    @abstractmethod
    def answers_at(self) -> str | None:
        """Where followers ask, if the stream's address does not say it."""

    @abstractmethod
    def shutdown(self) -> None:
        """Send what is queued and close, in three seconds at worst; again is harmless."""

    @abstractmethod
    def _send(self, message: Numbered) -> None:
        """Send it to all that follow, in the sender's thread; does not wait."""

    def publish(self, batch: object) -> None:
        """Hand over a batch, which nobody changes any more. Does not wait and does not raise."""
        self.num_published += 1
        if self._stopping or 0 < self._max_queue_size <= len(self._queue):
            self.num_dropped += 1
        else:
            self._queue.append(batch)
        if self._is_asleep:
            self._wake.set()

    def lose(self, num_lost: int, reason: str) -> None:
        """Here `num_lost` batches are missing, between those before and after this call."""
        self.num_lost += num_lost
        self._queue.append(_Loss(num_lost, reason))
        self._wake.set()

    def position(self) -> tuple[int, int]:
        """How many batches are in messages, and the number of the next message."""
        num_applied = self.num_applied
        return num_applied, self.life.settled()[1]

    def note(self, **more: object) -> None:
        """Say this of the engine from now on, as fields of a WorkerHello."""
        self.life.note(**more)
        self._wake.set()

    # In the sender's thread.

    @property
    def _has_work(self) -> bool:
        return bool(self._queue) or self.num_dropped != self._num_dropped_before

    def _send_queued(self) -> None:
        """Some of what is queued, as one message or as few as it fits into."""
        if self.num_dropped != self._num_dropped_before and not self._stopping:
            self._begin_again()
        elif self._queue and isinstance(self._queue[0], _Loss):
            self._on_loss(self._queue.popleft())
        elif self._queue:
            for message in self._told():
                self._send(message)

    def _told(self) -> list[Numbered]:
        try:
            return self.life.apply(self._taken())
        except Exception as error:  # noqa: BLE001  # a new life has begun
            self._count_failure(error)
            return [self.life.hello()]

    def _taken(self) -> Iterator[EventBatch]:
        for _ in range(min(len(self._queue), _MAX_BATCHES)):
            if isinstance(self._queue[0], _Loss):
                return
            batch = self._queue.popleft()
            self.num_applied += 1
            try:
                yield self._decode(batch)
            except Exception as error:  # noqa: BLE001  # the next batch may be fine
                self._count_failure(error)
                yield EventBatch(events=(), skipped={UNDECODABLE: 1})

    def _begin_again(self) -> None:
        """Batches are lost. What is queued is from before that, and of no use either."""
        num_dropped = self.num_dropped  # first: what is dropped from here on begins another life
        num_queued = len(self._queue)
        for _ in range(num_queued):
            self._queue.popleft()
        num_lost = num_dropped - self._num_dropped_before + num_queued
        self._num_dropped_before = num_dropped
        self._on_loss(_Loss(num_lost, QUEUE_FULL))

    def _on_loss(self, loss: object) -> None:
        assert isinstance(loss, _Loss)
        self.life.begin_again(loss.num_lost, loss.reason)
        self._send(self.life.hello())
        if loss.reason not in self._named_losses:
            self._named_losses.add(loss.reason)
            self._logger.warning(
                "kvplug: batches of KV events are lost: %s. Followers go by what they are told "
                "from now on, and are exact again when the engine's cache is emptied or it "
                "restarts",
                _SAID.get(loss.reason, loss.reason) % {"size": self._max_queue_size},
            )

    def _count_failure(self, error: Exception) -> None:
        cause = type(error).__name__
        self.failures[cause] += 1
        if self.failures[cause] == 1:
            self._logger.warning("kvplug: batches of KV events are lost: %s: %s", cause, error)
