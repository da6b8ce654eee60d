"""The router as three processes, before simulated engines: one of them writes, two serve."""

import asyncio
import os
import re
import signal
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest

from kvplug.sim.engine_service import EngineService
from tests.server.router_process import router_process
from tests.sim.test_engine_service import config
from tests.waiting import POLL_S, until

PREFIX = list(range(100, 180))  # 20 blocks
NUM_REQUESTS = 24
LIMIT_S = 60.0
pytestmark = pytest.mark.slow


@asynccontextmanager
async def two_processes():
    """Engines, the URL of the router, its log."""
    async with AsyncExitStack() as started:
        engines = [
            await started.enter_async_context(EngineService(config(wire="kvplug")))
            for _ in range(2)
        ]
        workers = [f"{each.url},events={each.events_endpoint}" for each in engines]
        # In blocks: milliseconds are learnt, and on a full machine an engine seems slow at times.
        flags = ("--processes", "2", "--health-interval-s", "0.2", "--cost", "blocks")
        router = router_process(*workers, limit=4096, flags=flags)
        yield engines, *await started.enter_async_context(router)


async def ask(url, prompt):
    """On a connection of its own: any process may accept it. Its status and cached tokens."""
    body = {"model": "simulated", "prompt": prompt, "max_tokens": 1}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{url}/v1/completions", json=body) as response,
    ):
        answer = await response.json()
        assert response.status == 200, answer
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def ask_all(url, first):
    """Each prompt, which all begin alike, goes where the prefix is, unless the index could not be
    read in time: on a full machine the writer may be descheduled in the middle of an event.
    """
    before, cached = await num_given_up(url), []
    for n in range(NUM_REQUESTS):
        cached.append(await ask(url, [*PREFIX, first + n, 7, 7, 7]))
        await until_idle(url)  # or the next one would see the load of this one
    num_by_load = await num_given_up(url) - before
    assert set(cached) <= {0, len(PREFIX)}
    assert cached.count(0) <= num_by_load <= NUM_REQUESTS / 4
    return num_by_load


async def num_given_up(url):
    """How many requests went by load alone, as the index could not be read in time."""
    return sum((await values(url, "kvplug_shared_reads_given_up_total")).values())


async def read(url, path):
    async with aiohttp.ClientSession() as client, client.get(url + path) as response:
        return await (response.text() if path == "/metrics" else response.json())


async def values(url, name):
    """By label, what /metrics says of a metric."""
    found = re.findall(rf"^{name}(?:{{(.*)}})? (.*)$", await read(url, "/metrics"), re.MULTILINE)
    return {label: float(value) for label, value in found}


async def status_of_change(url):
    """Of a worker that one process would know and the other one not."""
    async with aiohttp.ClientSession() as client, client.post(f"{url}/workers", json={}) as answer:
        return answer.status


async def states(url):
    health = await read(url, "/health")
    return {each["name"]: each["state"] for each in health["processes"]}


def pid_of(name, lines):
    """Of the process that was started last by this name."""
    ready = [re.search(rf"{name} \(process (\d+)\) is ready", line) for line in lines]
    return [int(found[1]) for found in ready if found][-1]


async def kill(name, lines):
    """SIGKILL, and wait until another one is there."""
    pid = pid_of(name, lines)
    os.kill(pid, signal.SIGKILL)
    what = f"{name} is there again"
    await until(lambda: pid_of(name, lines) != pid, what, timeout_s=LIMIT_S)


async def test_two_processes_decide_and_answer_as_one_and_survive_each_other():
    async with two_processes() as (engines, url, lines):
        assert await ask(url, PREFIX) == 0
        await until_indexed(url, 20)
        num_by_load = await ask_all(url, 1000)
        served = [engine.engines[0].num_prompt_tokens for engine in engines]
        assert num_by_load or min(served) == 0  # all went where the prefix is
        reads = await values(url, "kvplug_shared_reads_total")
        assert len(reads) == 2
        assert set((await values(url, "kvplug_shared_news_missed_total")).values()) == {0.0}
        assert set((await values(url, "kvplug_process_up")).values()) == {1.0}
        assert min(reads.values()) > 0
        assert sum((await values(url, "kvplug_requests_total")).values()) == NUM_REQUESTS + 1
        assert await status_of_change(url) == 501
        health = await read(url, "/health")
        assert health["status"] == "ok"
        assert {each["ranks"][0]["events"]["trust"] for each in health["workers"]} == {"exact"}

        counts = await values(url, "kvplug_requests_total")
        await kill("reader0", lines)
        assert await values(url, "kvplug_requests_total") == counts
        await ask_all(url, 2000)
        await kill("writer", lines)
        await ask_all(url, 3000)
        await until_indexed(url, 20)
        assert set((await states(url)).values()) == {"up"}
        assert list((await values(url, "kvplug_requests_in_flight")).values()) == [0.0]
    assert not [line for line in lines if "Traceback" in line or "failed" in line], "".join(lines)


async def until_idle(url):
    async with asyncio.timeout(LIMIT_S):
        while any((await values(url, "kvplug_requests_in_flight")).values()):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


async def has_blocks(url, num_blocks):
    return max((await values(url, "kvplug_index_blocks")).values(), default=0) >= num_blocks


async def until_indexed(url, num_blocks):
    async with asyncio.timeout(LIMIT_S):
        while not await has_blocks(url, num_blocks):  # noqa: ASYNC110 - of another process
            await asyncio.sleep(POLL_S)
