"""The stock wire of vLLM and SGLang over NATS.

In:  batches of events, from the engine's own thread.
Out: payloads with their numbers in a header, in a stream of NATS; past ones to whoever asks with a
number of 8 bytes.

Nothing here tells that an engine lives, or knows what it holds: the stock wire does not.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from kvplug.engines.life import Numbered
from kvplug.engines.nats_answers import NatsAnswers
from kvplug.engines.nats_task import NatsTask
from kvplug.engines.numbered_batches import NumberedBatches
from kvplug.engines.outbox import Outbox
from kvplug.nats.connection import NatsConnection
from kvplug.nats.subjects import NUMBER_HEADER, PublisherName, Subjects

_AT_ONCE: Final = 64  # batches, before others of the loop have their turn
_END: Final = Numbered(-1, b"")


class NatsBatches(NumberedBatches):
    """NumberedBatches over a connection that was started; others may share it."""

    def __init__(  # noqa: PLR0913 - settings, half of them with a default
        self,
        connection: NatsConnection,
        name: PublisherName,
        encode: Callable[[Any], bytes],
        logger: logging.Logger,
        *,
        max_queue_size: int = 100_000,
        buffer_steps: int = 10_000,
        uses_stream: bool = True,
        closes: bool = False,
    ) -> None:
        """`buffer_steps`: past batches that can be asked for; `closes`: as of a NatsStream."""
        super().__init__(max_queue_size, encode, logger)
        self._name = name
        self._queue: deque[tuple[int, object]] = deque()
        self._history: deque[Numbered] = deque(maxlen=buffer_steps)
        subjects = Subjects(connection.settings.fleet)
        self.outbox = Outbox(connection, subjects.events(name), logger, uses_stream=uses_stream)
        self.answers = NatsAnswers(
            connection, subjects.asks(name), _PastBatches(self._history), logger, names_numbers=True
        )
        self._task = NatsTask(
            connection, self._work, (self.outbox.run, self.answers.run), self._count_failure,
            closes=closes,
        )  # fmt: skip

    @property
    def endpoint(self) -> str:
        """As a reader's transport has it: nats://WORKER/RANK."""
        return f"nats://{self._name}"

    @property
    def answers_at(self) -> None:
        """Asks go to a subject that the publisher's name says."""
        return

    @property
    def _num_queued(self) -> int:
        return len(self._queue)

    def _enqueue(self, number: int, batch: object) -> None:
        self._queue.append((number, batch))
        self._task.wake()

    def shutdown(self) -> None:
        """Send what is queued, for a second at most, and end; again is harmless."""
        self._stopping = True
        self._task.stop(lambda: bool(self._queue or self.outbox.num_waiting))

    def _work(self) -> bool:
        self._name_drops()
        for _ in range(min(len(self._queue), _AT_ONCE)):
            self._send(*self._queue.popleft())
        return bool(self._queue)

    def _send(self, number: int, batch: object) -> None:
        try:
            payload = self._encode(batch)
            # First, so that whoever saw this batch live finds it in an answer as well.
            self._history.append(Numbered(number, payload))
            self.outbox.put(payload, number + 1, {NUMBER_HEADER: str(number)})
            self.num_sent += 1
        except Exception as error:  # noqa: BLE001  # whatever it is, the next batch may be fine
            self._count_failure(error)


class _PastBatches:
    """A Maker of answers from the last batches: a request is a number, as in vLLM's replay."""

    pause_s = 0.0

    def __init__(self, history: deque[Numbered]) -> None:
        self._history = history

    def read(self, request: bytes) -> int | None:
        """The first number that is wanted."""
        return int.from_bytes(request, "big") if len(request) == 8 else None

    def may_answer(self, first: int) -> bool:
        """Always."""
        return True

    def answer(self, first: int) -> list[Numbered]:
        """All from that number on, and an end."""
        # The copy is one step for the interpreter, so the sender may append meanwhile.
        return [*(each for each in self._history.copy() if each.number >= first), _END]
