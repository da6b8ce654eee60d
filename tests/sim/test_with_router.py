"""A router in front of simulated engines: what it predicts is what they find."""

from contextlib import AsyncExitStack

import aiohttp

from kvplug.router.config import RouterConfig
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.service import RouterService
from kvplug.sim.service import EngineService
from tests.sim.test_service import config
from tests.waiting import until


async def test_the_router_predicts_what_the_engines_find():
    async with AsyncExitStack() as started:
        engines = [await started.enter_async_context(EngineService(config())) for _ in range(2)]
        workers = tuple(WorkerSpec(url=each.url, events=each.events_endpoint) for each in engines)
        router = await started.enter_async_context(
            RouterService(ServerConfig(workers=workers, port=0, router=RouterConfig(block_size=4)))
        )
        followers = [worker.follower for worker in router.fleet.workers.values()]
        await until(lambda: all(each.connected for each in followers), "events are followed")
        session = await started.enter_async_context(aiohttp.ClientSession())
        for number in range(30):
            prompt = [number % 5] * 30 + [number] * 9
            async with session.post(
                f"{router.url}/v1/completions", json={"prompt": prompt, "max_tokens": 2}
            ) as reply:
                assert reply.status == 200
        for engine in engines:
            counts, cache = router.proxy.counts[engine.url], engine.engine.cache
            assert counts.num_prompt_tokens == cache.num_queried_tokens > 0
            assert counts.num_cached_tokens == cache.num_hit_tokens > 0
