"""Whose tokenizer text is tokenized with, and when it is not: a hub's cache, another tokenizer."""

from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession

from examples.launch.engine_env import ensure_tiny_tokenizer
from kvplug.server.config import ServerConfig, TokenizerFolder, WorkerSpec
from kvplug.server.diagnosis.finding import Code
from kvplug.server.service import RouterService
from kvplug.sim.engine_config import SimConfig
from kvplug.sim.engine_service import EngineService
from kvplug.sim.tokenizer import FolderTokenizer
from kvplug.tokenization.prompt_tokenizer import PromptTokenizer
from tests.hub_cache import put_into_hub_cache
from tests.plain_kernels import with_plain_kernels
from tests.server.diagnosis.conftest import save_word_tokenizer
from tests.server.engine import Engine, served
from tests.server.kvplug_publisher import publishing
from tests.server.router_process import router_process
from tests.waiting import until

MODEL = "org/name"
TEXT = "a document that fills more than a few blocks, so that its prefix can be found again " * 4


async def answer(client, **more):
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 2} | more
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def metrics_of(client):
    async with client.get("/metrics") as response:
        return await response.text()


def predicted(metrics, url):
    line = f'kvplug_predicted_cached_tokens_total{{worker="{url}"}} '
    return float(metrics.partition(line)[2].partition("\n")[0])


def hub_engine():
    """As `vllm serve org/name`: /v1/models says that the root is the name on the hub."""
    folder = ensure_tiny_tokenizer()
    tokenizer = FolderTokenizer(PromptTokenizer.from_folder(folder), folder)
    return EngineService(SimConfig(served_model_name=MODEL), tokenizer)


async def test_text_for_a_model_of_the_hub_is_routed_by_its_prefix(tmp_path):
    home = put_into_hub_cache(tmp_path, MODEL, ensure_tiny_tokenizer())
    environment = with_plain_kernels(PYTHONUNBUFFERED="1") | home
    environment.pop("HF_HUB_CACHE", None)
    async with (
        hub_engine() as engine,
        router_process(engine.url, limit=256, env=environment) as (url, lines),
        ClientSession(url) as client,
    ):
        first = await answer(client)
        assert first["usage"]["prompt_tokens"] > 32
        again = await answer(client)
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0
        assert predicted(await metrics_of(client), engine.url) == cached
        assert not any("--tokenizer" in line for line in lines)


@pytest.mark.parametrize(("digest", "is_ours"), [("", True), ("ours", True), ("0" * 16, False)])
async def test_text_is_routed_by_load_if_the_engine_has_another_tokenizer(digest, is_ours, caplog):
    folder = ensure_tiny_tokenizer()
    if digest == "ours":
        digest = PromptTokenizer.from_folder(folder).digest
    async with following(digest, folder) as (service, client, worker):
        counts = service.proxy.counts[worker.name]
        for _ in range(2):
            await answer(client)
        assert (counts.num_prompt_tokens > 0) == is_ours
        before = counts.num_prompt_tokens
        await answer(client, prompt=list(range(50)))
        assert counts.num_prompt_tokens == before + 50
        reason = 'kvplug_requests_without_prefix_total{reason="other_tokenizer"} 2.0'
        assert (reason in await metrics_of(client)) == (not is_ours)
        assert caplog.text.count("other_tokenizer: ") == (not is_ours)


async def test_the_diagnosis_names_the_engine_with_another_tokenizer():
    async with following("0" * 16, ensure_tiny_tokenizer()) as (service, _, worker):
        service.fleet.mark_down(worker.name, "a test says so")  # to be asked anew
        found = lambda: [f for f in service.diagnosis.look() if f.code is Code.TOKENIZER]  # noqa: E731
        [finding] = await until(found, "it is found")
        assert "0000000000000000" in finding.seen


@asynccontextmanager
async def following(digest, tokenizer):
    """A router with this tokenizer before an engine that says this digest of its own."""
    with publishing(tokenizer=digest) as stream:
        async with served(Engine([MODEL])) as url:
            spec = WorkerSpec(url=url, events=stream.endpoint)
            config = ServerConfig(
                workers=(spec,),
                port=0,
                tokenizers=(TokenizerFolder(tokenizer),),
                health_interval_s=0.05,
            )
            async with RouterService(config) as service, ClientSession(service.url) as client:
                worker = service.fleet.workers[url]
                await until(lambda: worker.about is not None, "its hello has come")
                await until(lambda: worker.tokenizer == digest, "it is known")
                yield service, client, worker


async def test_each_model_has_the_tokenizer_that_is_named_for_it(tmp_path):
    words, tiny = save_word_tokenizer(tmp_path), ensure_tiny_tokenizer()
    folders = (TokenizerFolder(words, "org/words"), TokenizerFolder(tiny))
    text = "hello world again"
    counts = []
    async with served(Engine(models=["org/words", "org/other"])) as url:
        config = ServerConfig(workers=(WorkerSpec(url=url),), port=0, tokenizers=folders)
        async with RouterService(config) as service, ClientSession(service.url) as client:
            for model in ("org/words", "org/other"):
                async with client.post("/select", json={"model": model, "text": text}) as response:
                    counts.append((await response.json())["prompt_tokens"])
    assert counts == [
        len(PromptTokenizer.from_folder(folder).completion({"prompt": text})[0])
        for folder in (words, tiny)
    ]
    assert counts[0] != counts[1]
