"""The standalone router in front of two real vLLM servers."""

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kvplug.errors import TokenizerError
from kvplug.events import Rank
from kvplug.ingest.trust import Trust
from kvplug.router.config import RouterConfig
from kvplug.router.engine_model import EngineModel
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.service import RouterService
from kvplug.tokenization.prompt_kind import PromptKind
from kvplug.tokenization.prompt_tokenizer import PromptTokenizer
from tests.engines.engine_pool import uses
from tests.engines.engine_start import vllm_server
from tests.tokenization.other_apis import bodies
from tests.waiting import until

MODEL = "tiny-llama"
PAIR = [vllm_server(f"vllm-{i}", num_gpu_blocks=160) for i in range(2)]

pytestmark = uses(*PAIR)  # a test that kills one starts it again


@asynccontextmanager
async def routing(engines, *, mode="kv", more_workers=(), knows_all=False):
    """A router with its event streams connected, and a client session.

    knows_all: of what the engines did before, too; else it trusts itself by half.
    """
    specs = [
        WorkerSpec(
            url=e.url, events=e.events_endpoint, replay=e.replay_endpoint if knows_all else None
        )
        for e in engines
    ]
    config = ServerConfig(
        workers=(*specs, *more_workers),
        port=0,
        router=RouterConfig(block_size=32, mode=mode),
        health_interval_s=0.2,
        grace_s=2.0,
    )
    async with RouterService(config) as service, aiohttp.ClientSession(service.url) as client:
        workers = [service.fleet.workers[e.url] for e in engines]
        await until(
            lambda: all(w.is_up and w.followers[0].connected for w in workers), "all are up"
        )
        if knows_all:
            for engine in engines:  # a replay is doubted until a live event fits in with it
                await complete_directly(engine, ids(7, 40))
            exact = lambda: all(w.followers[0].trust.level is Trust.EXACT for w in workers)  # noqa: E731
            await until(exact, "everything was replayed")
        yield service, client


async def complete(client, prompt, *, max_tokens=4):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def cached_tokens(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def blocks_of(service, engine):
    with service.router._lock:  # an event may come meanwhile
        return service.router.index.engine_hashes_of(Rank(engine.url))


def ids(start, count):
    """A prompt of token ids that no other test uses."""
    return [10 + (start * 7919 + i * 104729) % 3900 for i in range(count)]


async def empty_caches(service, engines):
    """Have the engines forget what other tests left; a router that hears of it knows all again."""
    for engine in engines:
        await asyncio.to_thread(engine.empty_cache)
    followers = [service.fleet.workers[engine.url].followers[0] for engine in engines]
    exact = lambda: all(each.trust.level is Trust.EXACT for each in followers)  # noqa: E731
    await until(exact, "the router knows that the caches are empty")


async def engine_that_holds(service, engines):
    """The engine that stored blocks since the router started."""
    holders = lambda: [e for e in engines if len(blocks_of(service, e))]  # noqa: E731
    return (await until(holders, "an engine has stored blocks"))[0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "The quick brown fox, ünïcode 漢字 and\nnew lines"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is a list?"}]}),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": [{"type": "text", "text": "Parts"}]},
                    {"role": "assistant", "content": "Yes"},
                    {"role": "user", "content": "Go on"},
                ]
            },
        ),
    ],
)
async def test_text_becomes_the_token_ids_that_the_engine_computes(engines, tiny_model, path, body):
    tokenizer = PromptTokenizer.from_folder(tiny_model)
    ours = tokenizer.chat(body) if "messages" in body else tokenizer.completion(body)[0]
    async with (
        aiohttp.ClientSession(engines[0].url) as engine,
        engine.post("/tokenize", json={"model": MODEL, **body}) as response,
    ):
        assert (await response.json())["tokens"] == ours.tolist()


async def test_bodies_of_other_apis_have_as_many_tokens_as_the_engine_counts(engines, tiny_model):
    tokenizer = PromptTokenizer.from_folder(tiny_model)
    num_compared = 0
    async with aiohttp.ClientSession(engines[0].url) as engine:
        for kind, name, body in bodies():
            try:
                ours = len(tokenizer.first(body, PromptKind(kind), max_new=10**6).ids)
            except TokenizerError:
                ours = None
            theirs = await counted(engine, kind, {**body, "model": MODEL})
            # Without a parser for tools it takes no body with tools; what is not known here (None)
            # is not wrong.
            if None not in (ours, theirs):
                assert (kind, name, ours) == (kind, name, theirs)
                num_compared += 1
    assert num_compared > 40


async def counted(engine, kind, body):
    """How many tokens the prompt has; None if the engine refuses the body."""
    if kind == "messages":
        path, usage = "/v1/messages/count_tokens", lambda answer: answer
    else:
        path, usage = "/v1/responses", lambda answer: answer["usage"]
        body = {**body, "max_output_tokens": 1}
    async with engine.post(path, json=body) as response:
        return usage(await response.json())["input_tokens"] if response.status == 200 else None


async def test_a_prefix_stays_where_it_is_cached(engines):
    async with routing(engines) as (service, client):
        await empty_caches(service, engines)  # trusting itself by half, a router may try the other
        prefix = ids(1, 320)
        await complete(client, prefix + ids(2, 20))
        engine = await engine_that_holds(service, engines)
        await until(lambda: len(blocks_of(service, engine)) >= 10, "the prefix is reported")
        answers = [await complete(client, prefix + ids(10 + i, 20)) for i in range(6)]
        assert [cached_tokens(answer) for answer in answers] == [320] * 6
        other = next(e for e in engines if e is not engine)
        assert len(blocks_of(service, other)) == 0


async def test_a_request_right_behind_the_first_token_finds_the_prefix(engines):
    async with routing(engines, knows_all=True) as (service, client):
        # The models are given: learnt from two answers, one of which met a stall of the machine, a
        # busy engine would cost more than computing the prefix on the idle one.
        for engine in engines:
            service.router.set_engine_model(Rank(engine.url), EngineModel())
        prefix = ids(3, 640)
        body = {"model": MODEL, "prompt": prefix, "max_tokens": 100, "stream": True}
        async with client.post("/v1/completions", json={**body, "ignore_eos": True}) as first:
            await first.content.readline()
            answers = [await complete(client, prefix + ids(30 + i, 8)) for i in range(3)]
            await first.read()
        assert [cached_tokens(answer) for answer in answers] == [640] * 3
        assert sorted(c.num_requests for c in service.proxy.counts.values()) == [0, 4]


async def test_chat_as_text_is_routed_by_prefix_and_streams(engines):
    async with routing(engines) as (service, client):
        lecture = "A long preamble about the history of caches. " * 12
        for question in ("Why?", "How?", "When?"):
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": lecture + question}],
                "max_tokens": 8,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            async with client.post("/v1/chat/completions", json=body) as response:
                assert response.content_type == "text/event-stream"
                text = (await response.read()).decode()
            lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
            assert lines[-1] == "[DONE]"
            usage = json.loads(lines[-2])["usage"]
            await engine_that_holds(service, engines)
        assert cached_tokens({"usage": usage}) > 0.8 * usage["prompt_tokens"]
        assert len(service.router.load) == 0


async def test_a_killed_engine_is_left_and_picked_up_again(engines):
    async with routing(engines) as (service, client):
        prefix = ids(4, 320)
        await complete(client, prefix)
        engine = await engine_that_holds(service, engines)
        other = next(e for e in engines if e is not engine)
        engine.kill()
        try:
            await until(lambda: len(blocks_of(service, engine)) == 0, "its blocks are gone")
            answers = [await complete(client, prefix + ids(40 + i, 9)) for i in range(4)]
            assert len(answers) == 4
            await until(lambda: not service.fleet.workers[engine.url].is_up, "it is found dead")
            await until(lambda: len(blocks_of(service, other)) >= 10, "the other one took over")
        finally:
            engine.start()
            await asyncio.to_thread(engine.wait_ready)
        worker = service.fleet.workers[engine.url]
        await until(
            lambda: worker.is_up and worker.followers[0].connected, "it is back", timeout_s=60
        )
        assert len(blocks_of(service, engine)) == 0
        await complete_directly(engine, ids(5, 96))
        await until(lambda: len(blocks_of(service, engine)) == 3, "its new blocks are known")
        await until(lambda: worker.followers[0].trust.reason is None, "nothing is missing")
        with service.router._lock:
            service.router.index.check()


async def complete_directly(engine, prompt):
    async with aiohttp.ClientSession(engine.url) as client:
        await complete(client, prompt, max_tokens=1)


async def test_an_engine_that_dies_in_an_answer_ends_it_with_an_error(engines):
    async with routing(engines) as (service, client):
        body = {"model": MODEL, "prompt": ids(6, 64), "max_tokens": 900, "stream": True}
        async with client.post("/v1/completions", json={**body, "ignore_eos": True}) as response:
            await response.content.readline()
            busy = next(u for u, c in service.proxy.counts.items() if c.num_requests)
            engine = next(e for e in engines if e.url == busy)
            engine.kill()
            try:
                rest = (await response.read()).decode()
            finally:
                engine.start()
                await asyncio.to_thread(engine.wait_ready)
        assert json.loads(rest.strip().splitlines()[-1][6:])["error"]["code"] == "worker_lost"
        assert len(service.router.load) == 0


async def test_a_worker_that_is_not_there_at_start_is_named_and_left_out(engines, caplog):
    nobody = WorkerSpec(url="http://127.0.0.1:9", events="tcp://127.0.0.1:9")
    async with routing(engines, more_workers=[nobody]) as (_, client):
        assert "worker http://127.0.0.1:9 is not reachable" in caplog.text
        for i in range(3):
            await complete(client, ids(60 + i, 40))
        async with client.get("/health") as response:
            states = {w["url"]: w["state"] for w in (await response.json())["workers"]}
        assert states["http://127.0.0.1:9"] == "down"
        assert sorted(states.values()) == ["down", "up", "up"]


async def test_round_robin_takes_turns(engines):
    async with routing(engines, mode="round_robin") as (service, client):
        for i in range(6):
            await complete(client, ids(70 + i, 8), max_tokens=1)
        assert [c.num_requests for c in service.proxy.counts.values()] == [3, 3]
