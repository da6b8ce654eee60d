"""Many streams at once, of which some are cancelled, slow, or lose their worker.

Sizes are arguments: tests/resilience/test_load_trouble.py runs smaller ones.
"""

import asyncio
import contextlib
import re
import time

import aiohttp
import psutil
from aiohttp import web

from tests.resilience.observed import (
    counted,
    defects_of,
    percentiles_ms,
    until_health,
)
from tests.resilience.raw_streams import ERROR_EVENT, WHOLE, RawStream
from tests.resilience.servers import (
    BLOCKS_PER_PROMPT,
    NUM_PROMPTS,
    measuring_client,
    publish_blocks,
    simulated_engine,
)
from tests.server.engine import Engine, served
from tests.server.router_process import router_process
from tests.waiting import POLL_S, until

DESCRIPTORS = 16_384
IN_FLIGHT = re.compile(r"^kvplug_requests_in_flight ([\d.]+)$", re.MULTILINE)
MAX_SLOWDOWN_MS = 15.0
FLOOD_PART = b"data: " + b"x" * 65_000 + b"\n\n"
MAX_GROWTH_MB = 100.0
RESTART_LIMIT_S = 5.0


async def cancelled_streams(num_streams=2000, flags=()):
    """2,000 streams held at once; half of their clients leave; the others end."""
    engines = [HoldingEngine(), HoldingEngine()]
    async with (
        served(engines[0]) as first,
        served(engines[1]) as second,
        router_process(first, second, limit=DESCRIPTORS, flags=flags) as (url, log),
        aiohttp.ClientSession(url) as client,
    ):
        await until_health(client, _all_up, "both engines are up")
        streams = await _opened(url, num_streams)
        held = await in_flight(client)
        for stream in streams[::2]:
            stream.cancel()
        await until(lambda: _num_cancelled(engines) == len(streams[::2]), "the engines hear of it")
        for engine in engines:
            engine.gate.set()
        outcomes = await asyncio.gather(*(stream.read_rest() for stream in streams[1::2]))
        left = await _settled(client)
    defects = defects_of(log)
    if held != num_streams or set(outcomes) != {WHOLE}:
        defects.append(f"{held} of {num_streams} held, then {counted(outcomes)}")
    if left:
        defects.append(f"{left} requests count as load, though all have ended")
    seen = f"{num_streams} streams held, {_num_cancelled(engines)} cancelled on the engines"
    return f"{seen}; the others: {counted(outcomes)}; load left: {left:g}", defects


async def killed_worker(num_streams=600, rate=60.0, flags=()):
    """One of three engines is killed while streams run and begin."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(simulated_engine()) for _ in range(3)]
        workers = [f"{e['url']},events={e['events']},replay={e['replay']}" for e in engines]
        router = router_process(*workers, limit=DESCRIPTORS, flags=flags)
        url, log = await stack.enter_async_context(router)
        client = await stack.enter_async_context(aiohttp.ClientSession(url))
        await until_health(client, _all_up, "all engines are up")
        running = []
        for number in range(num_streams):
            running.append(asyncio.create_task(_stream(url, number)))
            if number == num_streams // 2:
                engines[0]["process"].kill()
            await asyncio.sleep(1 / rate)
        outcomes, texts = zip(*await asyncio.gather(*running), strict=True)
        left = await _settled(client)
        at_risk = range(num_streams // 2 - int(2 * rate), num_streams // 2 + 1)
        at_risk = [number for number in at_risk if number >= 0 and outcomes[number] == WHOLE]
        asked = [_stream(engines[1]["url"], number) for number in at_risk]
        whole = [text for _, text in await asyncio.gather(*asked)]
    defects = ["a traceback in the log"] * ("Traceback" in "".join(log))
    if set(outcomes) - {WHOLE, ERROR_EVENT}:
        defects.append("a stream neither ended whole nor with an error event")
    if set(outcomes[num_streams // 2 + 1 :]) != {WHOLE}:
        defects.append("a stream broke that began when the worker was gone")
    if [texts[number] for number in at_risk] != whole:
        defects.append("a stream that went on has another text than an engine gives")
    if left:
        defects.append(f"{left} requests count as load, though all have ended")
    seen = f"{num_streams} streams, a worker killed: {counted(outcomes)}"
    return f"{seen}; load left: {left:g}", defects


async def migrated_streams(num_streams=600):
    """The same, with a router that lets streams go on elsewhere: all end whole."""
    seen, defects = await killed_worker(num_streams, flags=("--migrate-streams",))
    if ERROR_EVENT in seen:
        defects.append("a stream did not go on")
    return seen, defects


async def slow_others(num_slow=100, seconds=10.0, max_slowdown_ms=MAX_SLOWDOWN_MS):
    """Clients that read nothing, and a worker that answers nothing, beside small requests."""
    without = await _small_requests(0, seconds)
    growth_mb, beside = 0.0, await _small_requests(num_slow, seconds)
    (quiet, _), (busy, num_failed), growth_mb = without[:2], beside[:2], beside[2]
    p99_quiet, p99_busy = percentiles_ms(quiet)[1], percentiles_ms(busy)[1]
    defects = without[3] + beside[3]
    if num_failed:
        defects.append(f"{num_failed} small requests failed")
    if p99_busy > p99_quiet + max_slowdown_ms:
        defects.append(f"others waited more than {max_slowdown_ms:g} ms longer")
    if growth_mb > MAX_GROWTH_MB:
        defects.append(f"the router holds {growth_mb:.0f} MB more for clients that do not read")
    return (
        f"{num_slow} clients that read nothing and as many requests that nobody answers: p99 of "
        f"others {p99_busy:.1f} ms, {p99_quiet:.1f} without; the router grew by {growth_mb:.0f} MB"
    ), defects


async def restarted_router(num_restarts=3):
    """The router is started anew: how long until it knows the caches of both engines."""
    durations = []
    async with contextlib.AsyncExitStack() as stack:
        wire = ("--wire", "kvplug")
        engines = [await stack.enter_async_context(simulated_engine(*wire)) for _ in range(2)]
        direct = await stack.enter_async_context(aiohttp.ClientSession())
        for engine in engines:
            await publish_blocks(direct, engine, 0)
        workers = [f"{engine['url']},events={engine['events']}" for engine in engines]
        for _ in range(num_restarts):
            began = time.monotonic()
            async with router_process(*workers, limit=DESCRIPTORS) as (url, log):
                listening = time.monotonic() - began
                async with aiohttp.ClientSession(url) as client:
                    await until_health(client, _all_known, "both caches are known")
                durations.append((listening, time.monotonic() - began))
    defects = defects_of(log)
    if max(total for _, total in durations) > RESTART_LIMIT_S:
        defects.append(f"longer than {RESTART_LIMIT_S:g} s")
    spans = ", ".join(
        f"{total:.1f} s ({listening:.1f} to listen)" for listening, total in durations
    )
    return f"exact after a restart: {spans}", defects


class HoldingEngine(Engine):
    """Counts the clients that leave while it waits for the gate."""

    async def _stream(self, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": []}\n\n')
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        await response.write(b"data: [DONE]\n\n")
        return response


class FloodingEngine(Engine):
    """Streams as fast as somebody reads."""

    async def _stream(self, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(FLOOD_PART)


async def _small_requests(num_slow, seconds):
    """(latencies in seconds, failures, growth of the router in MB, defects)."""
    silent = Engine(models=("silent",))
    silent.behaviour = "silent"
    async with (
        served(FloodingEngine(models=("flood",))) as flood,
        served(silent) as nobody,
        measuring_client() as (small, start, results),
        router_process(flood, nobody, small, limit=DESCRIPTORS) as (url, log),
        aiohttp.ClientSession(url) as client,
    ):
        await until_health(client, _all_up, "all engines are up")
        before = router_memory_mb()
        slow = [await RawStream.open(url, model="flood") for _ in range(num_slow)]
        slow += [await RawStream.open(url, model="silent") for _ in range(num_slow)]
        await start(url)
        await asyncio.sleep(seconds)  # the length of the measurement
        latencies_s, num_failed = await results()
        growth_mb = router_memory_mb() - before
        for stream in slow:
            stream.cancel()
    return latencies_s, num_failed, growth_mb, defects_of(log)


async def _opened(url, number):
    """All of them have their first event; a hundred at a time, for the backlog of the sockets."""
    streams = []
    while len(streams) < number:
        some = [RawStream.open(url) for _ in range(min(100, number - len(streams)))]
        opened = await asyncio.gather(*some)
        await asyncio.gather(*(stream.read_first() for stream in opened))
        streams += opened
    return streams


async def _stream(url, number):
    """How one ended that runs for about a second, and its text."""
    try:
        stream = await RawStream.open(url, prompt=[number, 2, 3], max_tokens=60, ignore_eos=True)
    except OSError as error:
        return type(error).__name__, ""
    return await stream.read_rest(), stream.text()


async def in_flight(client):
    """Requests that count as load."""
    return float(IN_FLIGHT.search(await _metrics(client))[1])


async def _settled(client):
    """What of the load is left; 0 as soon as it is."""
    deadline = time.monotonic() + 30.0
    while left := await in_flight(client):
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(POLL_S)
    return left


def router_memory_mb():
    """Resident, of the router's processes that this one has started."""
    children = psutil.Process().children(recursive=True)
    routers = [each for each in children if "kvplug.router" in each.cmdline()]
    return sum(each.memory_info().rss for each in routers) / 1e6


async def _metrics(client):
    async with client.get("/metrics") as response:
        return await response.text()


def _num_cancelled(engines):
    return sum(engine.num_cancelled for engine in engines)


def _all_up(workers):
    return all(worker["state"] == "up" for worker in workers)


def _all_known(workers):
    ranks = [worker["ranks"][0] for worker in workers]
    return all(
        rank["events"]
        and rank["events"]["trust"] == "exact"
        and rank["cache"]["resident"] >= NUM_PROMPTS * BLOCKS_PER_PROMPT
        for rank in ranks
    )
