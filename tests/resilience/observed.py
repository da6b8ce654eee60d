"""What a scenario looks at: the router's health and log, latencies of requests."""

import asyncio
import statistics
import time
from collections import Counter

import aiohttp

from tests.waiting import POLL_S

COMPLETION = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4}
LIMIT_S = 60.0


async def get_json(client, path):
    """The body of an answer; waits while connections are refused."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                async with client.get(path) as response:
                    if response.status != 503:
                        return await response.json()
            except aiohttp.ClientError:
                pass  # refused, and reset
            await asyncio.sleep(POLL_S)


async def until_health(client, condition, what):
    """The workers of /health, as soon as the condition holds for them."""
    deadline = time.monotonic() + LIMIT_S
    while not condition(workers := (await get_json(client, "/health"))["workers"]):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {LIMIT_S:g} s in vain until {what}: {workers}")
        await asyncio.sleep(POLL_S)
    return workers


async def post(client, path="/v1/completions", **fields):
    """The status of one completion, or the name of what the client got instead."""
    try:
        async with client.post(path, json={**COMPLETION, **fields}) as response:
            await response.read()
            return response.status
    except (aiohttp.ClientError, TimeoutError) as error:
        return type(error).__name__


def defects_of(log):
    """What no log may have: a healthy worker that is down, an exception that nobody caught."""
    text = "".join(log)
    found = [line.strip() for line in log if " is down: " in line]
    return found + ["a traceback in the log"] * ("Traceback" in text)


def counted(outcomes):
    """503 x 12, 200 x 9."""
    return ", ".join(f"{what} x {count}" for what, count in Counter(outcomes).most_common())


def percentiles_ms(seconds):
    """(p50, p99, longest), milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return cuts[49] * 1e3, cuts[98] * 1e3, max(seconds) * 1e3
