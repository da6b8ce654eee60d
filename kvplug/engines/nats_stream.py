"""An engine's events as kvplug's own stream, over NATS.

In:  batches of events, from the engine's own thread (kvplug/engines/life_stream.py).
Out: messages of kvplug/protocol.py on the publisher's own subjects: events in a stream of NATS
(kvplug/engines/outbox.py), a hello every 2 s (beats.py), answers to asks (nats_answers.py).

All but `publish` runs in the connection's loop. While no server can be reached the resident set and
the numbers go on; what waits is bounded, and readers ask for the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from kvplug import protocol
from kvplug.engines.answer_maker import AnswerMaker
from kvplug.engines.beats import Beats
from kvplug.engines.life import Numbered
from kvplug.engines.life_stream import LifeStream
from kvplug.engines.nats_answers import NatsAnswers
from kvplug.engines.nats_task import NatsTask
from kvplug.engines.outbox import MIN_BACKLOG_BYTES, Outbox
from kvplug.events import EventBatch
from kvplug.nats.connection import NatsConnection
from kvplug.nats.subjects import PublisherName, Subjects
from kvplug.protocol import WorkerHello

_BLOCK_BYTES: Final = 17  # of a resident set, in messages
_AT_ONCE: Final = 16  # messages, before others of the loop have their turn


class NatsStream(LifeStream):
    """A LifeStream over a connection that was started; others may share it.

    Read outbox, beats and answers for their counters.
    """

    def __init__(  # noqa: PLR0913 - settings, half of them with a default
        self,
        connection: NatsConnection,
        name: PublisherName,
        about: WorkerHello,
        decode: Callable[[Any], EventBatch],
        logger: logging.Logger,
        *,
        max_queue_size: int = 100_000,
        uses_stream: bool = True,
        closes: bool = False,
    ) -> None:
        """`uses_stream`: whether a stream keeps the events; else they are for who listens.
        `closes`: `shutdown` stops the connection, too.
        """
        super().__init__(max_queue_size, about, decode, logger)
        self._name = name
        subjects = Subjects(connection.settings.fleet)
        self.outbox = Outbox(
            connection, subjects.events(name), logger,
            limit_bytes=self._limit_bytes, uses_stream=uses_stream,
        )  # fmt: skip
        self.beats = Beats(connection, subjects.beats(name), self._beat, logger)
        self.answers = NatsAnswers(connection, subjects.asks(name), AnswerMaker(self.life), logger)
        self.outbox.on_drop = self._say_hello
        self.outbox.on_stuck = self.beats.soon
        self.beats.is_urgent = lambda: self.outbox.is_stuck
        self.beats.on_silent = self._on_silent
        self._life_said = 0
        runs = self.outbox.run, self.beats.run, self.answers.run
        self._task = NatsTask(
            connection, self._work, runs, self._count_failure, closes=closes, to_wake=self._wake
        )

    @property
    def endpoint(self) -> str:
        """As a reader's transport has it: nats://WORKER/RANK."""
        return f"nats://{self._name}"

    @property
    def answers_at(self) -> None:
        """Asks go to a subject that the publisher's name says."""
        return

    def shutdown(self) -> None:
        """Send what is queued, for a second at most, and end; again is harmless."""
        self._stopping = True
        self._task.stop(lambda: bool(self._queue or self.outbox.num_waiting))

    # All that follows runs in the connection's loop.

    def _work(self) -> bool:
        self._is_asleep = False
        if not self._life_said:  # a life begins with it
            self._say_hello()
        for _ in range(_AT_ONCE):
            if self._has_work:
                self._apply()
        if self.life.has_news:
            self._say_hello()
        # Nobody who appends sees that we sleep when we do not.
        self._is_asleep = True
        if self._has_work:
            self._is_asleep = False
        return not self._is_asleep

    def _apply(self) -> None:
        try:
            self._send_queued()
        except Exception as error:  # noqa: BLE001  # whatever it is, the next may be fine
            self._count_failure(error)

    def _send(self, message: Numbered) -> None:
        self.num_sent += 1
        life, _ = self.life.position
        if life != self._life_said:
            self._life_said = life
            self.outbox.begin(message.number)
            self.beats.soon()
        if not self.beats.is_silent:
            is_events = protocol.is_events(message.payload)
            self.outbox.put(message.payload, message.number + is_events)

    def _say_hello(self) -> None:
        self._send(self.life.hello())

    def _beat(self) -> tuple[bytes, int]:
        """What the stream has, or if it takes nothing, what there is to ask for."""
        _, next_ = self.life.position
        outbox = self.outbox
        next_ = next_ if outbox.is_stuck else outbox.following
        return self.life.beat(next_), outbox.last_seq

    def _limit_bytes(self) -> int:
        return max(MIN_BACKLOG_BYTES, self.life.num_blocks * _BLOCK_BYTES)

    def _on_silent(self, is_silent: bool) -> None:
        self.answers.is_open = not is_silent
        if is_silent:
            self.outbox.begin(0)
        else:
            # Readers follow the other's life, and would pass over this one as an older one.
            self.life.renew()
            self._say_hello()
