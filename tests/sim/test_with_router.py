"""A router in front of simulated engines: what it predicts is what they find."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import aiohttp
import pytest

from kvplug.audit.expectation import Verdict
from kvplug.router.config import RouterConfig
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.service import RouterService
from kvplug.sim.engine_service import EngineService
from tests.sim.test_engine_service import config
from tests.waiting import until


@pytest.mark.parametrize("use_kv_events", [True, False])
async def test_the_router_predicts_what_the_engines_find(use_kv_events):
    async with AsyncExitStack() as started:
        engines = [await started.enter_async_context(EngineService(config())) for _ in range(2)]
        workers = tuple(WorkerSpec(url=each.url, events=each.events_endpoint) for each in engines)
        router = await started.enter_async_context(
            RouterService(
                ServerConfig(
                    workers=workers,
                    port=0,
                    router=RouterConfig(block_size=4, use_kv_events=use_kv_events),
                )
            )
        )
        followers = [f for w in router.fleet.workers.values() for f in w.followers.values()]
        assert len(followers) == (2 if use_kv_events else 0)
        await until(lambda: all(each.connected for each in followers), "events are followed")
        session = await started.enter_async_context(aiohttp.ClientSession())
        for number in range(30):
            prompt = [number % 5] * 30 + [number] * 9
            async with session.post(
                f"{router.url}/v1/completions", json={"prompt": prompt, "max_tokens": 2}
            ) as reply:
                assert reply.status == 200
        for engine in engines:
            counts, cache = router.proxy.counts[engine.url], engine.engines[0].cache
            assert counts.num_prompt_tokens == cache.num_queried_tokens
            assert counts.num_cached_tokens == cache.num_hit_tokens
        # By chance one engine may have got all prefixes.
        assert any(engine.engines[0].cache.num_hit_tokens for engine in engines)


@pytest.mark.slow
async def test_the_audit_finds_no_mistakes_under_evictions():
    async with AsyncExitStack() as started:
        engines = [await started.enter_async_context(EngineService(config())) for _ in range(2)]
        workers = tuple(WorkerSpec(url=each.url, events=each.events_endpoint) for each in engines)
        router = await started.enter_async_context(
            RouterService(ServerConfig(workers=workers, port=0, router=RouterConfig(block_size=4)))
        )
        followers = [worker.followers[0] for worker in router.fleet.workers.values()]
        await until(lambda: all(each.connected for each in followers), "events are followed")
        session = await started.enter_async_context(aiohttp.ClientSession(router.url))
        gate = asyncio.Semaphore(4)

        async def ask(number):
            prompt = [number * 7 % 13] * 60 + [number] * 9  # 13 prefixes of 15 blocks, room for 8
            body = {"prompt": prompt, "max_tokens": 2, "stream": number % 2 == 0}
            body |= {"stream_options": {"include_usage": True}} if body["stream"] else {}
            async with gate, session.post("/v1/completions", json=body) as reply:
                assert reply.status == 200
                await reply.read()

        await asyncio.gather(*(ask(number) for number in range(400)))
        ledgers = router.audit.ledgers

        def num_audited():
            return sum(ledger.num_audited for ledger in ledgers().values())

        await until(lambda: num_audited() == 400, "all are audited")
        assert sum(follower.num_removed for follower in followers) > 1000
        verdicts = sum((ledger.num_by_verdict for ledger in ledgers().values()), Counter())
        assert verdicts[Verdict.WRONG_RESIDENT] == 0
        # Not most are excused, either. How many events come late is up to the machine.
        assert verdicts[Verdict.AS_PREDICTED] > 200, verdicts
