"""Send a client's request to a worker, and tell what a failure means.

In:  a worker's URL, a client's request.   Out: the worker's answer, or an error that says whose
fault it is: LostError is the worker's, ApiError the router's own or the answer's.

Engines close idle connections: uvicorn, and with it vLLM and SGLang, after 5 s. The router closes
them sooner. If the worker closed one just before it was used again, the same worker is asked once
more on a new connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Final, NamedTuple, Self
from urllib.parse import urlsplit

from aiohttp import web

from kvplug.api_errors import ApiError
from kvplug.http_service import RANK_HEADER, is_local_shortage
from kvplug.server.config import ServerConfig
from kvplug.server.observability.journey import Step, current
from kvplug.server.proxy.connection import Connection, Headers, LostError
from kvplug.server.worker_spec import socket_of
from kvplug.server.workers.asking import WorkerSession

_KEEPALIVE_S: Final = 2.0
_PORTS: Final = {"http": 80, "https": 443}
# RFC 9110, 7.6.1: these concern one connection; length and host are set anew on each side.
_HOP_BY_HOP: Final = frozenset(
    (
        *(b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"host", b"content-length", b"expect"),
    )
)
# The server has decoded the body, and the router reads the usage in the answer.
_REPLACED: Final = frozenset((b"content-encoding", b"accept-encoding"))
_RANK: Final = RANK_HEADER.encode()


class Outgoing(NamedTuple):
    """A client's request on its way to a worker; `dp_rank`: None if the worker has one rank;
    `path`: if it is not the client's.
    """

    worker: str
    dp_rank: int | None
    client: web.Request
    body: bytes
    path: str = ""


class _Address(NamedTuple):
    """Where a worker's API is; `prefix`: of each path; `socket`: "" if it is not a Unix one."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    named: bytes
    prefix: str
    socket: str = ""

    @classmethod
    def of(cls, url: str) -> Self:
        if (path := socket_of(url)) is not None:
            return cls("", 0, None, b"localhost", "", path)
        parts = urlsplit(url)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        named = parts.netloc.rpartition("@")[2].encode()
        port = parts.port or _PORTS[parts.scheme]
        return cls(parts.hostname or "", port, tls, named, parts.path.rstrip("/"))


class Upstream:
    """An async context manager; post; `session` for what the router asks on its own."""

    def __init__(self, config: ServerConfig) -> None:
        self.session = WorkerSession(config)
        self._connect_timeout_s = config.connect_timeout_s
        self._max_silence_s = config.request_timeout_s
        self._idle: defaultdict[str, list[Connection]] = defaultdict(list)
        self._addresses: dict[str, _Address] = {}

    async def __aenter__(self) -> Self:
        await self.session.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        await self.session.__aexit__(kind, error, traceback)

    @asynccontextmanager
    async def post(self, request: Outgoing) -> AsyncIterator[Connection]:
        """The worker's answer to the client's request; LostError, ApiError."""
        address = self._address_of(request.worker)
        head = _head_of(request, address)
        connection = self._idle_to(request.worker)
        is_reused = connection is not None
        try:
            connection = connection or await self._connected(address)
            current().mark(Step.CONNECT)
            try:
                await connection.ask(head, request.body)
            except LostError:
                if not is_reused or connection.has_spoken:
                    raise
                connection = await self._connected(address)
                await connection.ask(head, request.body)
            current().mark(Step.ANSWER)
            yield connection
        finally:
            if connection is not None:
                self._release(request.worker, connection)

    def forget(self, worker: str) -> None:
        """Keep nothing of a worker; what it is answering goes on."""
        self._addresses.pop(worker, None)
        for connection in self._idle.pop(worker, []):
            connection.close()

    def _idle_to(self, worker: str) -> Connection | None:
        """The one that was used last; those that the worker closed are dropped."""
        idle = self._idle.get(worker)
        while idle:
            connection = idle.pop()
            if connection.is_open:
                return connection
        return None

    def _release(self, worker: str, connection: Connection) -> None:
        is_removed = worker not in self._addresses
        if is_removed or not (connection.is_reusable and connection.is_open):
            connection.close()
            return
        connection.rest(_KEEPALIVE_S)
        idle = self._idle[worker]
        idle.append(connection)
        if not idle[0].is_open:  # the oldest ones close first
            self._idle[worker] = [each for each in idle if each.is_open]

    def _address_of(self, worker: str) -> _Address:
        if worker not in self._addresses:
            self._addresses[worker] = _Address.of(worker)
        return self._addresses[worker]

    async def _connected(self, address: _Address) -> Connection:
        loop = asyncio.get_running_loop()
        connection = Connection(self._max_silence_s)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                if address.socket:
                    await loop.create_unix_connection(lambda: connection, address.socket)
                else:
                    await loop.create_connection(
                        lambda: connection, address.host, address.port, ssl=address.tls
                    )
        except OSError as error:
            raise connect_error(error) from error
        return connection


def connect_error(error: OSError) -> LostError | ApiError:
    """Of a connection that could not be opened: the worker's fault, or this machine's."""
    if is_local_shortage(error):
        message = f"the router cannot open a connection to a worker: {error.strerror}"
        return ApiError(503, message, code="router_overloaded")
    return LostError(str(error) or type(error).__name__, was_reached=False)


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers that concern the other side, too, repeated ones included."""
    dropped, lowered = _HOP_BY_HOP, [(name.lower(), name, value) for name, value in headers]
    for lower, _, value in lowered:
        if lower == b"connection":
            dropped |= {name.strip().lower() for name in value.split(b",")}
    return [(name, value) for lower, name, value in lowered if lower not in dropped]


def _head_of(request: Outgoing, address: _Address) -> bytes:
    client, replaced = request.client, _REPLACED
    target = f"{address.prefix}{request.path or client.path_qs}".encode()
    head = b"%s %s HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\nAccept-Encoding: identity\r\n" % (
        client.method.encode(),
        target,
        address.named,
        len(request.body),
    )
    if request.dp_rank is not None:
        head += b"%s: %d\r\n" % (_RANK, request.dp_rank)
        replaced |= {_RANK.lower()}
    for name, value in current().headers.items():
        head += f"{name}: {value}\r\n".encode()
        replaced |= {name.lower().encode()}
    kept = passed_on(client.raw_headers)
    return head + lines_of(each for each in kept if each[0].lower() not in replaced) + b"\r\n"


def lines_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Headers as they go over a connection."""
    return b"".join([b"%s: %s\r\n" % header for header in headers])
