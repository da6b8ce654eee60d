"""`vllm serve org/model`: given one address, the router finds the rest, the tokenizer included.

The model is in this machine's Hugging Face cache, and nothing is asked from the hub.
"""

import pytest

from examples.launch.engine_env import ensure_tiny_model, ensure_vllm
from examples.launch.plugin_env import ensure_plugin
from tests.engines.engine_pool import Recipe, uses
from tests.engines.engine_start import FORKED
from tests.engines.one_address import TEXT, known, routes_by_prefix, told_only
from tests.engines.plugged_vllm import PluggedVllm
from tests.hub_cache import put_into_hub_cache

HUB_NAME = "org/tiny-llama"
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
    name = getattr(engine, named_by)
    async with told_only(name, engine.home) as (client, lines):
        await routes_by_prefix(client, name, f"{named_by}, {wire}: {TEXT}")
        assert not any("--tokenizer" in line for line in lines)
        worker = await known(client)
        assert (worker["name"], worker["url"]) == (name, engine.url)
        [rank] = worker["ranks"]
        assert rank["events"]["wire"] == wire
        if wire != "stock":
            hello = rank["events"]["hello"]
            assert hello["url"] == engine.url
            assert len(hello["tokenizer"]) == 16
            assert hello["capacity_blocks"] == 63  # vLLM keeps one of 64
