"""An ask over NATS, and the messages of its answer on an inbox of its own.

In:  a subject that takes asks, an ask.   Out: a ReplayAnswer of kvplug/transports/base.py.

The publisher waits now and then until what it sent was taken: it gives a message a reply subject,
and goes on when something comes there. So a slow reader is not flooded.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from kvplug.errors import TransportError
from kvplug.nats.connection import NatsConnection
from kvplug.transports.base import Message
from kvplug.transports.nats_messages import ends_answer, is_status, message_of

logger = logging.getLogger(__name__)

# A publisher of ours never has more than 1.5 MiB on its way.
_MAX_QUEUED_BYTES: Final = 64 * 2**20


def run_in(connection: NatsConnection, coroutine: Coroutine[Any, Any, None]) -> None:
    """In its loop, unless that has ended."""
    try:
        connection.submit(coroutine)
    except RuntimeError:
        coroutine.close()


class NatsReplayAnswer:
    """Made in the event thread; the connection's loop fills it."""

    def __init__(
        self,
        connection: NatsConnection,
        subject: str,
        topic: bytes,
        request: bytes,
        wake: Callable[[], None],
    ) -> None:
        """`wake`: called when something has come. TransportError while there is no server."""
        if not connection.is_connected:
            raise TransportError(f"cannot ask at {subject}: the connection to NATS is lost")
        self.is_ended = False
        self._connection, self._topic, self._wake = connection, topic, wake
        self._queue: deque[Msg] = deque()
        self._num_bytes_in = self._num_bytes_out = 0
        self._is_closed = False
        self._subscription: Subscription | None = None
        run_in(connection, self._ask(subject, request))

    def filenos(self) -> tuple[int, ...]:
        """None: whoever polls is woken through the source."""
        return ()

    def receive(self, max_messages: int) -> list[Message]:
        """Messages that have arrived; may set `is_ended`."""
        messages: list[Message] = []
        with suppress(IndexError):
            while len(messages) < max_messages and not self.is_ended:
                self._take(self._queue.popleft(), messages)
        return messages

    def close(self) -> None:
        """Give up the rest."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.clear()
            run_in(self._connection, self._unsubscribe())

    def _take(self, msg: Msg, messages: list[Message]) -> None:
        self._num_bytes_out += len(msg.data)
        self.is_ended = ends_answer(msg)
        if msg.data:
            messages.append(message_of(self._topic, msg, is_live=True))
        if msg.reply:
            run_in(self._connection, self._tell_taken(msg))

    # -- in the connection's loop --

    async def _ask(self, subject: str, request: bytes) -> None:
        client = await self._connection.connected()
        if self._is_closed:
            return
        inbox = client.new_inbox()
        try:
            self._subscription = await client.subscribe(
                inbox, cb=self._hear, pending_msgs_limit=0, pending_bytes_limit=0
            )
            await client.publish(subject, request, reply=inbox)
        except (nats.errors.Error, OSError) as error:  # the request ends at its deadline
            logger.debug("an ask at %s could not be sent: %s", subject, error)

    async def _hear(self, msg: Msg) -> None:
        if self._is_closed or is_status(msg):
            return
        self._num_bytes_in += len(msg.data)
        if self._num_bytes_in - self._num_bytes_out > _MAX_QUEUED_BYTES:
            await self._unsubscribe()  # it stays silent, and is asked for again
            return
        self._queue.append(msg)
        self._wake()

    async def _tell_taken(self, msg: Msg) -> None:
        client = await self._connection.connected()
        with suppress(nats.errors.Error, OSError):
            await client.publish(msg.reply, b"", reply=msg.subject)

    async def _unsubscribe(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            with suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()
