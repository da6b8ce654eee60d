"""More workers than ZMQ has sockets for, and replay endpoints that are wrong or dead."""

import asyncio
import contextlib
import itertools

import aiohttp

from tests.ingest.publisher import Publisher, ReplayServer, message, stored
from tests.resilience.observed import counted, defects_of, until_health
from tests.server.engine import Engine, served
from tests.server.router_process import router_process

NUM_WORKERS = 350
DESCRIPTORS = 8192
NUM_MESSAGES = 40
FLAGS = ("--block-size", "4")


async def many_workers():
    """350 workers with events and replays; one engine says all of it, on a port for each."""
    async with contextlib.AsyncExitStack() as stack:
        source = await stack.enter_async_context(_publishing(num_ports=NUM_WORKERS))
        urls = [await stack.enter_async_context(served(Engine())) for _ in range(NUM_WORKERS)]
        url, log = await _router(stack, [source], source.workers(urls))
        client = await stack.enter_async_context(aiohttp.ClientSession(url))
        source.say(0)
        await until_health(client, _all_heard(1), "all have heard the message")
        workers = await until_health(client, _all_exact, "all replays have been answered")
    blocks, trust = (
        [w["ranks"][0]["events"][name] for w in workers] for name in ("blocks_stored", "trust")
    )
    seen = f"{NUM_WORKERS} workers: {counted(trust)}; blocks of each: {counted(blocks)}"
    return seen, defects_of(log)


async def swapped_replay():
    """Each of two workers is given the replay endpoint of the other."""
    async with contextlib.AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(_publishing()) for _ in range(2)]
        for source in (first, second):
            for number in range(5):
                source.remember(number)
        swapped = [first.worker(replay=second), second.worker(replay=first)]
        url, log = await _router(stack, [first, second], swapped)
        client = await stack.enter_async_context(aiohttp.ClientSession(url))
        levels = set()
        for number in range(5, 5 + NUM_MESSAGES):
            for source in (first, second):
                source.say(number)
            workers = await until_health(client, _all_heard(number - 4), "the message has come")
            levels |= {worker["ranks"][0]["events"]["trust"] for worker in workers}
        workers = await until_health(client, _all_reasons, "both are named")
        reasons = {worker["ranks"][0]["events"]["reason"] for worker in workers}
    defects = defects_of(log)
    if "exact" in levels:
        defects.append("a cache that is another engine's was called exact")
    return f"trust while they speak: {', '.join(sorted(levels))}; reason: {reasons.pop()}", defects


async def dead_replay():
    """The replay endpoint of a worker is closed: what is heard live is kept."""
    async with contextlib.AsyncExitStack() as stack:
        source = await stack.enter_async_context(_publishing())
        source.server.close()
        url, log = await _router(stack, [source], [source.worker()])
        client = await stack.enter_async_context(aiohttp.ClientSession(url))
        for number in range(NUM_MESSAGES):
            source.say(number)
            await until_health(client, _all_heard(number + 1), "the message has come")
        is_given_up = lambda w: w[0]["ranks"][0]["events"]["replays"]["failed"] >= 3  # noqa: E731
        workers = await until_health(client, is_given_up, "three replays have failed")
        events, resident = (
            workers[0]["ranks"][0]["events"],
            workers[0]["ranks"][0]["cache"]["resident"],
        )
    defects = defects_of(log)
    if resident != NUM_MESSAGES or events["blocks_stored"] != NUM_MESSAGES:
        defects.append(f"expected {NUM_MESSAGES} blocks")
    if events["trust"] == "exact":
        defects.append("called exact, though what came before is unknown")
    return f"{resident} of {NUM_MESSAGES} blocks known, {events['trust']}", defects


class _Source:
    """An engine's service, its publisher and its replay server."""

    def __init__(self, url, number, **server):
        self.url, self._first_token = url, 1000 * number + 1
        self.publisher, self.server = Publisher(), ReplayServer(**server)

    def worker(self, *, replay=None):
        server = (replay or self).server
        return f"{self.url},events={self.publisher.endpoint},replay={server.endpoint}"

    def workers(self, urls):
        return [
            f"{url},events={self.publisher.further_endpoint()},replay={replay}"
            for url, replay in zip(urls, self.server.endpoints, strict=True)
        ]

    def remember(self, number):
        self.server.history.append(message(number, stored(self._first_token + 4 * number)))

    def say(self, number):
        self.remember(number)
        self.publisher.send(self.server.history[-1])


_numbers = itertools.count()


@contextlib.asynccontextmanager
async def _publishing(**server):
    async with served(Engine()) as url:
        source = _Source(url, next(_numbers), **server)
        try:
            yield source
        finally:
            await asyncio.to_thread(source.server.close)
            source.publisher.destroy()


async def _router(stack, sources, workers):
    """Started, and subscribed to all sources: what is published before is lost."""
    started = router_process(*workers, limit=DESCRIPTORS, flags=FLAGS)
    url, log = await stack.enter_async_context(started)
    async with aiohttp.ClientSession(url) as client:
        await until_health(client, _all_connected, "all are connected")
    for source in sources:  # XPUB names a topic once, however many subscribe
        await asyncio.to_thread(source.publisher.wait_for_a_subscriber)
    return url, log


def _all_connected(workers):
    return all(worker["ranks"][0]["events"]["connected"] for worker in workers)


def _all_exact(workers):
    return all(worker["ranks"][0]["events"]["trust"] == "exact" for worker in workers)


def _all_heard(num_messages):
    return lambda workers: all(w["ranks"][0]["events"]["messages"] == num_messages for w in workers)


def _all_reasons(workers):
    return all("replay" in (worker["ranks"][0]["events"]["reason"] or "") for worker in workers)
