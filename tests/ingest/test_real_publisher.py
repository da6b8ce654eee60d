"""The plug-in's publisher and a follower, over sockets: with keys, gaps, restarts."""

import logging
import os

import pytest
from zmq.auth import create_certificates

from kvplug import Rank, Router, RouterConfig
from kvplug.curve_keys import ClientKeys, ServerKeys
from kvplug.engines.event_stream import EventStream
from kvplug.engines.settings import PublisherConfig
from kvplug.events import AllBlocksCleared, BlockRemoved, EventBatch
from kvplug.ingest import trust
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from kvplug.protocol import WorkerHello
from kvplug.transports import TRANSPORTS, transports_with
from tests.ingest.publisher import stored
from tests.waiting import until

RANK = Rank("w")


@pytest.fixture(params=[True, False], ids=["with keys", "without"])
def keys(request, tmp_path):
    """(of the server, of the client), or None for both."""
    if not request.param:
        return None, None
    folder = tmp_path / "clients"
    folder.mkdir()
    public, secret = create_certificates(tmp_path, "engine")
    _, client_secret = create_certificates(folder, "router")
    for each in (secret, client_secret):
        os.chmod(each, 0o600)
    server = ServerKeys.from_files(secret, folder)
    return server, ClientKeys.from_files(client_secret, public)


@pytest.fixture
def start(keys):
    """start(endpoint) -> a publisher, which ends with the test."""
    streams = []

    def started(endpoint="tcp://127.0.0.1:0", answers_at="tcp://127.0.0.1:0"):
        config = PublisherConfig(endpoint=endpoint, replay_endpoint=answers_at)
        about = WorkerHello(engine="test", capacity_blocks=1000)
        logger = logging.getLogger("kvplug.test")
        streams.append(EventStream(config, about, lambda batch: batch, logger, keys=keys[0]))
        return streams[-1]

    yield started
    for each in streams:
        each.shutdown()


@pytest.fixture
def router():
    router = Router(RouterConfig(block_size=4))
    router.add_worker("w")
    return router


@pytest.fixture
def events(keys):
    events = EventThread(TRANSPORTS if keys[1] is None else transports_with(keys[1]))
    events.start()
    yield events
    events.stop()


def names(router):
    with router._lock:  # an event may come meanwhile
        return sorted(int(name) for name in router.index.engine_hashes_of(RANK))


def publish(stream, *events):
    stream.publish(EventBatch(events=events))


async def test_a_follower_knows_what_the_engine_holds(router, events, start):
    stream, follower = start(), Follower(router, RANK)
    publish(stream, stored(1, 3))
    events.follow(follower, stream.endpoint)
    await until(lambda: names(router) == [1000, 1001, 1002], "a newcomer has all")
    await until(lambda: follower.trust is trust.EXACT, "it is exact")
    publish(stream, BlockRemoved(block_hashes=(1002,)), stored(50, parent=1001))
    await until(lambda: names(router) == [1000, 1001, 50_000], "live events are applied")
    assert router.cache_size(RANK).capacity == 1000
    assert (follower.about.engine, follower.skipped) == ("test", {})
    former = stream.endpoint, stream.answers_at
    stream.shutdown()
    await until(lambda: not follower.connected, "the loss is noticed")
    stream = start(*former)
    publish(stream, stored(70))
    await until(lambda: names(router) == [70_000], "another life has begun")
    await until(lambda: follower.trust is trust.EXACT, "it is exact again")
    publish(stream, AllBlocksCleared())
    await until(lambda: names(router) == [], "the cache is emptied")
    assert follower.sequencer.num_restarts == 1
