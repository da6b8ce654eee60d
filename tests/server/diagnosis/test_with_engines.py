"""Causes that only traffic shows, with simulated engines and their real event streams."""

from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest

from kvplug import EventBatch, Rank
from kvplug.router.config import RouterConfig
from kvplug.server.config import ServerConfig, TokenizerFolder, WorkerSpec
from kvplug.server.diagnosis.finding import Code
from kvplug.server.service import RouterService
from kvplug.sim.engine_config import TimeModel
from kvplug.sim.engine_service import EngineService
from tests.ingest.publisher import stored
from tests.sim.test_engine_service import config
from tests.waiting import until

PROMPTS = [[number] * 20 for number in range(10)]
# Says again what it said before the subscription arrived.
REPLAYING = config(replay_endpoint="tcp://127.0.0.1:0")


@asynccontextmanager
async def routing(
    engine_config=None, *, topic="", block_size=4, early_prompt=None, replays=False, **more
):
    """A router in front of one simulated engine; (service, client)."""
    async with AsyncExitStack() as started:
        engine = await started.enter_async_context(EngineService(engine_config or config()))
        if early_prompt is not None:
            async with aiohttp.ClientSession(engine.url) as client:
                await ask_all(client, [early_prompt])
        replay = engine.replay_endpoint if replays else None
        spec = WorkerSpec(url=engine.url, events=engine.events_endpoint, topic=topic, replay=replay)
        router = RouterConfig(block_size=block_size)
        settings = ServerConfig(
            workers=(spec,), port=0, router=router, health_interval_s=0.05, **more
        )
        service = await started.enter_async_context(RouterService(settings))
        [worker] = service.fleet.workers.values()
        await until(lambda: worker.followers[0].connected, "events are followed")
        yield service, await started.enter_async_context(aiohttp.ClientSession(service.url))


async def ask_all(client, prompts=PROMPTS):
    for prompt in prompts:
        body = {"model": "simulated", "prompt": prompt, "max_tokens": 1}
        async with client.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()


def codes(service):
    return {finding.code for finding in service.diagnosis.look()}


async def test_a_sound_engine_has_no_findings():
    async with routing(REPLAYING, replays=True) as (service, client):
        await ask_all(client)
        [rank] = service.audit.ledgers()
        ledgers = service.audit.ledgers
        await until(lambda: len(ledgers()[rank].was_stored) == len(PROMPTS), "all are settled")
        assert all(ledgers()[rank].was_stored)
        assert codes(service) == set()


async def test_a_block_size_that_is_not_the_engines_is_seen_in_its_events():
    async with routing(REPLAYING, block_size=8, replays=True) as (service, client):
        await ask_all(client)

        def found():
            every = service.diagnosis.look()
            return [f for f in every if f.code is Code.BLOCK_SIZE and "50 blocks" in f.seen]

        [finding] = await until(found, "all blocks are refused")
        assert "--block-size 4" in finding.fix


async def test_a_block_size_is_no_finding_before_it_is_known():
    async with routing(REPLAYING, block_size=None, replays=True) as (service, client):
        await service.diagnosis.ask()
        [worker] = service.fleet.workers.values()
        assert (service.fleet.block_size_of(worker), codes(service)) == (None, set())
        await ask_all(client)
        await until(lambda: service.fleet.block_size_of(worker) == 4, "blocks are stored")
        assert codes(service) == set()


async def test_a_stream_that_stays_silent_is_found():
    async with routing(config(topic="kv@a"), topic="kv@b") as (service, client):
        await ask_all(client)
        await until(lambda: Code.NO_EVENTS in codes(service), "the silence is found")


async def test_blocks_that_never_match_are_found_and_forgotten_when_they_do(tiny_tokenizer_dir):
    texts = [chr(ord("a") + number) + " quick fox" * 9 for number in range(10)]
    async with routing(tokenizers=(TokenizerFolder(tiny_tokenizer_dir),)) as (service, client):
        await ask_all(client, texts)
        await until(lambda: Code.TOKENIZER in codes(service), "the tokenizer is found wrong")
        await until(lambda: Code.NEVER_MATCHES in codes(service), "the mismatch is found")
        await ask_all(client)
        await until(lambda: Code.NEVER_MATCHES not in codes(service), "the finding is over")


async def test_a_router_that_comes_late_does_not_know_all():
    async with routing(early_prompt=PROMPTS[0]) as (service, client):
        await ask_all(client)
        await until(lambda: Code.EVENTS_INCOMPLETE in codes(service), "the gap is found")
        [found] = [f for f in service.diagnosis.look() if f.code is Code.EVENTS_INCOMPLETE]
        assert found.fix
        [rank] = service.audit.ledgers()
        assert 0.5 <= service.audit.accuracy(rank) <= 1


@pytest.mark.parametrize("is_other", [False, True])
async def test_engines_that_hash_otherwise_are_named(is_other):
    urls = ["http://127.0.0.1:9", "http://127.0.0.1:19"]
    workers = tuple(WorkerSpec(url=url) for url in urls)
    settings = ServerConfig(workers=workers, port=0, router=RouterConfig(block_size=4))
    async with RouterService(settings) as service:
        [first, second] = service.fleet.workers.values()
        event = stored(0, num_blocks=3)
        service.router.apply(Rank(first.url), EventBatch(events=(event,)))
        if is_other:
            names = tuple(name + 1 for name in event.block_hashes)
            event = type(event)(block_hashes=names, token_ids=event.token_ids, block_size=4)
        service.router.apply(Rank(second.url), EventBatch(events=(event,)))
        for worker in (first, second):
            worker.down_because = None
        assert (Code.HASH_MISMATCH in codes(service)) == is_other


async def test_how_large_and_how_fast_an_engine_is_becomes_known():
    # Steps of 9 ms: the end of an answer is not too soon after its first token to be learnt from.
    async with routing(config(time_model=TimeModel())) as (service, client):
        [rank] = service.router.ranks
        cache_size = service.router.cache_size
        await until(lambda: cache_size(rank).source == "given", "the engine has been asked")
        for prompt in PROMPTS:
            body = {"model": "simulated", "prompt": prompt, "max_tokens": 4, "stream": True}
            async with client.post("/v1/completions", json=body) as response:
                assert (await response.read()).count(b"data:") > 4
        await ask_all(client, [[99] * 20])  # a whole answer
        async with client.get("/health") as response:
            [worker] = (await response.json())["workers"]
        assert worker["ranks"][0]["cache"]["capacity"] == config().scheduler.num_gpu_blocks - 1
        assert worker["ranks"][0]["cache"]["capacity_source"] == "given"
        assert worker["ranks"][0]["model"]["observed_first_tokens"] > 0
        assert worker["ranks"][0]["model"]["observed_answers"] > 0
        async with client.get("/metrics") as response:
            text = await response.text()
        assert f'kvplug_cache_capacity_blocks{{worker="{rank.worker}"}} 64.0' in text


async def test_a_capacity_that_cannot_be_is_named():
    async with routing() as (service, client):
        [rank] = service.router.ranks
        cache_size = service.router.cache_size
        await until(lambda: cache_size(rank).source == "given", "the engine has been asked")
        service.router.set_cache_capacity(rank, 1)
        await ask_all(client)
        await until(lambda: Code.CACHE_CAPACITY in codes(service), "it holds more")
        assert cache_size(rank).source == "unknown"  # until it evicts
        [found] = [f for f in service.diagnosis.look() if f.code is Code.CACHE_CAPACITY]
        assert "it holds 5 blocks, more than its capacity of 1" in found.seen
        assert "the router goes by what evictions tell, nothing so far" in found.fix
