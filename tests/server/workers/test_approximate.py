"""The standalone router without events."""

from contextlib import asynccontextmanager

import aiohttp
import pytest

from kvplug.router.config import RouterConfig
from kvplug.server.cli import parse
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.diagnosis.finding import Code
from kvplug.server.service import RouterService
from tests.server.engine import Engine, served
from tests.server.test_service import COMPLETION
from tests.waiting import until

WORKER = "http://127.0.0.1:8100,events=tcp://127.0.0.1:5557"
PROMPT = {"model": "m", "prompt": list(range(12))}


@asynccontextmanager
async def approximate(engine, **more):
    """A router before this engine: (service, client, worker)."""
    async with served(engine) as url:
        # The endpoint is not listened to; nobody would answer there.
        workers = (WorkerSpec(url=url, events="tcp://127.0.0.1:9", topic="kv@pod"),)
        router = RouterConfig(block_size=4, use_kv_events=False)
        config = ServerConfig(
            workers=workers, port=0, router=router, health_interval_s=0.05, grace_s=0.2, **more
        )
        async with RouterService(config) as service, aiohttp.ClientSession(service.url) as client:
            [worker] = service.fleet.workers.values()
            yield service, client, worker


def test_the_flags_become_the_configuration():
    config = parse(["--worker", WORKER, "--no-kv-events", "--approximate-ttl-s", "30"])[0].router
    assert (config.use_kv_events, config.approximate_ttl_s) == (False, 30.0)
    config = parse(["--worker", WORKER])[0].router
    assert (config.use_kv_events, config.approximate_ttl_s) == (True, 120.0)


def test_a_time_to_live_of_nothing_is_rejected(capsys):
    with pytest.raises(SystemExit):
        parse(["--worker", WORKER, "--no-kv-events", "--approximate-ttl-s", "0"])
    assert "approximate_ttl_s must be a finite number above 0, got 0.0" in capsys.readouterr().err


@pytest.mark.parametrize("more", [{}, {"events_bind": "tcp://127.0.0.1:*"}])
async def test_requests_are_predicted_from_those_before_them(more):
    async with approximate(Engine(), **more) as (service, client, worker):
        for _ in range(2):
            async with client.post("/v1/completions", json=PROMPT) as response:
                assert response.status == 200
        assert service.proxy.counts[worker.url].num_cached_tokens == 12
        assert service.fleet.events_endpoint is None
        assert worker.followers == {}


async def test_health_and_metrics_say_that_it_is_approximate():
    async with approximate(Engine()) as (_, client, worker):
        async with client.get("/health") as response:
            body = await response.json()
        [events] = [each["ranks"][0]["events"] for each in body["workers"]]
        assert (events["trust"], events["connected"]) == ("approximate", False)
        assert "events are not used" in events["reason"]
        assert "--no-kv-events" in events["fix"]
        async with client.get("/metrics") as response:
            text = await response.text()
        assert f'kvplug_trust{{level="approximate",worker="{worker.url}"}} 1.0' in text
        assert f'kvplug_trust{{level="exact",worker="{worker.url}"}} 0.0' in text
        assert "kvplug_events_connected{" not in text


async def test_missing_events_are_no_finding():
    engine = Engine()
    engine.says = {"/version": {"version": "0.32.0"}, "/kv_event_sources": {}}
    async with approximate(engine) as (service, client, worker):
        await until(lambda: worker.url in service.diagnosis._asked, "the engine was asked")
        for _ in range(10):
            async with client.post("/v1/completions", json=COMPLETION) as response:
                assert response.status == 200
        codes = {finding.code for finding in service.diagnosis.look()}
        assert codes <= {Code.NO_CACHED_TOKENS}


async def test_a_worker_that_comes_back_is_taken_to_be_empty():
    async with approximate(Engine()) as (service, client, worker):
        async with client.post("/v1/completions", json=PROMPT) as response:
            assert response.status == 200
        assert len(service.router.index.speculative) == 3
        service.fleet.mark_down(worker.url, "a test says so")
        await until(lambda: worker.is_up, "the next look finds it up")
        assert len(service.router.index.speculative) == 0


async def test_what_was_routed_is_counted():
    async with approximate(Engine()) as (_, client, _):
        async with client.post("/v1/completions", json=PROMPT) as response:
            assert response.status == 200
        async with client.get("/metrics") as response:
            text = await response.text()
        assert 'kvplug_routed_blocks{block_size="4",model="m"} 3.0' in text
        assert 'kvplug_routed_blocks_lost_total{block_size="4",model="m"} 0.0' in text
