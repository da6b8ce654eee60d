"""A router of two processes in a cluster: the writer follows the stream and makes the snapshots."""

import asyncio
import socket
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from kvplug.sim.engine_service import EngineService
from tests.nats_servers import free_ports, nats_servers
from tests.server.processes.test_processes import (
    LIMIT_S,
    PREFIX,
    ask,
    ask_all,
    kill,
    read,
    until_indexed,
    values,
)
from tests.server.router_process import router_process
from tests.sim.test_engine_service import config
from tests.waiting import POLL_S

pytestmark = pytest.mark.slow
FLAGS = ("--processes", "2", "--health-interval-s", "0.2", "--cost", "blocks")


@asynccontextmanager
async def in_cluster(url, *more, suffix=""):
    """The URL of a router before an engine that publishes to NATS; its log."""
    [port] = free_ports(1)
    async with AsyncExitStack() as started:
        engine = await started.enter_async_context(EngineService(config(port=port, wire="kvplug")))
        flags = (*FLAGS, "--nats", url, *more)
        router = router_process(engine.url + suffix, limit=4096, flags=flags)
        yield await started.enter_async_context(router)


async def cluster_of(url):
    return (await read(url, "/health"))["cluster"]


async def until_exact(url):
    """All ranks, by what the writer says."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            workers = (await read(url, "/health"))["workers"]
            trusts = {rank["events"]["trust"] for each in workers for rank in each["ranks"]}
            if trusts == {"exact"}:
                return
            await asyncio.sleep(POLL_S)


@pytest.mark.parametrize("suffix", ["", ",events=nats"])
async def test_two_processes_follow_the_stream_and_begin_again_where_it_is(monkeypatch, suffix):
    with nats_servers() as [node]:
        monkeypatch.setenv("KVPLUG_NATS", node.url)
        async with in_cluster(node.url, suffix=suffix) as (url, lines):
            assert await ask(url, PREFIX) == 0
            await until_indexed(url, 20)
            await ask_all(url, 1000)
            await until_exact(url)
            before = await cluster_of(url)
            assert before["router_id"].endswith(url.rpartition(":")[2])
            assert before["router_id"].startswith(socket.gethostname()[:10])
            assert before["is_connected"]
            assert list((await values(url, "kvplug_nats_connected")).values()) == [1.0]
            await kill("writer", lines)
            await until_exact(url)
            await until_indexed(url, 20)
            await ask_all(url, 2000)
            assert (await cluster_of(url))["router_id"] == before["router_id"]
    assert not [line for line in lines if "Traceback" in line], "".join(lines)


async def test_a_writer_that_is_replaced_does_not_reset_the_state_again(monkeypatch):
    with nats_servers() as [node]:
        monkeypatch.setenv("KVPLUG_NATS", node.url)
        async with in_cluster(node.url, "--router-reset-states") as (url, lines):
            await ask(url, PREFIX)
            await until_indexed(url, 20)
            generation = (await cluster_of(url))["generation"]
            await kill("writer", lines)
            await until_exact(url)
            assert (await cluster_of(url))["generation"] == generation
