"""Signals to a router that is a process of its own, with a request in flight that does not end."""

import asyncio
import signal

import aiohttp
import pytest

from tests.plain_kernels import with_plain_kernels
from tests.server.engine import Engine, served
from tests.server.router_process import started
from tests.server.test_service import COMPLETION
from tests.waiting import until

GRACE_S = 600


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "num_processes"),
    [
        ((signal.SIGTERM, signal.SIGINT), 1),
        ((signal.SIGINT, signal.SIGTERM), 1),
        ((signal.SIGTERM, signal.SIGTERM), 2),
    ],
    ids=["TERM-INT", "INT-TERM", "2-processes"],
)
async def test_a_second_signal_ends_a_router_whose_requests_do_not_end(signals, num_processes):
    engine = Engine()
    engine.behaviour = "silent"
    flags = ("--grace-s", str(GRACE_S), "--processes", str(num_processes))
    env = with_plain_kernels(PYTHONUNBUFFERED="1")
    async with (
        served(engine) as worker,
        started(worker, limit=256, flags=flags, env=env) as (process, url, lines),
        aiohttp.ClientSession(url) as client,
    ):
        post = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
        await until(lambda: engine.num_requests == 1, "the request is at work")
        process.send_signal(signals[0])
        await until(lambda: any("stopping" in line for line in lines), "it stops")
        assert not post.done()
        process.send_signal(signals[1])
        async with asyncio.timeout(10):
            assert await process.wait() == 1, "".join(lines)
        with pytest.raises(aiohttp.ClientError):
            await post
