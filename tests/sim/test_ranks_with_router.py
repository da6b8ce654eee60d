"""A router in front of a simulated engine with two data-parallel ranks."""

import json
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest

from kvplug.events import Rank
from kvplug.ingest.trust import Trust
from kvplug.router.config import RouterConfig
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.service import RouterService
from kvplug.sim.engine_service import EngineService
from tests.sim.test_engine_service import config
from tests.waiting import until


@asynccontextmanager
async def routing(make_spec, *, dp_size=2, **router):
    """The service, a client of it, and the engine; make_spec gives the worker its settings."""
    async with AsyncExitStack() as started:
        sizes = config(dp_size=dp_size, replay_endpoint="tcp://127.0.0.1:0")
        engine = await started.enter_async_context(EngineService(sizes))
        settings = ServerConfig(
            workers=(make_spec(engine),), port=0, router=RouterConfig(block_size=4, **router)
        )
        service = await started.enter_async_context(RouterService(settings))
        client = await started.enter_async_context(aiohttp.ClientSession(service.url))
        [worker] = service.fleet.workers.values()
        await until(lambda: worker.is_up, "the engine is up")
        yield service, client, engine


def by_url(engine):
    return WorkerSpec(url=engine.url)


async def ask(client, prompt):
    body = {"prompt": prompt, "max_tokens": 2}
    async with client.post("/v1/completions", json=body) as reply:
        assert reply.status == 200
        return (await reply.json())["usage"]["prompt_tokens_details"]["cached_tokens"]


async def connected(service):
    [worker] = service.fleet.workers.values()
    followers = list(worker.followers.values())
    await until(lambda: all(each.connected for each in followers), "events are followed")
    return followers


@pytest.mark.parametrize("names_endpoint", [False, True])
async def test_each_rank_is_followed_and_chosen_by_its_cache(names_endpoint):
    def spec(engine):
        events = engine.events_endpoint if names_endpoint else None
        return WorkerSpec(url=engine.url, events=events)

    async with routing(spec) as (service, client, engine):
        followers = await connected(service)
        assert [each.rank.dp_rank for each in followers] == [0, 1]
        for number in range(40):
            await ask(client, [number % 6] * 30 + [number] * 9)
        caches = [each.cache for each in engine.engines]
        counts = service.proxy.counts[engine.url]
        assert all(cache.num_queried_tokens for cache in caches)
        assert counts.num_cached_tokens == sum(cache.num_hit_tokens for cache in caches) > 0
        stored = [len(cache.pool.cached_hashes()) for cache in caches]

        def resident():
            return [service.router.cache_size(each.rank).num_resident for each in followers]

        await until(lambda: resident() == stored, "every stored block is known")
        assert {each.trust.level for each in followers} == {Trust.EXACT}


async def test_without_events_the_ranks_share_the_load():
    async with routing(by_url, use_kv_events=False) as (service, client, engine):
        for number in range(8):
            await ask(client, [number] * 30)
        assert [rank.dp_rank for rank in service.router.ranks] == [0, 1]
        assert all(each.cache.num_queried_tokens for each in engine.engines)


async def test_health_and_metrics_tell_the_ranks_apart():
    async with routing(by_url) as (service, client, engine):
        await connected(service)
        await ask(client, [7] * 30)
        async with client.get("/health") as reply:
            [worker] = json.loads(await reply.text())["workers"]
        assert [rank["dp_rank"] for rank in worker["ranks"]] == [0, 1]
        assert len({rank["events"]["endpoint"] for rank in worker["ranks"]}) == 2
        async with client.get("/metrics") as reply:
            text = await reply.text()
        for name in (engine.url, f"{engine.url}#1"):
            assert f'kvplug_events_connected{{worker="{name}"}} 1.0' in text


async def test_events_of_another_rank_are_refused_and_named():
    def rank_1_as_rank_0(engine):
        endpoint = engine._publishers[1].endpoint
        return WorkerSpec(url=engine.url, events=endpoint, dp_size=1)

    async with routing(rank_1_as_rank_0) as (service, _, engine):
        [follower] = await connected(service)
        async with aiohttp.ClientSession(engine.url) as direct:
            headers, body = {"X-data-parallel-rank": "1"}, {"prompt": [7] * 30}
            async with direct.post("/v1/completions", json=body, headers=headers) as reply:
                assert reply.status == 200
        await until(lambda: follower.skipped["other_rank"] > 0, "the events are refused")
        assert follower.trust.level is not Trust.EXACT
        assert len(service.router.index) == 0
        codes = {finding.code for finding in service.diagnosis.look()}
        assert {"data_parallel", "events_skipped"} <= codes


async def test_an_engine_that_comes_back_with_fewer_ranks_has_fewer():
    async with routing(by_url) as (service, client, engine):
        await connected(service)
        [worker] = service.fleet.workers.values()
        for source in ("1",):
            del engine.event_sources[source]
        service.fleet.mark_down(engine.url, "it is restarted")
        await until(lambda: worker.is_up, "it is back")
        assert (len(worker.sources), list(worker.followers)) == (1, [0])
        assert service.router.ranks == [Rank(engine.url)]
        await ask(client, [7] * 30)
