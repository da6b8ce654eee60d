"""Engines and clients that cost much less than a router: raw protocols that know two requests.

In:  a number of streams or of requests.   Out: answers to a router, requests to it, what came back.
"""

from __future__ import annotations

import asyncio
import json
from typing import cast

TOKENS = list(range(1, 65))
MODEL = "m"
# As vLLM 0.32 sends it for one token of a chat.
_CHUNK = json.dumps(
    {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1764000000,
        "model": MODEL,
        "choices": [
            {"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None}
        ],
    }
)
_EVENT = f"data: {_CHUNK}\n\n".encode()
_USAGE = {
    "prompt_tokens": 64,
    "completion_tokens": 1,
    "prompt_tokens_details": {"cached_tokens": 0},
}
_ANSWERS = {
    b"POST": {"choices": [{"text": "hi"}], "usage": _USAGE},
    b"/health": {},
    b"/v1/models": {"data": [{"id": MODEL, "root": ""}]},
}
_SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Tue, 24 Nov 2026 23:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_JSON_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Tue, 24 Nov 2026 23:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _whole(answer: object) -> bytes:
    body = json.dumps(answer).encode()
    return _JSON_HEAD % len(body) + body


_WHOLE = {key: _whole(answer) for key, answer in _ANSWERS.items()}
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
_TOKEN = _chunk(_EVENT)
_END = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Engine:
    """Streams `num_chunks` events, one each `interval_s`; answers what does not stream at once."""

    def __init__(self, num_chunks: int, interval_s: float) -> None:
        self.num_chunks, self._interval_s = num_chunks, interval_s
        self.streams: dict[_Served, int] = {}

    async def run(self) -> None:
        """One event of each stream, again and again."""
        while True:
            await asyncio.sleep(self._interval_s)
            for served, num_left in list(self.streams.items()):
                served.transport.write(_TOKEN if num_left else _END)
                if num_left:
                    self.streams[served] = num_left - 1
                else:
                    del self.streams[served]


class _Served(asyncio.Protocol):
    """One connection of a router to the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._begun = engine, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._begun += data
        head, found, body = self._begun.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if not found or len(body) < int(length or 0):
            return
        self._begun = b""
        method, path = head.split(b" ", 2)[:2]
        if b'"stream"' in body:
            self.transport.write(_SSE_HEAD)
            self._engine.streams[self] = self._engine.num_chunks
        else:
            self.transport.write(_WHOLE.get(method if method == b"POST" else path, _NOT_FOUND))


async def serve(engine: Engine) -> asyncio.Server:
    """On a free port."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: _Served(engine), "127.0.0.1", 0)


class _Client(asyncio.Protocol):
    """One connection to a router: one request at a time, and how many times an answer has `end`."""

    def __init__(self, request: bytes, end: bytes) -> None:
        self._request, self._end = request, end
        self.answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self) -> asyncio.Future[bytes]:
        self.answered, self._parts, self._tail = self.answered.get_loop().create_future(), [], b""
        self.transport.write(self._request)
        return self.answered

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._tail = (self._tail + data)[-64:]
        if self._end in self._tail:
            self.answered.set_result(b"".join(self._parts))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.answered.done():
            self.answered.set_exception(ConnectionResetError("the router closed a connection"))


async def _connected(port: int, *, streams: bool) -> _Client:
    body: dict[str, object] = {"model": MODEL, "prompt": TOKENS, "max_tokens": 1}
    if streams:
        body["stream"] = True
    raw = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
        f"Accept: */*\r\nUser-Agent: bench\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    end = b"0\r\n\r\n" if streams else b"}}"
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(
        lambda: _Client(head.encode() + raw, end), "127.0.0.1", port
    )
    return client


async def stream(port: int, num_streams: int) -> int:
    """Events of so many streams at a time."""
    clients = [await _connected(port, streams=True) for _ in range(num_streams)]
    answers = await asyncio.gather(*(client.ask() for client in clients))
    for client in clients:
        client.transport.close()
    return sum(answer.count(b"data: {") for answer in answers)


async def ask(port: int, num_clients: int, num_requests: int) -> int:
    """Answers to so many requests of each client, one after the other."""

    async def one() -> int:
        client, num_ok = await _connected(port, streams=False), 0
        for _ in range(num_requests):
            num_ok += (await client.ask()).startswith(b"HTTP/1.1 200")
        client.transport.close()
        return num_ok

    return sum(await asyncio.gather(*(one() for _ in range(num_clients))))
