"""`vllm serve org/model`: the router finds the model's tokenizer in this machine's hub cache."""

import os

import aiohttp

from examples.launch.engine_env import ensure_tiny_model, ensure_vllm
from examples.launch.engine_server import MODEL_NAME
from examples.launch.vllm_server import VllmServer, VllmSettings
from tests.engines.engine_pool import Recipe, uses
from tests.engines.engine_start import FORKED, START_PLUGIN
from tests.hub_cache import put_into_hub_cache
from tests.server.router_process import router_process

HUB_NAME = "org/tiny-llama"
TEXT = "The quick brown fox jumps over the lazy dog, and then it does so once more. " * 12


class HubServer(VllmServer):
    """Started with the model's name on the hub; `home` is the cache that has it."""

    def __init__(self, name, settings, *, log_dir, home):
        self.home = home
        super().__init__(name, settings, log_dir=log_dir)


def make(folder):
    python = ensure_vllm()
    home = put_into_hub_cache(folder / "hf", HUB_NAME, ensure_tiny_model(python))
    settings = VllmSettings(
        python=python,
        model_dir=HUB_NAME,
        extra_env={"PYTHONPATH": str(START_PLUGIN), **FORKED, **home},
    )
    return HubServer("vllm-hub", settings, log_dir=folder, home=home)


ENGINE = Recipe("vllm-hub", make)
pytestmark = uses(ENGINE)


async def test_text_for_a_model_of_the_hub_is_routed_by_its_prefix(engine):
    environment = {**os.environ, **engine.home, "PYTHONUNBUFFERED": "1"}
    environment.pop("HF_HUB_CACHE", None)
    worker = f"{engine.url},events={engine.events_endpoint},replay={engine.replay_endpoint}"
    async with (
        router_process(worker, limit=256, env=environment) as (url, lines),
        aiohttp.ClientSession(url) as client,
    ):
        first = await complete(client)
        again = await complete(client)
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert first["usage"]["prompt_tokens"] > cached > 0
        async with client.get("/metrics") as response:
            metrics = await response.text()
        assert predicted(metrics, engine.url) == cached
        assert not any("--tokenizer" in line for line in lines)


async def complete(client):
    body = {"model": MODEL_NAME, "prompt": TEXT, "max_tokens": 4}
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def predicted(metrics, worker):
    line = f'kvplug_predicted_cached_tokens_total{{worker="{worker}"}} '
    return float(metrics.partition(line)[2].partition("\n")[0])
