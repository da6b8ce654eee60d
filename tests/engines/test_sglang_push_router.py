"""The client of SGLang against a real server."""

from contextlib import aclosing

import aiohttp
import pytest

from kvplug import Router, RouterConfig
from kvplug.errors import RequestRefusedError, WorkerLostError
from kvplug.push_router import KvPushRouter, SglangClient
from tests.engines.engine_pool import uses
from tests.engines.test_sglang_plugin import BLOCK_SIZE, PUBLISHING
from tests.engines.test_vllm_served import ids

pytestmark = uses(PUBLISHING)

NUM_TOKENS = 150


class BreakingClient:
    """A client of one engine under two names; an answer of the first one breaks at a token."""

    def __init__(self, client, breaks_at):
        self._client, self._breaks_at = client, breaks_at

    async def generate(self, rank, request):
        num_tokens = 0
        async with aclosing(self._client.generate(rank, request)) as outputs:
            async for output in outputs:
                if rank.worker == "first" and num_tokens >= self._breaks_at:
                    raise WorkerLostError("the test has broken it off")
                num_tokens += len(output.token_ids)
                yield output


def router_of(*workers):
    router = Router(RouterConfig(block_size=BLOCK_SIZE))
    for worker in workers:
        router.add_worker(worker)
    return router


async def generate(push_router, prompt, num_tokens=NUM_TOKENS, **options):
    return await push_router.generate(
        prompt,
        stop_conditions={"max_tokens": num_tokens, "ignore_eos": True},
        sampling_options={"temperature": 0.0},
        **options,
    )


async def whole_answer(url, prompt):
    sampling = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling}
    async with aiohttp.ClientSession(url) as session, session.post("/generate", json=body) as reply:
        assert reply.status == 200, await reply.text()
        return (await reply.json())["output_ids"]


@pytest.mark.parametrize("breaks_at", [10**9, 1, 60])
async def test_streamed_tokens_are_those_of_a_whole_answer(engine, breaks_at):
    url, prompt = engine.server.url, ids(90, 100)
    router = router_of("first", "second")
    async with SglangClient({"first": url, "second": url}) as client:
        push_router = KvPushRouter(router, BreakingClient(client, breaks_at))
        stream = await generate(push_router, prompt, worker_id="first")
        parts = [part async for part in stream]
    tokens = [token for part in parts for token in part["token_ids"]]
    assert len(parts) > 2
    assert tokens == await whole_answer(url, prompt)
    assert parts[-1]["finish_reason"] == "length"
    assert stream.rank.worker == ("first" if breaks_at > NUM_TOKENS else "second")
    assert len(router.load) == 0


async def test_what_an_engine_refuses_is_said(engine):
    router = router_of(engine.server.url)
    async with SglangClient() as client:
        stream = await generate(KvPushRouter(router, client), ids(91, 5000))
        with pytest.raises(RequestRefusedError):
            await anext(stream)
    assert len(router.load) == 0
