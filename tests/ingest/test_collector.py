"""Many publishers that connect to one socket of ours."""

import socket

import pytest
import zmq

from kvplug import Rank, Router, RouterConfig
from kvplug.errors import ConfigError, TransportError
from kvplug.ingest.collector import EventCollector
from kvplug.ingest.follower import Follower
from kvplug.topics import Topic
from tests.ingest.publisher import message, stored
from tests.waiting import until


class ConnectingPublisher:
    """An engine that connects to the router; XPUB tells when it may speak."""

    def __init__(self, endpoint, pod, context):
        self._topic = f"kv@{pod}@m".encode()
        self._socket = context.socket(zmq.XPUB)
        self._socket.connect(endpoint)
        assert self._socket.poll(10_000), "nobody subscribed"
        self._socket.recv()

    def send(self, number, *events):
        self._socket.send_multipart([self._topic, *message(number, *events)[1:]])

    def close(self):
        self._socket.close(linger=0)


@pytest.fixture
def connect():
    """Makes publishers, and closes them."""
    context, publishers = zmq.Context(), []

    def connected(endpoint, pod):
        publishers.append(ConnectingPublisher(endpoint, pod, context))
        return publishers[-1]

    yield connected
    for publisher in publishers:
        publisher.close()
    context.destroy(linger=0)


@pytest.fixture
def router():
    router = Router(RouterConfig(block_size=4))
    for worker in ("w0", "w1"):
        router.add_worker(worker)
    return router


@pytest.fixture
def collector():
    collector = EventCollector("tcp://127.0.0.1:*")
    collector.start()
    yield collector
    collector.stop()


@pytest.fixture
def followers(router, collector):
    followers = [Follower(router, Rank(f"w{i}")) for i in range(2)]
    for i, follower in enumerate(followers):
        collector.follow(follower, Topic(f"pod-{i}", "m"))
    return followers


@pytest.fixture
def publishers(connect, collector, followers):
    return [connect(collector.endpoint, f"pod-{i}") for i in range(2)]


def blocks_of(router, worker):
    with router._lock:  # an event may come meanwhile
        return router.index.engine_hashes_of(Rank(worker)).tolist()


async def test_engines_on_one_socket_are_followed_apart(router, publishers):
    for i, publisher in enumerate(publishers):
        publisher.send(0, stored(10 * i + 1))
    await until(lambda: blocks_of(router, "w0") == [1000], "w0's block is known")
    await until(lambda: blocks_of(router, "w1") == [11_000], "w1's block is known")


async def test_an_engine_that_returns_starts_over_and_the_other_goes_on(
    router, collector, publishers, connect
):
    for i, publisher in enumerate(publishers):
        publisher.send(0, stored(10 * i + 1))
    await until(lambda: len(router.index) == 2, "both blocks are known")
    publishers[0].close()
    await until(lambda: collector.dispatcher.num_peers == 1, "the loss of a peer is noticed")
    publishers[1].send(1, stored(21))
    returned = connect(collector.endpoint, "pod-0")
    returned.send(5, stored(31))  # its first messages went before it was connected
    await until(lambda: blocks_of(router, "w0") == [31_000], "w0 started over")
    assert sorted(blocks_of(router, "w1")) == [11_000, 21_000]


async def test_when_all_engines_are_gone_nothing_is_known(router, publishers):
    publishers[0].send(0, stored(1))
    await until(lambda: len(router.index) == 1, "the block is known")
    for publisher in publishers:
        publisher.close()
    await until(lambda: len(router.index) == 0, "the blocks are forgotten")


async def test_a_probe_of_the_port_is_no_loss(router, collector, publishers):
    publishers[0].send(0, stored(1))
    await until(lambda: len(router.index) == 1, "the block is known")
    port = int(collector.endpoint.rpartition(":")[2])
    for _ in range(3):
        socket.create_connection(("127.0.0.1", port)).close()
    await until(lambda: collector.dispatcher.num_lost == 3, "the probes are seen")
    publishers[0].send(1, stored(11))
    await until(lambda: len(router.index) == 2, "the worker's stream goes on")
    assert collector.dispatcher.num_peers == 2


async def test_the_topic_narrows_what_is_received(router, connect):
    collector = EventCollector("tcp://127.0.0.1:*", Topic("pod-0").subscription)
    collector.start()
    collector.follow(Follower(router, Rank("w0")), Topic("pod-0"))
    stranger = connect(collector.endpoint, "pod-00")
    publisher = connect(collector.endpoint, "pod-0")
    stranger.send(0, stored(1))
    publisher.send(0, stored(11))
    await until(lambda: blocks_of(router, "w0") == [11_000], "the pod's block is known")
    assert not collector.dispatcher.unknown
    collector.stop()


async def test_unfollow(router, collector, followers, publishers):
    collector.unfollow(followers[0])
    publishers[0].send(0, stored(1))
    unknown = collector.dispatcher.unknown
    await until(lambda: unknown == {"kv@pod-0@m": 1}, "the message is counted")
    assert len(router.index) == 0


def test_a_topic_belongs_to_one_worker(collector, followers):
    with pytest.raises(ConfigError, match="expected a topic of its own"):
        collector.follow(followers[1], Topic("pod-0"))


def test_an_endpoint_that_is_taken_is_refused(collector):
    other = EventCollector(collector.endpoint)
    with pytest.raises(TransportError, match=r"cannot bind .*Address already in use"):
        other.start()
