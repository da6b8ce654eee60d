"""The load of `make bench-outcome`: sends requests in their order, and takes the time.

In:  requests, a router's URL, a closed loop or an open one.
Out: what became of each request, as its user has it; what was sent; what the client cost.

Time begins when a request is sent, in an open loop when it should have been: a client that is late
does not make a router look quick.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

import aiohttp
import msgspec
import numpy as np
import uvloop

from tests.benchmarks.outcome_requests import Ask, Form

LIMIT_S = 120.0
DATA, DONE = b"data: ", b"[DONE]"


@dataclass(frozen=True, slots=True)
class Closed:
    """So many clients; each sends the next request when it has its answer."""

    clients: int


@dataclass(frozen=True, slots=True)
class Open:
    """At random, `rate` a second on average, whatever comes back; before that, the first
    `num_warm_up` requests in a closed loop: at this rate caches would be filled by a queue.
    """

    rate: float
    seed: int
    num_warm_up: int
    clients: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds since the load began, and from there to the first token and to the end; -1 where
    nothing came, with a reason.
    """

    due_s: float
    ttft_s: float = -1.0
    total_s: float = -1.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failure: str = ""


@dataclass(slots=True)
class Sent:
    """`answers` by number of the request; `order` as they left; `digest` of all bytes in order."""

    answers: list[Answer]
    order: list[int] = field(default_factory=list)
    digest: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    lateness_s: list[float] = field(default_factory=list)


def send(url: str, asks: Sequence[Ask], form: Form, load: Closed | Open) -> Sent:
    """Everything, to the last answer."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Client(url, asks, form).run(load))


class _Client:
    def __init__(self, url: str, asks: Sequence[Ask], form: Form) -> None:
        self.url = url
        self.bodies = [(ask.path(form), ask.body(form)) for ask in asks]
        self.sent = Sent([Answer(-1.0)] * len(asks))
        self._hash = hashlib.sha256()

    async def run(self, load: Closed | Open) -> Sent:
        limit = aiohttp.ClientTimeout(total=LIMIT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.url, timeout=limit, connector=connector) as session:
            self.session, cpu_s, self.began = session, time.process_time(), time.perf_counter()
            if isinstance(load, Closed):
                await self._in_turn(len(self.bodies), load.clients)
            else:
                await self._in_turn(load.num_warm_up, load.clients)
                await self._at_random(load)
        self.sent.wall_s = self._now()
        self.sent.cpu_s = time.process_time() - cpu_s
        self.sent.digest = self._hash.hexdigest()
        return self.sent

    async def _in_turn(self, num_requests: int, clients: int) -> None:
        numbers = iter(range(num_requests))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(self._one_by_one(numbers))

    async def _one_by_one(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._send(number, self._now())

    async def _at_random(self, load: Open) -> None:
        num_requests = len(self.bodies) - load.num_warm_up
        gaps = np.random.default_rng(load.seed).exponential(1 / load.rate, num_requests)
        times = self._now() + np.cumsum(gaps)
        async with asyncio.TaskGroup() as tasks:
            for number, due_s in enumerate(times.tolist(), load.num_warm_up):
                await asyncio.sleep(due_s - self._now())
                tasks.create_task(self._send(number, due_s))

    async def _send(self, number: int, due_s: float) -> None:
        path, body = self.bodies[number]
        self.sent.order.append(number)
        self._hash.update(body)
        self.sent.lateness_s.append(self._now() - due_s)
        headers = {"Content-Type": "application/json"}
        try:
            async with self.session.post(path, data=body, headers=headers) as response:
                if response.status != HTTPStatus.OK:
                    failure = f"status {response.status}: {(await response.text())[:200]}"
                    self.sent.answers[number] = Answer(due_s, failure=failure)
                else:
                    self.sent.answers[number] = await self._read(response, due_s)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self.sent.answers[number] = Answer(due_s, failure=f"{type(error).__name__}: {error}")

    async def _read(self, response: aiohttp.ClientResponse, due_s: float) -> Answer:
        ttft_s, last = -1.0, b""
        async for line in response.content:
            if not line.startswith(DATA) or line.startswith(DONE, len(DATA)):
                continue
            last = line[len(DATA) :]
            if ttft_s < 0 and _has_content(last):
                ttft_s = self._now() - due_s
        usage = msgspec.json.decode(last).get("usage") if last else None
        if ttft_s < 0 or not usage:
            return Answer(due_s, failure=f"the stream ended early: {last[:200]!r}")
        return Answer(
            due_s,
            ttft_s,
            self._now() - due_s,
            usage["prompt_tokens"],
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        )

    def _now(self) -> float:
        return time.perf_counter() - self.began


def _has_content(chunk: bytes) -> bool:
    """Whether a token is in it: the first chunk of a chat may have the role alone."""
    choices = msgspec.json.decode(chunk).get("choices") or [{}]
    return bool(choices[0].get("text") or (choices[0].get("delta") or {}).get("content"))
