"""Requests with SGLang's extra_key, where a publisher names the keys of blocks, and where not."""

from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import ClientSession

from kvplug import Rank, codec
from kvplug.engines.sglang_notes import Expander
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.service import RouterService
from tests.server.engine import Engine, served
from tests.server.kvplug_publisher import publishing
from tests.waiting import until

LORA_ID = "0123456789abcdef" * 2


@asynccontextmanager
async def following(**about):
    """A router before an engine, and what the engine publishes."""
    with publishing(**about) as stream:
        async with served(Engine(adapters=["adapter"], owned_by="sglang")) as url:
            spec = WorkerSpec(url=url, events=stream.endpoint)
            config = ServerConfig(workers=(spec,), port=0, health_interval_s=0.05)
            async with RouterService(config) as service, ClientSession(service.url) as client:
                worker = service.fleet.workers[url]
                await until(lambda: worker.about is not None, "its hello has come")
                await until(lambda: service.fleet.names_extra_keys("m") == bool(about), "it counts")
                yield service, client, stream


def stored(name, *, extra_key=None, salt=None, lora=None):
    """One block of the tokens 1 to 4, as the Rust tree's binding has it."""
    item = ("block_stored", [name], None, [1, 2, 3, 4], 4, "GPU", salt, None, extra_key)
    return item if lora is None else (*item, lora)


def batch_of(*items):
    expander = Expander({"page_size": 4, "dynamo_format": False, "names_extra_keys": True})
    return codec.decode(msgspec.msgpack.encode((0.0, expander.expand(items), 0)))


async def cached(service, client, **more):
    """What the router expects of a prompt with those tokens, in tokens."""
    [counts] = service.proxy.counts.values()
    before = counts.num_cached_tokens
    body = {"model": "m", "prompt": [1, 2, 3, 4, 5], **more}
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200
    return counts.num_cached_tokens - before


NAMESPACES = {
    "key": ({"extra_key": "key"}, {"extra_key": "key"}),
    "key and salt": ({"extra_key": "key", "salt": "s"}, {"extra_key": "key", "cache_salt": "s"}),
    "adapter": ({"extra_key": LORA_ID, "lora": "adapter"}, {"lora_path": "adapter"}),
    "key and adapter": (
        {"extra_key": "key" + LORA_ID, "lora": "adapter"},
        {"lora_path": "adapter", "extra_key": "key"},
    ),
}


@pytest.mark.parametrize("name", NAMESPACES)
async def test_blocks_of_an_extra_key_are_found_by_requests_with_it(name):
    said, _ = NAMESPACES[name]
    async with following(names_extra_keys=True) as (service, client, stream):
        stream.publish(batch_of(stored(7), stored(7, **said)))
        [rank] = map(Rank, service.fleet.workers)
        held = lambda: service.router.index_of(rank).engine_hashes_of(rank)  # noqa: E731
        await until(lambda: len(held()) == 2, "both blocks are there")
        for key, (_, other) in NAMESPACES.items():
            expected = 4 if key == name else 0
            assert await cached(service, client, **other) == expected, key
        async with client.get("/metrics") as response:
            assert 'reason="extra_key"' not in await response.text()


async def test_requests_with_one_are_counted_where_events_do_not_say_it():
    async with following() as (service, client, _):
        assert await cached(service, client, extra_key="key") == 0
        async with client.get("/metrics") as response:
            text = await response.text()
    assert 'kvplug_requests_without_prefix_total{reason="extra_key"} 1.0' in text
