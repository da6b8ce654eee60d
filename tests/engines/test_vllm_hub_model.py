"""`vllm serve org/model`: given one address, the router finds the rest, the tokenizer included.

The model is in this machine's Hugging Face cache, and nothing is asked from the hub.
"""

import asyncio
import os

import aiohttp
import pytest

from examples.launch.engine_env import ensure_tiny_model, ensure_vllm
from examples.launch.plugin_env import ensure_plugin
from tests.engines.engine_pool import Recipe, uses
from tests.engines.engine_start import FORKED
from tests.engines.plugged_vllm import MODEL, PluggedVllm
from tests.hub_cache import put_into_hub_cache
from tests.server.router_process import router_process
from tests.waiting import POLL_S

HUB_NAME = "org/tiny-llama"
TEXT = "The quick brown fox jumps over the lazy dog, and then it does so once more. " * 12
FLAGS = ("--enable-prompt-tokens-details",)


class HubVllm(PluggedVllm):
    """`home` is the environment that names the cache with its model."""

    def __init__(self, python, home, plugin, folder):
        self.home = home
        env = {**FORKED, **home}
        super().__init__(python, HUB_NAME, plugin, folder, flags=FLAGS, env=env)

    @property
    def events(self):
        return f"tcp://127.0.0.1:{self.events_port}"


def hub_vllm(name, *, is_stock):
    def make(folder):
        python = ensure_vllm()
        home = put_into_hub_cache(folder / "hf", HUB_NAME, ensure_tiny_model(python))
        return HubVllm(python, home, None if is_stock else ensure_plugin(python), folder)

    return Recipe(name, make)


STOCK = hub_vllm("vllm-hub-stock", is_stock=True)
PLUGGED = hub_vllm("vllm-hub", is_stock=False)


@pytest.mark.parametrize(
    ("named_by", "wire"),
    [
        pytest.param("url", "stock", marks=uses(STOCK)),
        pytest.param("url", "kvplug 1", marks=uses(PLUGGED)),
        pytest.param("events", "kvplug 1", marks=uses(PLUGGED)),
    ],
)
async def test_one_address_is_enough_to_route_text_by_its_prefix(named_by, wire, engine):
    environment = {**os.environ, **engine.home, "PYTHONUNBUFFERED": "1"}
    environment.pop("HF_HUB_CACHE", None)
    name = getattr(engine, named_by)
    async with (
        router_process(name, limit=256, env=environment) as (url, lines),
        aiohttp.ClientSession(url) as client,
    ):
        worker = await up(client)
        assert (worker["name"], worker["url"]) == (name, engine.url)
        text = f"{named_by}, {wire}: {TEXT}"
        first = await complete(client, text)
        again = await complete(client, text)
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert first["usage"]["prompt_tokens"] > cached > 0
        assert predicted(await text_of(client, "/metrics"), name) == cached
        assert not any("--tokenizer" in line for line in lines)
        [rank] = (await up(client))["ranks"]
        assert rank["events"]["wire"] == wire
        if wire != "stock":
            hello = rank["events"]["hello"]
            assert hello["url"] == engine.url
            assert len(hello["tokenizer"]) == 16
            assert hello["capacity_blocks"] == 63  # vLLM keeps one of 64


async def up(client):
    """The only worker, once it is up."""
    async with asyncio.timeout(30):
        while True:
            async with client.get("/health") as response:
                [worker] = (await response.json())["workers"]
            events = worker["ranks"][0]["events"]
            if worker["state"] == "up" and events is not None and events["connected"]:
                return worker
            await asyncio.sleep(POLL_S)


async def complete(client, prompt):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def text_of(client, path):
    async with client.get(path) as response:
        return await response.text()


def predicted(metrics, worker):
    line = f'kvplug_predicted_cached_tokens_total{{worker="{worker}"}} '
    return float(metrics.partition(line)[2].partition("\n")[0])
