"""Engines of the scenarios: simulated ones that publish, and one beside small requests.

In:  flags.   Out: processes that are up, and their addresses.
"""

import asyncio
import contextlib
import json
import os
import sys

from tests.resilience.observed import LIMIT_S

BLOCKS_PER_PROMPT = 4
NUM_PROMPTS = 10


@contextlib.asynccontextmanager
async def simulated_engine(*more_flags):
    """Yields its addresses: url, events, replay; and its process."""
    command = (sys.executable, "-m", "kvplug.sim.engine", "--served-model-name", "m")
    flags = ("--replay-endpoint", "tcp://127.0.0.1:0", "--prefill-tokens-per-s", "100000")
    async with _process(*command, *flags, *more_flags) as process:
        yield json.loads(await process.stdout.readline()) | {"process": process}


@contextlib.asynccontextmanager
async def measuring_client():
    """A process that is both an engine and a client with small requests.

    Yields (the engine's URL, start(router's URL), results() -> [latency in seconds], failures).
    """
    async with _process(sys.executable, "-m", "tests.resilience.measuring_client") as process:

        async def start(router_url):
            process.stdin.write(f"{router_url}\n".encode())
            await process.stdin.drain()

        async def results():
            process.stdin.write_eof()
            async with asyncio.timeout(LIMIT_S):
                return json.loads(await process.stdout.readline())

        yield (await process.stdout.readline()).decode().strip(), start, results


@contextlib.asynccontextmanager
async def _process(*command):
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # a scenario has killed it
                process.kill()
        await process.wait()


async def publish_blocks(client, engine, first_token):
    """New prompts, straight to the engine, so that it publishes their blocks."""
    for number in range(NUM_PROMPTS):
        start = first_token + 1000 * number
        prompt = list(range(start, start + 16 * BLOCKS_PER_PROMPT))
        body = {"model": "m", "prompt": prompt, "max_tokens": 1}
        async with client.post(f"{engine['url']}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
