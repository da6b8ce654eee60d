"""nats-py's client, which leaves no socket and no subscription behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import nats.errors
from nats.aio.client import Client, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import (
    DEFAULT_SUB_PENDING_BYTES_LIMIT,
    DEFAULT_SUB_PENDING_MSGS_LIMIT,
)
from nats.aio.transport import TcpTransport


class ReconnectingClient(Client):
    """Each attempt to reconnect closes what the one before it left open.

    nats-py 2.16 drops the socket of an attempt that failed after it had connected (the server
    ended, or did not answer in time). It stays open until the garbage collector finds it.
    """

    async def _connect_to_server(self, s: Srv) -> None:
        if isinstance(self._transport, TcpTransport):
            self._transport.close()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(s)


async def connect(servers: str | list[str], **options: Any) -> ReconnectingClient:  # noqa: ANN401
    """A connected client; options as of `nats.connect`, errors as nats-py raises them."""
    client = ReconnectingClient()
    await client.connect(servers, **options)
    return client


@asynccontextmanager
async def subscribed(
    client: Client,
    subject: str,
    on_message: Callable[[Msg], Awaitable[None]],
    *,
    is_bounded: bool = True,
) -> AsyncIterator[None]:
    """Hear what is said on a subject, until the end of the block. `is_bounded`: drop messages when
    more wait than nats-py keeps by default.
    """
    subscription = await client.subscribe(
        subject,
        cb=on_message,
        pending_msgs_limit=DEFAULT_SUB_PENDING_MSGS_LIMIT if is_bounded else 0,
        pending_bytes_limit=DEFAULT_SUB_PENDING_BYTES_LIMIT if is_bounded else 0,
    )
    try:
        yield
    finally:
        with suppress(nats.errors.Error, OSError):  # the connection is closed
            await subscription.unsubscribe()
