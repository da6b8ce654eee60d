"""The rows with data-parallel ranks: real engines behind the standalone router.

In:  the name of a row.   Out: a Tally of requests; blocks are not compared, as engines do not say
over HTTP which they have.

Nothing is said to the router but the engine's URL. The next request waits until all blocks of the
one before are known.
"""

import asyncio
import random
from contextlib import asynccontextmanager

import aiohttp

from examples.launch.engine_env import ensure_tiny_model, ensure_vllm
from examples.launch.engine_server import MODEL_NAME
from examples.launch.plugin_env import ensure_plugin
from examples.launch.sglang_env import ensure_sglang
from examples.launch.sglang_server import SglangServer, SglangSettings
from examples.launch.vllm_server import VllmServer, VllmSettings
from kvplug.hashing import as_tokens
from kvplug.router.config import RouterConfig
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.service import RouterService
from tests.engines.line_engine import predicted_tokens
from tests.exactness.comparison import Tally, num_wrong, prompts
from tests.waiting import until

START_LIMIT_S = 300.0


def vllm(folder, wire):
    python = ensure_vllm()
    plugin = ensure_plugin(python) if wire == "kvplug" else None
    flags = ("--data-parallel-size", "2")
    settings = VllmSettings(
        python=python,
        model_dir=ensure_tiny_model(python),
        num_gpu_blocks=100,
        extra_flags=flags,
        plugin=plugin,
    )
    return VllmServer("two-ranks", settings, log_dir=folder)


def sglang(folder, wire):
    python = ensure_sglang()
    settings = SglangSettings(
        python=python,
        model_dir=ensure_tiny_model(python),
        plugin=ensure_plugin(python) if wire == "kvplug" else None,
        extra_flags=("--dp-size", "2"),
        extra_env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},  # one core each
    )
    return SglangServer("two-ranks", settings, log_dir=folder)


ROWS = {"two ranks of vLLM": vllm, "two ranks of SGLang": sglang}


async def compare(name, folder, args):
    """Ask one request after the other; args: requests, seed and wire."""
    tally, rnd, num_requests = Tally(), random.Random(args.seed), args.requests
    with ROWS[name](folder, args.wire) as server:
        async with routing(server) as (service, client):
            decisions = noted_decisions(service.router)
            for _, prompt in zip(range(num_requests), prompts(args.seed), strict=False):
                cached = await ask(client, prompt, rnd.choice([1, 1, 1, 40]))
                decision = decisions.pop()
                tally.note(predicted_tokens(decision, len(prompt)), cached)
                rank = decision.rank
                await until(lambda p=prompt, r=rank: knows(service.router, r, p), "it is known")
            audit = service.audit
            tally.num_wrong = await asyncio.to_thread(num_wrong, audit, num_requests)
    return tally


@asynccontextmanager
async def routing(server):
    config = ServerConfig(
        workers=(WorkerSpec(url=server.url),),
        port=0,
        router=RouterConfig(block_size=server.block_size, speculative_ttl_s=0.0),
    )
    async with RouterService(config) as service, aiohttp.ClientSession(service.url) as client:
        [worker] = service.fleet.workers.values()
        await until(lambda: worker.is_up, "the engine is up", timeout_s=START_LIMIT_S)
        followers = worker.followers.values()
        assert len(followers) == 2, worker.sources
        await until(lambda: all(each.connected for each in followers), "both are followed")
        yield service, client


async def ask(client, prompt, max_tokens):
    """Returns the cached tokens that the engine reports."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        usage = (await response.json())["usage"]
    return (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def noted_decisions(router):
    """A list that gets every decision of the router."""
    decisions, route = [], router.route

    def noting(*args, **kwargs):
        decisions.append(route(*args, **kwargs))
        return decisions[-1]

    router.route = noting
    return decisions


def knows(router, rank, prompt):
    index = router.index_of(rank)
    hashes = index.hasher.sequence_hashes(as_tokens(prompt))
    if len(hashes) == 0 or rank not in index.numbers:
        return len(hashes) == 0
    return index.overlap(hashes).depth[index.numbers.number_of(rank)] == len(hashes)
