"""The standalone router before two real vLLM servers: one is killed under streams that go on."""

import asyncio
import json

import aiohttp

from kvplug.router.config import RouterConfig
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.service import RouterService
from tests.engines.engine_pool import uses
from tests.engines.test_vllm_served import MODEL, PAIR, ids

pytestmark = uses(*PAIR)  # the test that kills one starts it again

NUM_TOKENS = 700
COMMON = {
    "model": MODEL,
    "stream": True,
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "temperature": 0.0,
    "stream_options": {"include_usage": True},
}
COMPLETION = {**COMMON, "prompt": ids(90, 200)}
CHAT = {**COMMON, "messages": [{"role": "user", "content": "Count to seven hundred."}]}
ASKED = (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT))


async def chunks_of(session, url, body, begun=None):
    """Of a stream, its chunks without what differs from answer to answer."""
    chunks = []
    async with session.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                chunks.append(json.loads(line[6:]))
                assert "error" not in chunks[-1], chunks[-1]
                if begun is not None and len(chunks) == 3:
                    begun.set()
    return chunks


def text_of(chunks):
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    return "".join(each["text"] if "text" in each else each["delta"]["content"] for each in choices)


async def test_streams_go_on_when_their_engine_is_killed(engines):
    killed, other = engines
    workers = tuple(WorkerSpec(url=each.url) for each in engines)
    config = ServerConfig(
        workers=workers,
        port=0,
        router=RouterConfig(block_size=32, mode="round_robin", use_kv_events=False),
        migrate_streams=True,
    )
    async with RouterService(config) as service, aiohttp.ClientSession() as session:
        expected = [await chunks_of(session, other.url + path, body) for path, body in ASKED]
        events = [asyncio.Event() for _ in range(2 * len(ASKED))]
        asked = [each for each in ASKED for _ in engines]
        try:
            tasks = [  # in turn, two at each engine
                asyncio.create_task(chunks_of(session, service.url + path, body, begun))
                for (path, body), begun in zip(asked, events, strict=True)
            ]
            async with asyncio.timeout(60):
                await asyncio.gather(*(begun.wait() for begun in events))
            killed.kill()
            answers = await asyncio.gather(*tasks)
        finally:
            killed.start()
            await asyncio.to_thread(killed.wait_ready)
        counts = service.proxy.counts
        # An early one may have ended by then.
        assert counts[killed.url].num_broken == counts[other.url].num_migrated > 0
        assert len(service.router.load) == 0
    for number, answer in enumerate(answers):
        whole = expected[number // 2]
        assert text_of(answer) == text_of(whole)
        assert len({(chunk["id"], chunk["created"]) for chunk in answer}) == 1
        usages = [chunks[-1]["usage"] for chunks in (answer, whole)]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usages[0][name] == usages[1][name]
        assert [chunk["choices"][0]["finish_reason"] for chunk in (answer[-2], whole[-2])] == [
            "length",
            "length",
        ]
