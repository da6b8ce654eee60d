"""Answers to asks that come over NATS.

In:  asks on a publisher's ask subject, each with an inbox to answer to.
Out: the messages of each answer there, one by one.

NATS does not slow down a sender for a slow reader: its server cuts the reader off. So about every
512 KiB a message has a reply subject, which is the ask subject. Whoever has read it sends an empty
message there, with its inbox as the reply; at most two of these are open. An answer is made in a
thread, one at a time, and at most four are on their way, so that events go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Final, Generic, Protocol, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvplug.engines.life import Numbered
from kvplug.nats.client import subscribed
from kvplug.nats.connection import NatsConnection
from kvplug.nats.subjects import NUMBER_HEADER

UNREAD_LIMIT_S: Final = 5.0
"""A reader that does not read for so long is left; it asks again when it does."""

MAX_READERS: Final = 4
MAX_WAITING: Final = 256

_MAX_ASK_BYTES: Final = 1024
_UNREAD_BYTES: Final = 2**19
_MAX_UNREAD: Final = 2
_TURN_BYTES: Final = 2**16  # then others of the loop have theirs

_Ask = TypeVar("_Ask")


class Maker(Protocol[_Ask]):
    """What asks are, and what is said to them."""

    @property
    def pause_s(self) -> float:
        """How long until `may_answer` can change."""

    def read(self, request: bytes) -> _Ask | None:
        """The ask in a message; None if it is none."""

    def may_answer(self, ask: _Ask) -> bool:
        """Whether it can be answered now."""

    def answer(self, ask: _Ask) -> list[Numbered]:
        """Its messages, in a thread of its own; one call at a time."""


class NatsAnswers(Generic[_Ask]):
    """`run` is a task of the connection's loop. Set is_open to False to pass over asks.

    Read num_answers, num_abandoned, num_malformed, failures by cause.
    """

    def __init__(
        self,
        connection: NatsConnection,
        subject: str,
        maker: Maker[_Ask],
        logger: logging.Logger,
        *,
        names_numbers: bool = False,
    ) -> None:
        """`names_numbers`: each message has its number in a header, as it is not in the payload."""
        self.is_open = True
        self.num_answers = self.num_abandoned = self.num_malformed = 0
        self.failures: Counter[str] = Counter()
        self._connection, self._subject, self._maker = connection, subject, maker
        self._logger, self._names_numbers = logger, names_numbers
        self._asked: dict[str, asyncio.Task[None]] = {}
        self._unread: dict[str, asyncio.Semaphore] = {}
        self._making, self._places = asyncio.Lock(), asyncio.Semaphore(MAX_READERS)

    async def run(self) -> None:
        """Take asks, for ever."""
        self._client = await self._connection.connected()
        async with subscribed(self._client, self._subject, self._on_message):
            try:
                await asyncio.Event().wait()
            finally:
                for task in self._asked.values():
                    task.cancel()

    async def _on_message(self, msg: Msg) -> None:
        inbox = msg.reply
        if not msg.data:
            if inbox in self._unread:
                self._unread[inbox].release()
            return
        ask = self._maker.read(msg.data) if inbox and len(msg.data) <= _MAX_ASK_BYTES else None
        if ask is None:
            self.num_malformed += 1
        elif self.is_open and inbox not in self._asked and len(self._asked) < MAX_WAITING:
            task = asyncio.create_task(self._answer(self._client, inbox, ask))
            self._asked[inbox] = task
            task.add_done_callback(lambda _: self._asked.pop(inbox, None))

    async def _answer(self, client: Client, inbox: str, ask: _Ask) -> None:
        try:
            async with self._places:
                messages = await self._made(ask)
                await self._send(client, inbox, messages)
            self.num_answers += 1
        except nats.errors.MaxPayloadError as error:  # it will not pass the next time, either
            self._count_failure(error)
        except (TimeoutError, nats.errors.Error, OSError) as error:
            self.num_abandoned += 1
            self._logger.debug("kvplug: an answer was abandoned: %s", error)
        except Exception as error:  # noqa: BLE001  # others get theirs; this one asks again
            self._count_failure(error)

    async def _made(self, ask: _Ask) -> list[Numbered]:
        async with self._making:
            while not self._maker.may_answer(ask):  # noqa: ASYNC110 - its clock says when
                await asyncio.sleep(self._maker.pause_s)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(None, self._maker.answer, ask)

    async def _send(self, client: Client, inbox: str, messages: list[Numbered]) -> None:
        unread = self._unread[inbox] = asyncio.Semaphore(_MAX_UNREAD)
        num_unread = num_in_turn = 0
        try:
            for number, payload in messages:
                headers = {NUMBER_HEADER: str(number)} if self._names_numbers else None
                num_unread, num_in_turn = num_unread + len(payload), num_in_turn + len(payload)
                is_marked = num_unread >= _UNREAD_BYTES
                if is_marked:
                    num_unread = 0
                    async with asyncio.timeout(UNREAD_LIMIT_S):
                        await unread.acquire()
                await client.publish(inbox, payload, self._subject if is_marked else "", headers)
                if num_in_turn >= _TURN_BYTES:
                    num_in_turn = 0
                    await asyncio.sleep(0)
        finally:
            del self._unread[inbox]

    def _count_failure(self, error: Exception) -> None:
        cause = type(error).__name__
        self.failures[cause] += 1
        if self.failures[cause] == 1:
            self._logger.warning("kvplug: an answer failed: %s: %s", cause, error, exc_info=error)
