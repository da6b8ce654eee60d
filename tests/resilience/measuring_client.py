"""An engine and a client with small requests to it, through a router, in one process:

python -m tests.resilience.measuring_client. In: a router's URL as a line; the end of the input.
Out: the engine's URL as a line; [[seconds per request, ...], requests that failed] as JSON.
"""

import asyncio
import json
import sys
import time

import aiohttp

from tests.resilience.observed import post
from tests.server.engine import Engine, served

PAUSE_S = 0.005  # between two requests


async def main():
    async with served(Engine()) as engine_url:
        print(engine_url, flush=True)
        router_url = (await asyncio.to_thread(sys.stdin.readline)).strip()
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        print(json.dumps(await measure(router_url, ended)), flush=True)


async def measure(router_url, ended):
    latencies_s, num_failed = [], 0
    async with aiohttp.ClientSession(router_url) as client:
        while not ended.done():
            began_at = time.perf_counter()
            num_failed += await post(client) != 200
            latencies_s.append(time.perf_counter() - began_at)
            await asyncio.sleep(PAUSE_S)
    return latencies_s, num_failed


if __name__ == "__main__":
    asyncio.run(main())
