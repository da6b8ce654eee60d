"""Clients that never ask, that are too many, or that send very large bodies."""

import asyncio
import contextlib

import aiohttp
from aiohttp import web

from tests.resilience.observed import (
    counted,
    defects_of,
    get_json,
    percentiles_ms,
    post,
    until_health,
)
from tests.resilience.servers import (
    BLOCKS_PER_PROMPT,
    NUM_PROMPTS,
    measuring_client,
    publish_blocks,
    simulated_engine,
)
from tests.server.engine import Engine, served
from tests.server.router_process import router_process

DESCRIPTORS = 1024
NUM_IDLE = 1400
NUM_STREAMS = 1300
MIN_SERVED_STREAMS = 400
NUM_LARGE = 60
MAX_P99_MS = 50.0


async def idle_connections():
    """1,400 connections that say nothing, while two engines publish."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(simulated_engine()) for _ in range(2)]
        workers = [f"{e['url']},events={e['events']},replay={e['replay']}" for e in engines]
        url, log = await stack.enter_async_context(router_process(*workers, limit=DESCRIPTORS))
        client = await stack.enter_async_context(aiohttp.ClientSession(url))
        direct = await stack.enter_async_context(aiohttp.ClientSession())
        await until_health(client, _all_up, "both engines are up")
        idle = await _connections(url, NUM_IDLE)
        await publish_blocks(direct, engines[0], 0)
        await until_health(client, _has_heard, "events come though no connection is left")
        for _, writer in idle:
            writer.close()
        await publish_blocks(direct, engines[1], 0)
        workers = await until_health(client, _all_known, "both caches are known")
    blocks = [worker["ranks"][0]["events"]["blocks_stored"] for worker in workers]
    seen = f"{NUM_IDLE} idle connections: blocks known of two engines {blocks}, exact"
    return seen, defects_of(log)


async def many_streams():
    """1,300 streams at once."""
    engines = [Engine(), Engine()]
    for engine in engines:
        engine.behaviour = "gated"
    async with (
        served(engines[0]) as first,
        served(engines[1]) as second,
        router_process(first, second, limit=DESCRIPTORS) as (url, log),
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as client,
    ):
        posts = [asyncio.create_task(post(client, stream=True)) for _ in range(NUM_STREAMS)]
        pending = set(posts)
        while len(pending) > DESCRIPTORS // 2:  # the surplus is refused; the others wait
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for engine in engines:
            engine.gate.set()
        outcomes = await asyncio.gather(*posts)
        workers = (await get_json(client, "/health"))["workers"]
    defects = defects_of(log)
    if outcomes.count(200) < MIN_SERVED_STREAMS:
        defects.append(f"fewer than {MIN_SERVED_STREAMS} streams were served")
    if set(outcomes) != {200, 503}:
        defects.append("a client got neither an answer nor a 503")
    states = counted(worker["state"] for worker in workers)
    return f"{NUM_STREAMS} streams at once: {counted(outcomes)}; workers {states}", defects


async def large_bodies():
    """Bodies of 26 and 28 MB, one after another, beside a client with small requests.

    They are for another engine, so that nobody but the router is busy with both.
    """
    batch = b'{"model": "large", "prompt": [' + b"[1]," * 6_499_999 + b"[1]]}"
    token_ids = b'{"model": "large", "prompt": [' + b"1," * 13_999_999 + b"1]}"
    async with (
        served(RefusingEngine(models=("large",))) as large,
        measuring_client() as (small, start, results),
        router_process(large, small, limit=DESCRIPTORS) as (url, log),
        aiohttp.ClientSession(url) as client,
    ):
        await until_health(client, _all_up, "both engines are up")
        await start(url)
        statuses = [await _send(client, body) for body in (batch, token_ids) * (NUM_LARGE // 2)]
        latencies_s, num_failed = await results()
    p50, p99, longest = percentiles_ms(latencies_s)
    defects = defects_of(log)
    if p99 > MAX_P99_MS:
        defects.append(f"others waited longer than {MAX_P99_MS:g} ms")
    if num_failed or set(statuses) != {400}:
        defects.append(f"{num_failed} small requests failed; the engine answers large ones 400")
    return (
        f"{NUM_LARGE} bodies of 26 and 28 MB: {counted(statuses)}; {len(latencies_s)} small "
        f"requests meanwhile: p50 {p50:.1f}, p99 {p99:.1f}, longest {longest:.0f} ms"
    ), defects


class RefusingEngine(Engine):
    """Reads a body and says no, as an engine does whose context is shorter."""

    async def generate(self, request):
        await request.read()
        return web.json_response({"error": {"message": "too long"}}, status=400)


async def _connections(url, number):
    host, port = url.removeprefix("http://").split(":")
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(number)]
    assert await idle[-1][0].readline(), "the last one is refused"
    return idle


async def _send(client, body):
    headers = {"Content-Type": "application/json"}
    async with client.post("/v1/completions", data=body, headers=headers) as response:
        await response.read()
        return response.status


def _all_up(workers):
    return all(worker["state"] == "up" for worker in workers)


def _all_known(workers):
    """Every block of every engine, so none of an engine was lost."""
    events = [worker["ranks"][0]["events"] for worker in workers]
    blocks = {each["blocks_stored"] for each in events}
    return blocks == {NUM_PROMPTS * BLOCKS_PER_PROMPT} and {e["trust"] for e in events} == {"exact"}


def _has_heard(workers):
    return any(worker["ranks"][0]["events"]["blocks_stored"] for worker in workers)
