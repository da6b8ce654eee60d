"""Many publishers that connect to one socket of ours."""

import itertools
import socket

import pytest
import zmq

from kvplug import Rank, Router, RouterConfig
from kvplug.errors import ConfigError, TransportError
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from kvplug.topics import Topic
from kvplug.transports.zmq import ZmqSource
from tests.ingest.publisher import frames_of, message, stored
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
        self._socket.send_multipart(frames_of(message(number, *events, topic=self._topic)))

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
def events():
    events = EventThread()
    events.start()
    yield events
    events.stop()


@pytest.fixture
def endpoint(events):
    return events.bind("tcp://127.0.0.1:*")


@pytest.fixture
def followers(router, events, endpoint):
    followers = [Follower(router, Rank(f"w{i}")) for i in range(2)]
    for i, follower in enumerate(followers):
        events.follow_topic(follower, Topic(f"pod-{i}", "m"))
    return followers


@pytest.fixture
def publishers(connect, endpoint, followers):
    return [connect(endpoint, f"pod-{i}") for i in range(2)]


def blocks_of(router, worker):
    with router._lock:  # an event may come meanwhile
        return router.index.engine_hashes_of(Rank(worker)).tolist()


def confidence_of(router, worker):
    return router.fleet_index.confidence_of(Rank(worker))


async def test_engines_on_one_socket_are_followed_apart(router, publishers):
    for i, publisher in enumerate(publishers):
        publisher.send(0, stored(10 * i + 1))
    await until(lambda: blocks_of(router, "w0") == [1000], "w0's block is known")
    await until(lambda: blocks_of(router, "w1") == [11_000], "w1's block is known")


async def test_an_engine_that_returns_starts_over_and_the_other_goes_on(
    router, events, endpoint, publishers, connect
):
    for i, publisher in enumerate(publishers):
        publisher.send(0, stored(10 * i + 1))
    await until(lambda: len(router.index) == 2, "both blocks are known")
    publishers[0].close()
    await until(lambda: events.dispatcher.num_peers == 1, "the loss of a peer is noticed")
    publishers[1].send(1, stored(21))
    returned = connect(endpoint, "pod-0")
    returned.send(5, stored(31))  # its first messages went before it was connected
    await until(lambda: blocks_of(router, "w0") == [31_000], "w0 started over")
    assert sorted(blocks_of(router, "w1")) == [11_000, 21_000]


async def test_when_all_engines_are_gone_nothing_is_known(router, publishers):
    publishers[0].send(0, stored(1))
    await until(lambda: len(router.index) == 1, "the block is known")
    for publisher in publishers:
        publisher.close()
    await until(lambda: len(router.index) == 0, "the blocks are forgotten")


async def test_a_probe_of_the_port_is_no_loss(router, events, endpoint, publishers):
    publishers[0].send(0, stored(1))
    await until(lambda: len(router.index) == 1, "the block is known")
    port = int(endpoint.rpartition(":")[2])
    for _ in range(3):
        socket.create_connection(("127.0.0.1", port)).close()
    await until(lambda: events.dispatcher.num_lost == 3, "the probes are seen")
    publishers[0].send(1, stored(11))
    await until(lambda: len(router.index) == 2, "the worker's stream goes on")
    assert events.dispatcher.num_peers == 2


async def test_the_topic_narrows_what_is_received(router, connect, events):
    endpoint = events.bind("tcp://127.0.0.1:*", Topic("pod-0").subscription)
    events.follow_topic(Follower(router, Rank("w0")), Topic("pod-0"))
    stranger = connect(endpoint, "pod-00")
    publisher = connect(endpoint, "pod-0")
    stranger.send(0, stored(1))
    publisher.send(0, stored(11))
    await until(lambda: blocks_of(router, "w0") == [11_000], "the pod's block is known")
    assert not events.dispatcher.unknown


class Answers:
    """What they tell of an engine's events."""

    accuracy = 0.5

    def confidence(self):
        return self.accuracy

    def contradicted(self):
        return None


async def test_the_confidence_in_a_stale_worker_follows_the_audit(router, connect, events):
    endpoint, answers = events.bind("tcp://127.0.0.1:*"), Answers()
    follower = Follower(router, Rank("w0"), evidence=answers)
    events.follow_topic(follower, Topic("pod-0", "m"))
    connect(endpoint, "pod-0").send(17, stored(1))
    await until(lambda: confidence_of(router, "w0") == 0.5, "it joined late")
    answers.accuracy = 0.95
    await until(lambda: confidence_of(router, "w0") == 0.95, "the router is told again")


async def test_a_shared_endpoint_that_fails_is_bound_again(
    router, events, followers, publishers, monkeypatch, caplog
):
    publishers[0].send(0, stored(1))
    await until(lambda: len(router.index) == 1, "the block is known")
    failing = iter([OSError(24, "Too many open files")])
    receive = ZmqSource.receive

    def fail_once(source, max_messages):
        for error in failing:
            raise error
        return receive(source, max_messages)

    monkeypatch.setattr(ZmqSource, "receive", fail_once)
    await until(lambda: len(router.index) == 0, "all is forgotten")
    numbers = itertools.count(1)

    def is_heard():
        # ZMQ connects by itself; what is sent before the subscription is back is lost.
        publishers[0].send(next(numbers), stored(11))
        return blocks_of(router, "w0") == [11_000]

    await until(is_heard, "it is heard again")
    assert "all workers: following its events failed" in caplog.text


async def test_unfollow(router, events, followers, publishers):
    events.unfollow(followers[0])
    publishers[0].send(0, stored(1))
    unknown = events.dispatcher.unknown
    await until(lambda: unknown == {"kv@pod-0@m": 1}, "the message is counted")
    assert len(router.index) == 0


def test_a_topic_belongs_to_one_worker(events, followers):
    with pytest.raises(ConfigError, match="expected a topic of its own"):
        events.follow_topic(followers[1], Topic("pod-0"))


def test_an_endpoint_that_is_taken_is_rejected(endpoint):
    other = EventThread()
    other.start()
    with pytest.raises(TransportError, match=r"cannot bind .*Address already in use"):
        other.bind(endpoint)
    other.stop()
