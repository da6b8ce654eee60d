"""vLLM and SGLang in one fleet behind the standalone router, with block sizes of their own."""

from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp

from examples.launch.vllm_server import VllmServer
from kvplug.events import Rank
from kvplug.hashing import as_tokens, seed_of
from kvplug.router.config import RouterConfig
from kvplug.server.api.bodies import namespace_of
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.service import RouterService
from tests.engines.engine_pool import uses
from tests.engines.engine_start import sglang_server, vllm_server
from tests.engines.test_vllm_served import MODEL, cached_tokens, ids
from tests.engines.tiny_adapter import save_adapter
from tests.waiting import until


class VllmWithAdapter(VllmServer):
    """It has an adapter by the name of `tiny`, and takes others while it runs."""

    def __init__(self, name, settings, *, log_dir):
        self.adapters = log_dir
        flags = ("--enable-lora", "--max-lora-rank", "8")
        flags += ("--lora-modules", f"tiny={self.new_adapter('adapter')}")
        env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        more = replace(settings, extra_flags=flags, extra_env=env)
        super().__init__(name, more, log_dir=log_dir)

    def new_adapter(self, name):
        save_adapter(self.adapters / name)
        return self.adapters / name


pytestmark = uses(
    vllm_server("vllm", VllmWithAdapter, block_size=32), sglang_server("sglang", block_size=64)
)


@asynccontextmanager
async def routing(engines):
    """No block size is named, and only events tell what is cached."""
    specs = [WorkerSpec(url=e.url, events=e.events_endpoint) for e in engines]
    # The prefix decides, not the request that is in flight for a moment longer.
    router = RouterConfig(speculative_ttl_s=0.0, overlap_score_weight=4.0)
    config = ServerConfig(workers=tuple(specs), port=0, router=router, health_interval_s=0.2)
    async with RouterService(config) as service, aiohttp.ClientSession() as client:
        workers = [service.fleet.workers[e.url] for e in engines]
        await until(
            lambda: all(w.is_up and w.followers[0].connected for w in workers), "all are up"
        )
        yield service, client


async def complete(client, url, prompt, **how):
    """Cached tokens, as the engine reports them."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **how}
    async with client.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        answer = await response.json()
        return cached_tokens(answer) if answer["usage"].get("prompt_tokens_details") else 0


def known_tokens(service, engine, prompt, namespace, lora):
    """How much of a prompt the router knows to be cached there."""
    rank = Rank(engine.url)
    seed = seed_of(namespace_of(namespace, lora))
    with service.router._lock:  # an event may come meanwhile, and move the worker to another index
        index = service.router.fleet_index.group_of(rank).index
        hashes = index.hasher.sequence_hashes(as_tokens(prompt), seed)
        depth = index.overlap(hashes, now_s=0.0).depth[index.numbers.number_of(rank)]
        return int(depth) * index.block_size


async def prime(service, client, engine, prompt, *, known=True, lora="", **how):
    """Have one engine cache a prompt, past the router, and wait until the router knows."""
    await complete(client, engine.url, prompt, **how)
    asked = how if known else {}
    arrived = lambda: known_tokens(service, engine, prompt, asked, lora) == len(prompt)  # noqa: E731
    await until(arrived, "its blocks are known")


async def ask(service, client, prompt, **how):
    """(URL of the worker that was chosen, cached tokens that were predicted, and reported)."""
    before = {url: (c.num_requests, c.num_cached_tokens) for url, c in service.proxy.counts.items()}
    reported = await complete(client, service.url, prompt, **how)
    after = service.proxy.counts
    [chosen] = [url for url in after if after[url].num_requests > before[url][0]]
    return chosen, after[chosen].num_cached_tokens - before[chosen][1], reported


async def test_both_kinds_are_predicted_exactly_in_every_namespace(engines):
    async with routing(engines) as (service, client):
        for start, engine in enumerate(engines):
            prefix = ids(100 + start, 320)
            for namespace in ({}, {"cache_salt": "tenant"}):
                await prime(service, client, engine, prefix, **namespace)
                found = await ask(service, client, [*prefix, 7], **namespace)
                assert found == (engine.url, 320, 320)
            _, *found = await ask(service, client, [*prefix, 7], cache_salt="another")
            assert found == [0, 0]
        for engine in engines:
            worker = service.fleet.workers[engine.url]
            assert service.fleet.block_size_of(worker) == engine.block_size
            assert service.router.index_of(Rank(engine.url)).block_size == engine.block_size
            assert dict(worker.followers[0].skipped) == {}
        assert len(service.router.fleet_index.groups) == 2


async def test_an_adapter_is_asked_for_by_its_name_and_matched_by_it(engines):
    vllm, _ = engines
    async with routing(engines) as (service, client):
        async with client.get(f"{service.url}/v1/models") as response:
            cards = {card["id"]: card["parent"] for card in (await response.json())["data"]}
        assert cards == {MODEL: None, "tiny": MODEL}
        prompt = ids(400, 256)
        await prime(service, client, vllm, prompt, lora="tiny", model="tiny")
        found = await ask(service, client, [*prompt, 7], model="tiny")
        assert found == (vllm.url, 256, 256)
        _, *found = await ask(service, client, [*prompt, 7])
        assert found == [0, 0]


async def test_an_adapter_that_is_loaded_again_counts_for_nothing_it_computed_before(engines):
    vllm, _ = engines
    async with routing(engines) as (service, client):
        worker = service.fleet.workers[vllm.url]
        await load_adapter(client, vllm, "again", "first", load_inplace=False)
        await until(lambda: "again" in worker.models, "it is served")
        prompts = [ids(500, 256), ids(501, 256)]
        for prompt in prompts:
            await prime(service, client, vllm, prompt, lora="again", model="again")
        await load_adapter(client, vllm, "again", "second", load_inplace=True)
        second = str(vllm.adapters / "second")
        await until(lambda: worker.lora_paths["again"] == second, "the router has seen it")
        found = await ask(service, client, [*prompts[0], 7], model="again")
        assert found == (vllm.url, 0, 0)
        await prime(service, client, vllm, prompts[0], lora="again", model="again")
        found = await ask(service, client, [*prompts[0], 7], model="again")
        assert found == (vllm.url, 256, 256)
        assert dict(worker.followers[0].skipped) == {}


async def load_adapter(client, engine, name, folder, **how):
    body = {"lora_name": name, "lora_path": str(engine.new_adapter(folder)), **how}
    async with client.post(f"{engine.url}/v1/load_lora_adapter", json=body) as response:
        assert response.status == 200, await response.text()


async def test_the_longer_prefix_wins_in_tokens_not_in_blocks(engines):
    vllm, sglang = engines
    async with routing(engines) as (service, client):
        for start, (short, long_) in enumerate([(vllm, sglang), (sglang, vllm)]):
            prompt = ids(200 + start, 448)
            await prime(service, client, short, prompt[:256])  # 8 blocks of 32, or 4 of 64
            await prime(service, client, long_, prompt[:448])  # 7 blocks of 64, or 14 of 32
            found = await ask(service, client, [*prompt, 7])
            assert found == (long_.url, 448, 448)


async def test_an_extra_key_is_routed_without_prefix_knowledge_and_counted(engines):
    _, sglang = engines
    async with routing(engines) as (service, client):
        prompt = ids(300, 256)
        # The events say the tokens and not the key: to the index it is a prompt without one.
        await prime(service, client, sglang, prompt, known=False, extra_key="mine")
        _, predicted, _ = await ask(service, client, [*prompt, 7], extra_key="mine")
        assert predicted == 0
        async with client.get(f"{service.url}/metrics") as response:
            text = await response.text()
        assert 'kvplug_requests_without_prefix_total{reason="extra_key"} 1.0' in text
