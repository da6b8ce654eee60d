"""Given one address of an engine with kvplug's publisher, the router finds the rest."""

import json
from contextlib import asynccontextmanager

import aiohttp
import pytest

from examples.launch.engine_env import ensure_tiny_tokenizer
from kvplug.ingest.trust import Trust
from kvplug.server.config import ServerConfig, TokenizerFolder, WorkerSpec
from kvplug.server.diagnosis.finding import Code
from kvplug.server.service import RouterService
from kvplug.sim.engine_config import SimConfig
from kvplug.sim.engine_service import EngineService
from kvplug.sim.scheduler import SchedulerConfig
from kvplug.sim.tokenizer import FolderTokenizer
from kvplug.tokenization.prompt_tokenizer import PromptTokenizer
from tests.server.kvplug_publisher import free_endpoint, next_port
from tests.waiting import until

PROMPT = list(range(200))


@asynccontextmanager
async def routing(*workers, **settings):
    config = ServerConfig(
        workers=tuple(map(WorkerSpec.parse, workers)),
        port=0,
        health_interval_s=0.05,
        grace_s=0.2,
        **settings,
    )
    async with RouterService(config) as service, aiohttp.ClientSession(service.url) as client:
        yield service, client


def simulated(tokenizer=None, **more):
    scheduler = SchedulerConfig(num_gpu_blocks=641, block_size=32)
    return EngineService(SimConfig(**{"wire": "kvplug", "scheduler": scheduler} | more), tokenizer)


async def complete(client, prompt=PROMPT):
    """Sends a prompt; returns how many tokens of it the engine found in its cache."""
    body = {"model": "simulated", "prompt": prompt, "max_tokens": 2}
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]


async def known(service, name):
    """The worker, once it is up and all its ranks are exact."""
    worker = service.fleet.workers[name]
    exact = lambda: {f.trust.level for f in worker.followers.values()} == {Trust.EXACT}  # noqa: E731
    await until(lambda: worker.is_up and exact(), f"all of {name} is known", timeout_s=10)
    return worker


async def serves_by_prefix(service, client, name):
    counts = service.proxy.counts[name]
    await complete(client)
    first, *_ = service.fleet.workers[name].ranks
    matched = lambda: service.router.index_of(first).overlap_of_tokens(PROMPT).depth.max()  # noqa: E731
    await until(lambda: matched() == len(PROMPT) // 32, "its events are applied")
    assert service.router.fleet_index.block_size_of(name) == 32
    for rank in service.fleet.workers[name].ranks:
        assert service.fleet.follower_of(rank).trust.level is Trust.EXACT
    before = counts.num_cached_tokens
    assert await complete(client) == counts.num_cached_tokens - before == 192


@pytest.mark.parametrize("dp_size", [1, 2])
async def test_a_url_is_enough(dp_size):
    endpoint = free_endpoint()
    async with (
        simulated(dp_size=dp_size, events_endpoint=endpoint) as engine,
        routing(engine.url) as (service, client),
    ):
        worker = await known(service, engine.url)
        assert [s.events for s in worker.sources] == [endpoint, next_port(endpoint)][:dp_size]
        await serves_by_prefix(service, client, engine.url)


async def test_a_url_is_enough_for_a_stock_publisher_that_says_where_it_is():
    more = {"wire": "vllm", "replay_endpoint": "tcp://127.0.0.1:0"}
    async with simulated(**more) as engine, routing(engine.url) as (service, client):
        await complete(client)
        await known(service, engine.url)
        await serves_by_prefix(service, client, engine.url)


@pytest.mark.parametrize("dp_size", [1, 2])
async def test_an_event_endpoint_is_enough_and_the_engine_may_start_later(dp_size):
    endpoint = free_endpoint()
    async with routing(endpoint) as (service, client):
        worker = service.fleet.workers[endpoint]
        assert worker.url is None
        assert [f.code for f in service.diagnosis.look()] == [Code.WORKER_UNKNOWN]
        async with simulated(dp_size=dp_size, events_endpoint=endpoint) as engine:
            await known(service, endpoint)
            assert worker.url == engine.url
            assert [str(r) for r in worker.ranks] == [endpoint, f"{endpoint}#1"][:dp_size]
            await serves_by_prefix(service, client, endpoint)
        await until(lambda: not worker.is_up, "it is down")
        # The next process has another port for its API.
        async with simulated(dp_size=dp_size, events_endpoint=endpoint) as engine:
            await until(lambda: worker.url == engine.url, "it is found again")
            await known(service, endpoint)
            await serves_by_prefix(service, client, endpoint)


async def test_a_stock_publisher_alone_does_not_say_where_its_engine_is():
    async with simulated(wire="vllm") as engine, routing(engine.events_endpoint) as (service, _):
        [worker] = service.fleet.workers.values()
        await until(lambda: worker.followers[0].connected, "its events are followed")
        async with aiohttp.ClientSession(engine.url) as direct:
            await complete(direct)
        await until(lambda: "a stock one" in worker.down_because, "the reason is known")
        [finding] = service.diagnosis.look()
        assert "URL,events=ENDPOINT" in finding.fix


async def test_what_the_engine_says_of_itself_is_shown():
    async with simulated() as engine, routing(engine.url) as (service, client):
        await known(service, engine.url)
        async with client.get("/health") as response:
            [rank] = (await response.json())["workers"][0]["ranks"]
        assert rank["events"]["wire"] == "kvplug 1"
        hello = rank["events"]["hello"]
        assert (hello["engine"], hello["block_size"]) == ("kvplug.sim", 32)
        assert hello["capacity_blocks"] == rank["cache"]["capacity"] == 640


async def test_text_is_routed_by_load_if_the_engine_has_another_tokenizer(tmp_path):
    folder = ensure_tiny_tokenizer()
    other = json.loads((folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(other, indent=1))
    tokenizer = FolderTokenizer(PromptTokenizer.from_folder(folder), folder)
    text = "a prompt of several blocks " * 40
    for ours, reasons in ((folder, {}), (tmp_path, {"other_tokenizer": 1})):
        async with (
            simulated(tokenizer) as engine,
            routing(engine.url, tokenizers=(TokenizerFolder(ours),)) as (service, client),
        ):
            worker = await known(service, engine.url)
            await until(lambda w=worker: w.tokenizer, "its tokenizer is known")
            await complete(client, text)
            counts = service.proxy.counts[engine.url]
            assert (counts.num_prompt_tokens > 0) == (not reasons)
            async with client.get("/metrics") as response:
                metric = 'kvplug_requests_without_prefix_total{reason="other_tokenizer"} 1.0'
                assert (metric in await response.text()) == bool(reasons)
