"""The load of `make bench-service`: the same bytes at the same times to each router.

In:  URLs, requests as bytes, an open loop or a closed one.   Out: what became of each request.

Raw HTTP over asyncio's protocols: a client that costs as much as a router would measure itself.
Time begins when a request is due. With several URLs they are taken in turn: that is a client
without a router.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import msgspec
import numpy as np
import uvloop

LIMIT_S = 120.0
DATA, LAST_CHUNK, HEAD_END = b"data: {", b"\r\n0\r\n\r\n", b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Open:
    """At random, `rate` a second on average, whatever comes back."""

    rate: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Closed:
    """So many clients, each sends the next request when it has its answer; none begins after
    `duration_s`.
    """

    clients: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds from when it was due to the first chunk and to the end, and all bytes; a failure."""

    ttft_s: float = -1.0
    total_s: float = -1.0
    received: bytes = b""
    failure: str = ""

    @property
    def num_chunks(self) -> int:
        """Events with JSON."""
        return self.received.count(DATA)

    def usage(self) -> tuple[int, int]:
        """(tokens of the prompt, those of them that were cached) as the engine says."""
        last = self.received[self.received.rindex(DATA) + len(DATA) - 1 :]
        usage = msgspec.json.decode(last[: last.index(b"\n")])["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return usage["prompt_tokens"], details.get("cached_tokens") or 0


def post(body: bytes, path: str = "/v1/completions") -> bytes:
    """A request as it is sent."""
    lines = (
        f"POST {path} HTTP/1.1",
        "host: router",
        "content-type: application/json",
        f"content-length: {len(body)}",
    )
    return "\r\n".join(lines).encode() + HEAD_END + body


def send(urls: Sequence[str], requests: Sequence[bytes], load: Open | Closed) -> list[Answer]:
    """All requests of an open loop; of a closed one, as many as there is time for."""
    gc.collect()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Client(urls).run(requests, load))


class _Client:
    def __init__(self, urls: Sequence[str]) -> None:
        self._addresses = [(part.hostname or "", part.port or 0) for part in map(urlsplit, urls)]
        self._idle: list[list[_Connection]] = [[] for _ in urls]
        self._turns = itertools.cycle(range(len(urls)))
        self._answers: list[Answer] = []

    async def run(self, requests: Sequence[bytes], load: Open | Closed) -> list[Answer]:
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            if isinstance(load, Closed):
                ends_at, rest = began + load.duration_s, itertools.cycle(requests)
                for _ in range(load.clients):
                    tasks.create_task(self._one_by_one(rest, ends_at))
            else:
                gaps = np.random.default_rng(load.seed).exponential(1 / load.rate, len(requests))
                times = began + np.cumsum(gaps)
                for request, due in zip(requests, times.tolist(), strict=True):
                    await asyncio.sleep(due - time.perf_counter())
                    # A timer of uvloop may be up to a millisecond early.
                    tasks.create_task(self._send(request, min(due, time.perf_counter())))
        for connection in itertools.chain.from_iterable(self._idle):
            connection.transport.close()
        return self._answers

    async def _one_by_one(self, requests: Iterator[bytes], ends_at: float) -> None:
        while (now := time.perf_counter()) < ends_at:
            await self._send(next(requests), now)

    async def _send(self, request: bytes, due: float) -> None:
        turn = next(self._turns)
        try:
            async with asyncio.timeout(LIMIT_S):
                connection = await self._connected(turn)
                received = await connection.ask(request)
        except (OSError, TimeoutError) as error:
            self._answers.append(Answer(failure=f"{type(error).__name__}: {error}"))
            return
        self._idle[turn].append(connection)
        first, last = connection.first_at - due, connection.last_at - due
        status, failure = received.split(b"\r\n", 1)[0], ""
        if b" 200" not in status:
            failure = received[:300].decode(errors="replace")
        self._answers.append(Answer(first, last, received, failure))

    async def _connected(self, turn: int) -> _Connection:
        idle = self._idle[turn]
        while idle:
            if not (connection := idle.pop()).transport.is_closing():
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, *self._addresses[turn])
        return connection


class _Connection(asyncio.Protocol):
    """One request at a time."""

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._answer: asyncio.Future[bytes] | None = None

    async def ask(self, request: bytes) -> bytes:
        self.first_at = self.last_at = 0.0
        self._received = bytearray()
        self._length = -1
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._answer

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self.first_at and self._has_begun():
            self.first_at = time.perf_counter()
        if self._is_whole():
            self.last_at = time.perf_counter()
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(bytes(self._received))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError("closed before the answer's end"))

    def _has_begun(self) -> bool:
        return DATA in self._received or self._is_whole()

    def _is_whole(self) -> bool:
        if self._length < 0:
            end = self._received.find(HEAD_END)
            if end < 0:
                return False
            head = bytes(self._received[:end]).lower()
            at = head.find(b"content-length:")
            self._length = (
                end + len(HEAD_END) + int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            )
        if self._length:
            return len(self._received) >= self._length
        return self._received.endswith(LAST_CHUNK)
