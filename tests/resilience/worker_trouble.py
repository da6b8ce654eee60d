"""Engines that close idle connections, and a request that no engine survives."""

import asyncio
import operator
import random

import aiohttp

from tests.resilience.observed import counted, defects_of, get_json, post
from tests.server.engine import Engine, served
from tests.server.router_process import router_process

DESCRIPTORS = 1024
KEEP_ALIVE_S = 5.0  # uvicorn's, so vLLM's
DURATION_S = 90.0
REQUESTS_PER_S = 10.0
PEAK_EVERY_S, PEAK_REQUESTS = 15.0, 40
POISON = [6, 6, 6]
NUM_POISON, NUM_INNOCENT = 5, 200


async def keep_alive():
    """Two workers with 5 s of keep-alive: Poisson traffic with peaks, and pauses of just 5 s."""
    async with (
        served(Engine(), keepalive_timeout=KEEP_ALIVE_S) as first,
        served(Engine(), keepalive_timeout=KEEP_ALIVE_S) as second,
        router_process(first, second, limit=DESCRIPTORS) as (url, log),
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as client,
    ):
        outcomes = await _poisson_with_peaks(client) + await _bursts(client)
    defects = defects_of(log)
    if set(outcomes) != {200}:
        defects.append("a request was not answered, though both workers are well")
    return f"{DURATION_S:g} s of Poisson traffic, then bursts: {counted(outcomes)}", defects


async def poison():
    """A request that every engine dies of before it answers, between innocent ones."""
    engines = [FragileEngine() for _ in range(4)]
    async with (
        served(engines[0]) as first,
        served(engines[1]) as second,
        served(engines[2]) as third,
        served(engines[3]) as fourth,
        router_process(first, second, third, fourth, limit=DESCRIPTORS) as (url, log),
        aiohttp.ClientSession(url) as client,
    ):
        innocent = asyncio.create_task(_one_by_one(client))
        poisonous, num_killed = [], []
        for _ in range(NUM_POISON):
            before = [engine.num_deaths for engine in engines]
            poisonous.append(await post(client, prompt=POISON))
            after = [engine.num_deaths for engine in engines]
            num_killed.append(sum(map(operator.ne, before, after)))
        outcomes = await innocent
        states = counted(w["state"] for w in (await get_json(client, "/health"))["workers"])
    defects = [] if set(outcomes) == {200} else ["an innocent request was not answered"]
    if max(num_killed) > 2:
        defects.append("a poison request was sent to more than two workers")
    if 200 in poisonous or "Traceback" in "".join(log):
        defects.append("a poison request ended as if nothing had happened")
    return (
        f"{NUM_POISON} poison requests: {counted(poisonous)}, each on at most {max(num_killed)} "
        f"workers; innocent ones: {counted(outcomes)}; workers in the end {states}"
    ), defects


class FragileEngine(Engine):
    """Closes the connection of a poison request without an answer."""

    num_deaths = 0

    async def generate(self, request):
        if (await request.json())["prompt"] == POISON:
            self.num_deaths += 1
            request.transport.close()
            await asyncio.Event().wait()
        return await super().generate(request)


async def _poisson_with_peaks(client):
    draw, loop = random.Random(1), asyncio.get_running_loop()
    end = loop.time() + DURATION_S
    next_peak, posts = loop.time() + PEAK_EVERY_S, []
    while loop.time() < end:
        await asyncio.sleep(draw.expovariate(REQUESTS_PER_S))
        at_once = 1
        if loop.time() >= next_peak:
            at_once, next_peak = PEAK_REQUESTS, next_peak + PEAK_EVERY_S
        posts += [asyncio.create_task(post(client)) for _ in range(at_once)]
    return await asyncio.gather(*posts)


async def _bursts(client):
    """The worst case: each burst comes when the connections of the last one are being closed."""
    outcomes = []
    for offset_ms in (-4, -2, -1, 0, 1, 2, 4):
        outcomes += await asyncio.gather(*(post(client) for _ in range(PEAK_REQUESTS)))
        await asyncio.sleep(KEEP_ALIVE_S + offset_ms / 1000)
    return outcomes


async def _one_by_one(client):
    return [await post(client, prompt=[number, 2, 3]) for number in range(NUM_INNOCENT)]
