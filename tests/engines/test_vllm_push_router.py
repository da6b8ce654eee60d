"""KvPushRouter over two real vLLM servers: one is killed in the middle of an answer."""

import asyncio

import aiohttp
import pytest

from kvplug import Router, RouterConfig
from kvplug.errors import RequestRefusedError
from kvplug.push_router import KvPushRouter, VllmClient
from tests.engines.engine_pool import uses
from tests.engines.test_vllm_served import MODEL, PAIR, ids

pytestmark = uses(*PAIR)  # the test that kills one starts it again


def router_over(engines):
    router = Router(RouterConfig(block_size=32))
    for engine in engines:
        router.add_worker(engine.url, model=MODEL)
    return router


async def generate(push_router, prompt, num_tokens, **options):
    return await push_router.generate(
        prompt,
        model=MODEL,
        stop_conditions={"max_tokens": num_tokens, "ignore_eos": True},
        sampling_options={"temperature": 0.0},
        **options,
    )


async def tokens_of(stream):
    return [token async for part in stream for token in part["token_ids"]]


async def test_an_answer_goes_on_when_its_engine_is_killed(engines):
    killed, other = engines
    prompt, router, losses = ids(80, 200), router_over(engines), []
    async with VllmClient() as client:
        push_router = KvPushRouter(router, client, on_worker_lost=lambda *loss: losses.append(loss))
        expected = await tokens_of(await generate(push_router, prompt, 400, worker_id=other.url))
        assert len(expected) == 400
        try:
            stream = await generate(push_router, prompt, 400, worker_id=killed.url)
            tokens = (await anext(stream))["token_ids"]
            killed.kill()
            tokens += await tokens_of(stream)
        finally:
            killed.start()
            await asyncio.to_thread(killed.wait_ready)
    assert tokens == expected
    [(failed, _, migration)] = losses
    assert (failed.worker, migration.decision.rank.worker) == (killed.url, other.url)
    assert 0 < migration.recomputed_tokens + migration.reached_tokens - len(prompt) < 400
    assert len(router.load) == 0


async def num_running(engine):
    async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if "num_requests_running{" in line)


async def test_a_closed_stream_stops_the_engine(engines):
    router = router_over(engines)
    async with VllmClient() as client:
        stream = await generate(KvPushRouter(router, client), ids(81, 40), 900)
        engine = next(each for each in engines if each.url == stream.rank.worker)
        await anext(stream)
        assert await num_running(engine) == 1
        await stream.aclose()
        deadline = asyncio.get_running_loop().time() + 30
        while await num_running(engine):
            assert asyncio.get_running_loop().time() < deadline
        assert len(router.load) == 0


async def test_what_an_engine_refuses_goes_nowhere_else(engines):
    router, losses = router_over(engines), []
    async with VllmClient() as client:
        push_router = KvPushRouter(router, client, on_worker_lost=lambda *loss: losses.append(loss))
        stream = await generate(push_router, ids(82, 100), 5000)
        with pytest.raises(RequestRefusedError, match="status 400"):
            await anext(stream)
    assert (losses, len(router.load)) == ([], 0)
