"""Engines that connect to the router with their events."""

import aiohttp
import pytest
import zmq

from kvplug.errors import ConfigError, TransportError
from kvplug.router.config import RouterConfig
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.service import RouterService
from tests.ingest.publisher import frames_of, message, stored
from tests.waiting import until

URLS = ("http://127.0.0.1:9", "http://127.0.0.1:10")


def config(endpoint, *topics):
    workers = (WorkerSpec(url=url, topic=t) for url, t in zip(URLS, topics, strict=False))
    return ServerConfig(
        workers=tuple(workers), port=0, router=RouterConfig(block_size=4), events_bind=endpoint
    )


@pytest.fixture
def publisher():
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.linger = 0
        yield socket


async def test_the_worker_is_known_by_its_topic(publisher):
    async with RouterService(config("tcp://127.0.0.1:*", "kv@pod-0", "kv@pod-1@m")) as service:
        publisher.connect(service.fleet.events_endpoint)
        assert publisher.poll(10_000), "the router did not subscribe"
        publisher.send_multipart(frames_of(message(0, stored(1), topic=b"kv@pod-1@m")))
        await until(lambda: len(service.router.index) == 1, "the block is known")
        async with aiohttp.ClientSession(service.url) as client, client.get("/health") as response:
            events = [worker["ranks"][0]["events"] for worker in (await response.json())["workers"]]
        assert [each["connected"] for each in events] == [False, True]
        assert [each["endpoint"] for each in events] == [service.fleet.events_endpoint] * 2


async def test_two_workers_with_one_topic_are_rejected():
    with pytest.raises(ConfigError, match="expected a topic of its own for each worker"):
        async with RouterService(config("tcp://127.0.0.1:*", "kv@pod", "kv@pod@m")):
            pass


async def test_an_endpoint_that_is_none_is_rejected():
    with pytest.raises(TransportError, match="cannot bind 'tcp://nonsense'"):
        async with RouterService(config("tcp://nonsense", "kv@pod")):
            pass
