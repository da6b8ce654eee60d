"""Connections that are too many, too slow or never used, on real sockets."""

import asyncio
import contextlib
import json
import resource
import time

import aiohttp
import pytest

from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.proxy.listening import max_connections
from kvplug.server.service import RouterService
from tests.plain_kernels import with_plain_kernels
from tests.server.engine import Engine, served
from tests.server.router_process import router_process
from tests.server.test_service import COMPLETION, serving
from tests.waiting import until


@pytest.fixture
async def engine():
    engine = Engine()
    async with served(engine) as url:
        yield engine, url


async def connect(service):
    host, port = service.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def read_all(reader):
    """What comes until the other side closes."""
    async with asyncio.timeout(20):
        return await reader.read()


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"], ids=["nothing", "half a head"]
)
async def test_a_connection_without_a_request_is_closed(engine, sent):
    async with serving([engine[1]], client_timeout_s=0.5) as (service, _):
        reader, writer = await connect(service)
        writer.write(sent)
        assert await read_all(reader) == b""
        writer.close()


async def test_half_a_body_is_answered_and_closed(engine):
    async with serving([engine[1]], client_timeout_s=0.5) as (service, _):
        reader, writer = await connect(service)
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"
        writer.write(head.encode())
        async with asyncio.timeout(20):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
            headers = await reader.readuntil(b"\r\n\r\n")
            assert b"request_timeout" in await reader.readexactly(length_of(headers))
        writer.close()


def length_of(headers):
    return int(headers.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])


async def test_a_request_that_is_at_work_outlasts_the_timeout(engine):
    engine[0].behaviour = "gated"
    async with serving([engine[1]], client_timeout_s=0.2) as (_, client):
        body = {**COMPLETION, "stream": True}
        async with client.post("/v1/completions", json=body) as response:
            await asyncio.sleep(0.6)  # three times the limit: nothing is to happen meanwhile
            engine[0].gate.set()
            assert b"[DONE]" in await response.read()


async def test_a_connection_too_many_is_told_so(engine):
    async with serving([engine[1]], max_connections=2) as (service, client):
        (_, first), (_, second) = await connect(service), await connect(service)
        reader, third = await connect(service)
        assert (await read_all(reader)).startswith(b"HTTP/1.1 503")
        first.close()
        await until_answered(client)
        async with client.get("/metrics") as response:
            assert "kvplug_connections_refused_total" in await response.text()
        second.close()
        third.close()


async def until_answered(client):
    """Wait until a place is free. A refused client may see a reset before it sees the 503."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get("/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.02)


async def test_a_refused_client_may_send_its_request_and_read_why(engine):
    """A connection that is closed with a request on its way is reset: sending fails."""
    async with serving([engine[1]], max_connections=1) as (service, _):
        _, first = await connect(service)
        reader, late = await connect(service)
        assert (await reader.readline()).startswith(b"HTTP/1.1 503")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 8000000\r\n\r\n"
        late.write(head + 8_000_000 * b"x")
        await late.drain()
        assert b"router_overloaded" in await read_all(reader)
        late.close()
        first.close()


def test_connections_are_bounded_by_the_descriptors(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert max_connections(2) == (1024 - 100 - 16) // 2
    assert max_connections(1000) == 16
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 0))
    assert max_connections(2) > 100_000


def limited_router(worker):
    """With 256 descriptors, so that few clients are too many."""
    return router_process(worker, limit=256, env=with_plain_kernels(PYTHONUNBUFFERED="1"))


@pytest.mark.slow
async def test_idle_connections_beyond_the_descriptors_take_nobody_down(engine):
    async with limited_router(engine[1]) as (url, lines):
        host, port = url.removeprefix("http://").split(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(350)]
        try:
            # The router has accepted them all, so nobody is left to take the places freed below.
            assert (await read_all(idle[-1][0])).startswith(b"HTTP/1.1 503")
            for _, writer in idle[:20]:
                writer.close()
            async with aiohttp.ClientSession(url) as client:
                await until_answered(client)
                async with client.get("/health") as response:
                    assert [w["state"] for w in (await response.json())["workers"]] == ["up"]
                async with client.post("/v1/completions", json=COMPLETION) as response:
                    assert response.status == 200
        finally:
            for _, writer in idle:
                writer.close()
    assert "Traceback" not in "".join(lines)


@pytest.mark.slow
async def test_streams_beyond_the_descriptors_are_told_so(engine):
    engine[0].behaviour = "gated"
    async with limited_router(engine[1]) as (url, lines):
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(url, connector=connector) as client:
            posts = [asyncio.create_task(stream(client)) for _ in range(150)]
            await until(lambda: sum(post.done() for post in posts) >= 50, "the surplus is refused")
            engine[0].gate.set()
            outcomes = await asyncio.gather(*posts)
            assert set(outcomes) <= {200, 503}
            assert outcomes.count(200) >= 60
            await until_answered(client)
            async with client.get("/health") as response:
                assert [w["state"] for w in (await response.json())["workers"]] == ["up"]
    assert "Traceback" not in "".join(lines)


async def stream(client):
    body = json.dumps({**COMPLETION, "stream": True})
    headers = {"Content-Type": "application/json"}
    async with client.post("/v1/completions", data=body, headers=headers) as response:
        await response.read()
        return response.status


async def test_the_grace_is_spent_once(engine):
    engine[0].behaviour = "silent"
    config = ServerConfig(workers=(WorkerSpec(url=engine[1]),), port=0, grace_s=3.0)
    async with aiohttp.ClientSession() as client:
        async with RouterService(config) as service:
            url = service.url + "/v1/completions"
            post = asyncio.create_task(client.post(url, json=COMPLETION))
            await until(lambda: engine[0].num_requests == 1, "the request is at work")
            began = time.monotonic()
        assert 2.9 < time.monotonic() - began < 5.5
        async with await post as response:
            assert response.status == 503
