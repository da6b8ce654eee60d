"""The subjects of one publisher on NATS: its messages, a hello every 2 s, answers to asks.

In:  messages from the event thread; what there is to say, from a Wire.
Out: the same in a stream of NATS, in order (kvplug/engines/outbox.py), on a connection that all
engines of the process share.

All but `send` and `close` runs in the connection's loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

from kvplug.engines.beats import Beats
from kvplug.engines.life import Numbered
from kvplug.engines.nats_answers import NatsAnswers
from kvplug.engines.outbox import MIN_BACKLOG_BYTES, Outbox
from kvplug.nats.connection import NatsConnection
from kvplug.nats.subjects import PublisherName, Subjects

logger = logging.getLogger(__name__)

_STOP_S: Final = 1.0
_POLL_S: Final = 0.01
_PAUSE_S: Final = 2.0


class Said(NamedTuple):
    """How far a stream has what was said: `following` is the number behind its last message, of
    `life`; num_settled counts messages; takes_nothing: for a second, though the server is there.
    """

    life: int
    following: int
    num_settled: int
    takes_nothing: bool


class Outgoing(NamedTuple):
    """A message of a life. `number`: of its events, or of those that come after a hello; following:
    the number that the next events have.
    """

    life: int
    number: int
    payload: bytes
    following: int


class Wire(Protocol):
    """What is said of one engine, in the form of its wire."""

    @property
    def pause_s(self) -> float:
        """How long until `may_answer` can change."""

    @property
    def backlog_bytes(self) -> int:
        """What may wait; beyond it, saying all again is cheaper."""

    def beat(self, said: Said) -> bytes | None:
        """A sign of life that says no more than the stream has; None: there is none. In the
        connection's loop.
        """

    def read(self, request: bytes) -> object | None:
        """The ask in a message; None if it is none."""

    def may_answer(self, ask: Any) -> bool:  # noqa: ANN401 - what `read` returned
        """Whether it can be answered now."""

    def answer(self, ask: Any) -> list[Numbered]:  # noqa: ANN401 - what `read` returned
        """Its messages; in a thread of its own, where it may wait."""

    def on_alone(self) -> None:
        """A namesake that was heard instead is gone. In the connection's loop."""

    def on_drop(self) -> None:
        """Messages were dropped. In the connection's loop."""


class Output:
    """send, close; beat_soon from the loop. Read outbox, beats and answers for their counters."""

    def __init__(self, connection: NatsConnection, name: PublisherName, wire: Wire) -> None:
        self._connection, self._wire = connection, wire
        self._life = self._num_put = 0
        self._task: asyncio.Task[None] | None = None
        subjects = Subjects(connection.settings.fleet)
        self.outbox = Outbox(
            connection, subjects.events(name), logger, limit_bytes=self._limit_bytes
        )
        self.beats = Beats(connection, subjects.beats(name), self._beat, logger)
        self.answers = NatsAnswers(connection, subjects.asks(name), wire, logger)
        self.outbox.on_drop = wire.on_drop
        self.outbox.on_stuck = self.beats.soon
        self.beats.is_urgent = lambda: self.outbox.is_stuck
        self.beats.on_silent = self._on_silent
        self._ended = connection.submit(self._run())

    def send(self, messages: Sequence[Outgoing]) -> None:
        """Behind all others; from any thread, in the order of the calls of one."""
        with suppress(RuntimeError):  # the loop has ended
            self._connection.loop.call_soon_threadsafe(self._put, messages)

    def beat_soon(self) -> None:
        """The wire has a sign of life."""
        with suppress(RuntimeError):
            self._connection.loop.call_soon_threadsafe(self.beats.soon)

    def abandon(self) -> None:
        """End, and send nothing more; returns at once."""
        self._connection.submit(self._end())

    def close(self) -> None:
        """Send what waits, for a second at most, and end."""
        with suppress(CancelledError, TimeoutError, RuntimeError):
            self._connection.submit(self._finish()).result(2 * _STOP_S)

    async def _run(self) -> None:
        self._task = asyncio.current_task()
        async with asyncio.TaskGroup() as tasks:
            for part in (self.outbox, self.beats, self.answers):
                tasks.create_task(_for_ever(part.run))

    async def _finish(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                while self._owes_messages:  # noqa: ASYNC110 - that depends on many things
                    await asyncio.sleep(_POLL_S)
        await self._end()

    @property
    def _owes_messages(self) -> bool:
        return self._connection.is_connected and self.outbox.num_waiting > 0

    async def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def _put(self, messages: Sequence[Outgoing]) -> None:
        for message in messages:
            if message.life != self._life:
                # What waits of a former life is of no use any more.
                self._life = message.life
                self.outbox.begin(message.number)
                self.beats.soon()
            self._num_put += 1
            if not self.beats.is_silent:
                self.outbox.put(message.payload, message.following)

    def _beat(self) -> tuple[bytes, int] | None:
        outbox = self.outbox
        num_settled = self._num_put - outbox.num_waiting
        said = Said(self._life, outbox.following, num_settled, outbox.is_stuck)
        payload = self._wire.beat(said)
        return None if payload is None else (payload, outbox.last_seq)

    def _limit_bytes(self) -> int:
        return max(MIN_BACKLOG_BYTES, self._wire.backlog_bytes)

    def _on_silent(self, is_silent: bool) -> None:
        self.answers.is_open = not is_silent
        if is_silent:
            self.outbox.begin(0)
        else:
            self._wire.on_alone()


async def _for_ever(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    while True:
        try:
            await run()
        except Exception:
            logger.exception("a part of a publisher on NATS failed, it begins again")
            await asyncio.sleep(_PAUSE_S)
