"""A router that stops: what is in flight ends, or is told that it is over."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.service import RouterService
from tests.server.engine import Engine, served
from tests.server.test_service import COMPLETION, error_of
from tests.waiting import until

STREAM = {**COMPLETION, "stream": True, "max_tokens": 5}


@asynccontextmanager
async def stopping(engine, client, *, grace_s=20.0, path="/v1/completions", body=STREAM):
    """A router with a request in flight that begins to stop: (service, answer)."""
    async with served(engine) as url:
        config = ServerConfig(workers=(WorkerSpec(url=url),), port=0, grace_s=grace_s)
        service = await RouterService(config).__aenter__()
        answer = asyncio.create_task(client.post(service.url + path, json=body))
        await until(lambda: engine.num_requests == 1, "the request is at work")
        end = asyncio.create_task(service.__aexit__(None, None, None))
        await until(lambda: service.draining.has_begun, "it stops")
        try:
            yield service, answer
        finally:
            await end


async def test_a_stream_ends_and_other_requests_close_their_connections():
    engine = Engine()
    engine.behaviour = "gated"
    async with aiohttp.ClientSession() as client, served(engine) as url:
        config = ServerConfig(workers=(WorkerSpec(url=url),), port=0, grace_s=20.0)
        service = await RouterService(config).__aenter__()
        # Connections that are open already.
        kept = [aiohttp.ClientSession(service.url) for _ in range(2)]
        for each in kept:
            async with each.get("/health") as response:
                assert response.status == 200
        answer = await client.post(service.url + "/v1/completions", json=STREAM)
        end = asyncio.create_task(service.__aexit__(None, None, None))
        await until(lambda: service.draining.has_begun, "it stops")
        async with kept[0].get("/health") as response:
            assert (response.status, (await response.json())["status"]) == (503, "draining")
            assert response.headers["Connection"] == "close"
        engine.behaviour = "ok"
        async with kept[1].post("/v1/completions", json=COMPLETION) as response:
            assert response.status == 200
            assert response.headers["Connection"] == "close"
        with pytest.raises(aiohttp.ClientConnectorError):
            await kept[0].get("/health")
        engine.gate.set()
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        await end
        for each in kept:
            await each.close()
    assert engine.num_cancelled == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_after_the_grace_a_stream_ends_with_an_error_event(path):
    engine = Engine()
    engine.behaviour = "slow"
    async with (
        aiohttp.ClientSession() as client,
        stopping(engine, client, grace_s=0.1, path=path) as (service, answer),
    ):
        response = await answer
        text = (await response.read()).decode()
        assert len(service.router.load) == 0
    *_, last, end = text.split("\n\n")
    assert end == ""
    error = json.loads(last.partition("data: ")[2])["error"]
    assert error["message"] == "the router is stopping"
    assert last.startswith("event: error\n") == (path == "/v1/messages")
    await until(lambda: engine.num_cancelled == 1, "the engine works on it no more")


async def test_after_the_grace_a_request_is_answered():
    engine = Engine()
    engine.behaviour = "silent"
    began = time.monotonic()
    async with (
        aiohttp.ClientSession() as client,
        stopping(engine, client, grace_s=0.2, body=COMPLETION) as (_, answer),
        await answer as response,
    ):
        assert (await error_of(response))[:2] == (503, "router_stopping")
        assert response.headers["Connection"] == "close"
    assert 0.2 < time.monotonic() - began < 20
