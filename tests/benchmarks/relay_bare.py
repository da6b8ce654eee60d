"""The least that a proxy can be on each stack: it decides nothing and knows nothing of answers.

In:  the name of a stack, ports of engines.   Out: a port, printed; then it passes requests on.

    python -m tests.benchmarks.relay_bare aiohttp 8101 8102
"""

from __future__ import annotations

import asyncio
import itertools
import sys

import aiohttp
import httptools
import uvloop
from aiohttp import web


async def _aiohttp(ports: list[int]) -> int:
    """Bare aiohttp, on both sides."""
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    turns = itertools.cycle(ports)

    async def relay(request: web.Request) -> web.StreamResponse:
        url = f"http://127.0.0.1:{next(turns)}{request.path_qs}"
        async with session.post(url, data=await request.read()) as answer:
            if answer.content_type != "text/event-stream":
                return web.Response(body=await answer.read(), content_type=answer.content_type)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
            await response.write_eof()
            return response

    return await _serve_aiohttp(relay)


async def _serve_aiohttp(relay) -> int:
    app = web.Application()
    app.router.add_post("/{path:.*}", relay)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner.addresses[0][1]


class _Upstream(asyncio.Protocol):
    """httptools' parser on one connection to an engine; `to` gets on_head, on_part, on_end."""

    def __init__(self) -> None:
        self.to = None

    def connection_made(self, transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def ask(self, to, request: bytes) -> None:
        self.to, self._parser = to, httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self.transport.write(request)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.to.on_head(self._parser.get_status_code(), self._headers)

    def on_body(self, part: bytes) -> None:
        self.to.on_part(part)

    def on_message_complete(self) -> None:
        to, self.to = self.to, None
        to.on_end()


class _Pool:
    def __init__(self, ports: list[int]) -> None:
        self._idle = {port: [] for port in ports}
        self._turns = itertools.cycle(ports)

    async def take(self) -> tuple[int, _Upstream]:
        port = next(self._turns)
        if self._idle[port]:
            return port, self._idle[port].pop()
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(_Upstream, "127.0.0.1", port)
        return port, upstream

    def put(self, port: int, upstream: _Upstream) -> None:
        self._idle[port].append(upstream)


def _request(path: bytes, body: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: engine\r\nContent-Length: %d\r\n\r\n%s" % (
        path,
        len(body),
        body,
    )


class _Relay:
    """One answer, from an upstream connection to a client's transport."""

    def __init__(self, transport) -> None:
        self._transport = transport
        self.ended = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._is_chunked = any(n == b"transfer-encoding" for n, _ in headers)
        lines = b"".join(b"%s: %s\r\n" % pair for pair in headers)
        self._transport.write(b"HTTP/1.1 %d OK\r\n%s\r\n" % (status, lines))

    def on_part(self, part: bytes) -> None:
        if self._is_chunked:
            part = b"%x\r\n%s\r\n" % (len(part), part)
        self._transport.write(part)

    def on_end(self) -> None:
        if self._is_chunked:
            self._transport.write(b"0\r\n\r\n")
        self.ended.set_result(None)


class _Written(web.StreamResponse):
    """An answer whose bytes went to the transport already."""

    async def prepare(self, request):
        return None

    async def write_eof(self, data=b""):
        pass


async def _httptools_upstream(ports: list[int]) -> int:
    """aiohttp for clients, raw protocols for engines."""
    pool = _Pool(ports)

    async def relay(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        port, upstream = await pool.take()
        to = _Relay(request.transport)
        upstream.ask(to, _request(request.path_qs.encode(), body))
        await to.ended
        pool.put(port, upstream)
        response = _Written()
        response._keep_alive = True
        return response

    return await _serve_aiohttp(relay)


class _Front(asyncio.Protocol):
    """httptools' parser on one connection of a client; a task for each request."""

    def __init__(self, pool: _Pool) -> None:
        self._pool, self._parser = pool, httptools.HttpRequestParser(self)

    def connection_made(self, transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._parts: list[bytes] = []
        self._headers: list[tuple[bytes, bytes]] = []

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        self._task = asyncio.create_task(self._relay(b"".join(self._parts)))

    async def _relay(self, body: bytes) -> None:
        port, upstream = await self._pool.take()
        to = _Relay(self._transport)
        upstream.ask(to, _request(self._path, body))
        await to.ended
        self._pool.put(port, upstream)


async def _httptools(ports: list[int]) -> int:
    """Raw protocols on both sides."""
    pool = _Pool(ports)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Front(pool), "127.0.0.1", 0)
    return server.sockets[0].getsockname()[1]


STACKS = {
    "aiohttp": _aiohttp,
    "httptools_upstream": _httptools_upstream,
    "httptools": _httptools,
}


async def _main(stack: str, ports: list[int]) -> None:
    print("listening on port", await STACKS[stack](ports), flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], [int(port) for port in sys.argv[2:]]))
