"""nats-py's client, with each attempt to reconnect closing what the one before it left open.

nats-py 2.16 drops the socket of an attempt that failed after it had connected (the server ended, or
did not answer in time). It stays open until the garbage collector finds it.
"""

from __future__ import annotations

from typing import Any

from nats.aio.client import Client, Srv
from nats.aio.transport import TcpTransport


class ReconnectingClient(Client):
    """One open socket at most, whatever becomes of the attempts."""

    async def _connect_to_server(self, s: Srv) -> None:
        if isinstance(self._transport, TcpTransport):
            self._transport.close()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(s)


async def connect(servers: str | list[str], **options: Any) -> ReconnectingClient:  # noqa: ANN401
    """A connected client; options as of `nats.connect`, errors as nats-py raises them."""
    client = ReconnectingClient()
    await client.connect(servers, **options)
    return client
