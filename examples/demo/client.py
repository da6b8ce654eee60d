"""The client of a workload: sends it, and takes the time.

In:  chat requests, the URL of a router or an engine.
Out: one outcome per request: the times as a user has them, the cached tokens as the engine
reports them.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp

from examples.demo.workload import ChatRequest

CHAT_PATH = "/v1/chat/completions"
REQUEST_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Completed:
    """An answer that came to its end."""

    ttft_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A request without a whole answer."""

    reason: str


Outcome = Completed | Failed


async def send_all(
    requests: Sequence[ChatRequest],
    *,
    url: str,
    concurrency: int,
    on_outcome: Callable[[], None],
) -> list[Outcome]:
    """Send the requests in their order, at most `concurrency` at a time."""
    gate = asyncio.Semaphore(concurrency)

    async def send_in_turn(request: ChatRequest) -> Outcome:
        async with gate:
            outcome = await send(session, request)
        on_outcome()
        return outcome

    limit = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    async with aiohttp.ClientSession(url, timeout=limit) as session, asyncio.TaskGroup() as tasks:
        sending = [tasks.create_task(send_in_turn(request)) for request in requests]
    return [task.result() for task in sending]


async def send(session: aiohttp.ClientSession, request: ChatRequest) -> Outcome:
    """Send one request and read its answer to the end."""
    started = time.perf_counter()
    try:
        async with session.post(CHAT_PATH, json=request) as response:
            if response.status != HTTPStatus.OK:
                return Failed(f"status {response.status}: {(await response.text())[:200]}")
            return await _read_answer(response, started)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return Failed(f"{type(error).__name__}: {error}")


async def _read_answer(response: aiohttp.ClientResponse, started: float) -> Outcome:
    ttft_s, usage = None, None
    async for chunk in _chunks(response):
        if "error" in chunk:
            return Failed(f"the stream broke off: {chunk['error']}")
        if chunk.get("choices") and ttft_s is None:
            ttft_s = time.perf_counter() - started
        usage = chunk.get("usage") or usage
    if ttft_s is None or usage is None:
        return Failed("the stream ended early")
    return Completed(
        ttft_s=ttft_s,
        total_s=time.perf_counter() - started,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent stream, read to its end so that the connection is kept."""
    async for line in response.content:
        field, _, data = line.partition(b":")
        if field == b"data" and data.strip() != b"[DONE]":
            yield json.loads(data)
