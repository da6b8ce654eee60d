"""Accepting connections: only as many as there are descriptors for, and none that is not used.

In:  the runner of an application, an address.   Out: a listening server.

A client that connects and says nothing holds a descriptor, and a stream holds two. Without a limit
the router runs out of them, and then it cannot reach its workers or follow their events.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from typing import Final, cast

from aiohttp import web
from aiohttp.http import HttpVersion10
from aiohttp.typedefs import Handler, Middleware

from kvplug.api_errors import ApiError, error_body
from kvplug.http_service import listening_on
from kvplug.server.proxy.malformed import Malformed

# For what is open beside clients and their streams: sockets of events, of health checks, files.
_RESERVED_DESCRIPTORS: Final = 100
_DESCRIPTORS_PER_WORKER: Final = 8
_DESCRIPTORS_PER_STREAM: Final = 2
_MIN_CONNECTIONS: Final = 16
BACKLOG: Final = 1024
"""Connections that wait to be accepted."""
# Of the reserved descriptors: refused connections that stay open until their client has read why.
_MAX_LINGERING: Final = 16
_LINGER_S: Final = 1.0
_UNLIMITED: Final = 2**20

_REFUSAL: Final = ApiError(
    503, "the router has as many connections as it may; try again later", code="router_overloaded"
)
_BODY: Final = json.dumps(error_body(_REFUSAL)).encode()
_ANSWER: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


def raise_descriptor_limit() -> None:
    """1,024, the usual soft limit, is for programs that use select(2); this one does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections(num_workers: int) -> int:
    """How many clients the process has descriptors for, if each has a stream open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        limit = _UNLIMITED
    left = limit - _RESERVED_DESCRIPTORS - _DESCRIPTORS_PER_WORKER * num_workers
    return max(_MIN_CONNECTIONS, left // _DESCRIPTORS_PER_STREAM)


class Listener:
    """start, stop. Read: address, num_refused, malformed. The application gets its `middleware`."""

    def __init__(self, *, max_connections: int, first_request_timeout_s: float) -> None:
        """A connection without a whole head of a request is closed after the timeout."""
        self.num_refused, self.malformed = 0, Malformed()
        self._max_connections, self._timeout_s = max_connections, first_request_timeout_s
        self._unused: set[asyncio.BaseProtocol] = set()
        self._lingering: set[asyncio.Transport] = set()

        @web.middleware
        async def note_request(request: web.Request, handler: Handler) -> web.StreamResponse:
            self._unused.discard(request.protocol)
            if request.version < HttpVersion10:
                return self.malformed.refusal()
            return await handler(request)

        self.middleware: Middleware = note_request

    async def start(
        self, runner: web.AppRunner, host: str, port: int, bound: socket.socket | None = None
    ) -> None:
        """Listen for the application; on a socket that is bound already, if there is one.
        TransportError if the address cannot be had.
        """
        server, loop = runner.server, asyncio.get_running_loop()
        assert server is not None, "runner.setup() first"

        def accept() -> asyncio.Protocol:
            if len(server.connections) >= self._max_connections:
                self.num_refused += 1
                return _Refusal(self._lingering)
            protocol = server()
            self._unused.add(protocol)
            loop.call_later(self._timeout_s, self._close_unused, protocol)
            return protocol

        with listening_on(host, port):
            if bound is None:
                self._server = await loop.create_server(accept, host, port, backlog=BACKLOG)
            else:
                self._server = await loop.create_server(accept, sock=bound, backlog=BACKLOG)
        self.malformed.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, the port that was taken."""
        return cast("tuple[str, int]", self._server.sockets[0].getsockname()[:2])

    def stop(self) -> None:
        """Accept no more; connections stay."""
        self._server.close()
        self.malformed.stop()

    def _close_unused(self, protocol: web.RequestHandler) -> None:
        if protocol in self._unused:
            self._unused.discard(protocol)
            protocol.force_close()


class _Refusal(asyncio.Protocol):
    """Says that there are too many connections, and hangs up.

    A connection that is closed before its request was read is reset, and a reset takes the answer
    with it. So it stays open for a moment and what comes is dropped, as long as few others do.
    """

    def __init__(self, lingering: set[asyncio.Transport]) -> None:
        self._lingering = lingering

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(_ANSWER)
        if len(self._lingering) >= _MAX_LINGERING:
            self._transport.close()
            return
        self._lingering.add(self._transport)
        self._transport.write_eof()
        asyncio.get_running_loop().call_later(_LINGER_S, self._transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lingering.discard(self._transport)
