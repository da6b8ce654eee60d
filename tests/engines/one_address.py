"""A router that is told one address of a real engine, and what it finds.

In:  an address, what differs in its environment.   Out: the standalone router as a process.
"""

import asyncio
import os
from contextlib import asynccontextmanager

import aiohttp

from examples.launch.engine_server import MODEL_NAME
from tests.server.router_process import router_process
from tests.waiting import POLL_S

TEXT = "The quick brown fox jumps over the lazy dog, and then it does so once more. " * 12


@asynccontextmanager
async def told_only(address, env=()):
    """Yields a client session, once the worker is up and followed, and the lines of the log."""
    environment = {**os.environ, **dict(env), "PYTHONUNBUFFERED": "1"}
    environment.pop("HF_HUB_CACHE", None)
    async with (
        router_process(address, limit=256, env=environment) as (url, lines),
        aiohttp.ClientSession(url) as client,
    ):
        await known(client)
        yield client, lines


async def known(client):
    """What /health says of the only worker, once it is up and all of its ranks are followed."""
    async with asyncio.timeout(30):
        while True:
            async with client.get("/health") as response:
                [worker] = (await response.json())["workers"]
            events = [rank["events"] for rank in worker["ranks"]]
            if worker["state"] == "up" and all(each and each["connected"] for each in events):
                return worker
            await asyncio.sleep(POLL_S)


async def routes_by_prefix(client, name, text):
    """A text that comes again is expected where it was, and was there."""
    first, before = await complete(client, text), predicted(await metrics_of(client), name)
    again = await complete(client, text)
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens"] > cached > 0
    assert predicted(await metrics_of(client), name) - before == cached


async def complete(client, prompt):
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 4}
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def metrics_of(client):
    async with client.get("/metrics") as response:
        return await response.text()


def predicted(metrics, worker):
    line = f'kvplug_predicted_cached_tokens_total{{worker="{worker}"}} '
    return float(metrics.partition(line)[2].partition("\n")[0] or 0)
