"""What the event thread relies on, of each transport."""

import select
from contextlib import ExitStack
from urllib.request import urlopen

import pytest

from kvplug import Rank, Router, RouterConfig
from kvplug.errors import TransportError
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from kvplug.ingest.trust import Trust
from kvplug.kernels._jit import compile_all
from kvplug.nats.connection import NatsConnection
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import PublisherName, Subjects
from kvplug.topics import Topic
from kvplug.transports import TRANSPORTS
from kvplug.transports.base import Connection, Message
from kvplug.transports.memory import MemoryTransport
from kvplug.transports.nats import NatsTransport
from kvplug.transports.zmq import ZmqTransport
from tests.ingest.publisher import TOPIC, Publisher, ReplayServer, message, stored
from tests.nats_servers import nats_servers
from tests.plugins.stock_client import wait_until
from tests.waiting import until


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Nobody waits for a first event while its kernels are compiled."""
    compile_all()


class ZmqEngine:
    """An engine that publishes on real sockets."""

    Transport = ZmqTransport
    topic = TOPIC

    def __init__(self):
        self.transport = self.Transport()
        self._publisher, self._server = Publisher(), ReplayServer()
        self.endpoint, self.replay = self._publisher.endpoint, self._server.endpoint

    def start(self):
        self._server.history = []
        self._publisher.open()

    def wait_for_a_subscriber(self):
        self._publisher.wait_for_a_subscriber()

    def publish(self, payload, *, is_lost=False):
        said = Message(TOPIC, len(self._server.history), payload)
        self._server.history.append(said)
        if not is_lost:
            self._publisher.send(said)

    def stop(self):
        self._publisher.close()

    def destroy(self):
        self._server.close()
        self._publisher.destroy()
        self.transport.close()


class MemoryEngine:
    """An engine in this process."""

    Transport = MemoryTransport
    topic = TOPIC
    endpoint = replay = "memory://engine"

    def __init__(self):
        self.transport = self.Transport()
        self.start()

    def start(self):
        self._publisher = self.transport.publisher(self.endpoint, topic=TOPIC.decode())

    def wait_for_a_subscriber(self):
        """Whoever follows is there at once."""

    def publish(self, payload, *, is_lost=False):
        if is_lost:
            self._publisher.keep(payload)
        else:
            self._publisher.publish(payload)

    def stop(self):
        self._publisher.close()

    def destroy(self):
        self.transport.close()


class NatsEngine:
    """An engine whose stock payloads go over NATS; it is there as long as the server."""

    Transport = NatsTransport
    topic = b"kv@engine/0"

    def __init__(self):
        self._servers = ExitStack()
        self._node = self._servers.enter_context(nats_servers())[0]
        self.endpoint = self.replay = "nats://engine/0"
        settings = NatsSettings(servers=(self._node.url,))
        self._subjects = Subjects(settings.fleet)
        self._publisher, self._reader = (
            NatsConnection(settings, name) for name in ("engine", "router-1")
        )
        self.transport = self.Transport(self._reader, self._subjects)
        self._history = []
        self._publisher.start()
        self._reader.start()
        self._publisher.submit(self._answer_asks()).result(10)
        wait_until(lambda: self._reader.is_connected, "the reader is connected")

    def start(self):
        self._history = []
        self._node.start()

    def wait_for_a_subscriber(self):
        url = f"http://127.0.0.1:{self._node.monitor_port}/connz?subs=1"
        wanted = self._subjects.events(PublisherName("engine", 0))
        wait_until(lambda: wanted in urlopen(url).read().decode(), "somebody has subscribed")
        wait_until(lambda: self._publisher.is_connected, "the engine is connected")

    def publish(self, payload, *, is_lost=False):
        self._history.append(payload)
        if not is_lost:
            number = len(self._history) - 1
            subject = self._subjects.events(PublisherName("engine", 0))
            self._publisher.submit(self._send(subject, number, payload)).result(10)

    def stop(self):
        self._node.kill()

    def destroy(self):
        self.transport.close()
        self._reader.stop()
        self._publisher.stop()
        self._servers.close()

    async def _send(self, subject, number, payload):
        client = await self._publisher.connected()
        await client.publish(subject, payload, headers={"Kvplug-Number": str(number)})

    async def _answer_asks(self):
        client = await self._publisher.connected()

        async def answer(msg):
            first = int.from_bytes(msg.data, "big")
            for number, payload in enumerate(self._history):
                if number >= first:
                    await self._send(msg.reply, number, payload)
            await self._send(msg.reply, -1, b"")

        await client.subscribe(self._subjects.asks(PublisherName("engine", 0)), cb=answer)
        await client.flush()


RIGS = (ZmqEngine, MemoryEngine, NatsEngine)
"""One for each transport. Its engine runs at first; `replay` is None if it has no replays."""


@pytest.fixture(params=RIGS)
def engine(request):
    engine = request.param()
    yield engine
    engine.destroy()


@pytest.fixture
def replaying(engine):
    if engine.replay is None:
        pytest.skip("it has no replays")
    return engine


@pytest.fixture
def source(engine):
    source = engine.transport.connect(engine.endpoint, "kv@", engine.replay)
    yield source
    source.close()


async def receive(source, num_messages, *, part=10):
    received = []
    await until(
        lambda: received.extend(source.receive(part)) or len(received) >= num_messages,
        f"{num_messages} messages have arrived",
    )
    return received


async def changed(source, *expected):
    changes = []
    await until(
        lambda: changes.extend(source.connection_changes()) or len(changes) >= len(expected),
        f"{expected} is told",
    )
    assert tuple(changes) == expected


async def subscribed(engine, source):
    await changed(source, Connection.OPENED)
    assert source.receive(1) == []
    engine.wait_for_a_subscriber()


async def test_messages_come_in_order_with_their_numbers(engine, source):
    await subscribed(engine, source)
    for number in range(5):
        engine.publish(b"%d" % number)
    expected = [Message(engine.topic, number, b"%d" % number) for number in range(5)]
    assert await receive(source, 5, part=2) == expected
    assert source.receive(10) == []


async def test_a_part_has_as_many_messages_as_it_may(engine, source):
    await subscribed(engine, source)
    for _ in range(5):
        engine.publish(b"")
    await until(lambda: is_readable(source), "something has arrived")
    assert len(await receive(source, 1, part=1)) == 1
    assert len(await receive(source, 4)) == 4


def is_readable(source):
    return bool(select.select(source.filenos(), [], [], 0)[0])


async def test_other_topics_are_left_out(engine, source):
    other = engine.transport.connect(engine.endpoint, "other@", None)
    await subscribed(engine, source)
    engine.publish(b"said")
    await receive(source, 1)
    assert other.receive(10) == []
    other.close()


async def test_descriptors_wake_whoever_polls(engine, source):
    await until(lambda: is_readable(source), "the connection wakes it")
    await subscribed(engine, source)
    assert source.connection_changes() == source.receive(10) == []
    await until(lambda: not drained(source), "all is taken")
    engine.publish(b"said")
    await until(lambda: is_readable(source), "a message wakes it")
    await receive(source, 1)


def drained(source):
    """Whether there is still something that would wake it."""
    source.connection_changes()
    source.receive(10)
    return is_readable(source)


async def test_a_source_may_be_opened_before_its_publisher(engine, source):
    await subscribed(engine, source)
    engine.stop()
    await changed(source, Connection.LOST)
    source.close()
    source = engine.transport.connect(engine.endpoint, "kv@", engine.replay)
    assert source.connection_changes() == source.receive(10) == []
    filenos = source.filenos()
    engine.start()
    await subscribed(engine, source)
    engine.publish(b"said")
    assert await receive(source, 1) == [Message(engine.topic, 0, b"said")]
    assert source.filenos() == filenos
    source.close()


async def test_a_replay_begins_where_it_is_asked_to(replaying, source):
    for number in range(40):
        replaying.publish(b"%d" % number)
    answer = source.request_replay((3).to_bytes(8, "big"), None)
    answered = await receive(answer, 37, part=32)
    assert [said.sequence for said in answered] == list(range(3, 40))
    assert answered[0].payload == b"3"
    await until(lambda: answer.receive(10) or answer.is_ended, "the end is told")
    answer.close()


@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.usefixtures("replaying")
async def test_an_empty_replay_ends(source, first):
    answer = source.request_replay(first.to_bytes(8, "big"), None)
    await until(lambda: answer.receive(10) or answer.is_ended, "the end is told")
    answer.close()
    answer.close()


def test_what_is_closed_may_be_closed_again(engine, source):
    source.close()
    source.close()


def test_an_endpoint_that_is_none_is_rejected(engine):
    with pytest.raises(TransportError, match="expected an endpoint like"):
        engine.transport.check("nonsense")


def test_every_transport_has_a_rig():
    assert {*TRANSPORTS.values()} <= {rig.Transport for rig in RIGS}


@pytest.fixture
def router():
    router = Router(RouterConfig(block_size=4))
    router.add_worker("w")
    return router


@pytest.fixture
def events(engine):
    endpoints = filter(None, (engine.endpoint, engine.replay))
    schemes = [each.partition("://")[0] for each in endpoints]
    events = EventThread(dict.fromkeys(schemes, lambda: engine.transport))
    events.start()
    yield events
    events.stop()


def blocks_of(router):
    with router._lock:  # an event may come meanwhile
        return sorted(int(n) for n in router.index.engine_hashes_of(Rank("w")))


def payload(first_token):
    return message(0, stored(first_token)).payload


async def test_the_event_thread_fills_a_gap(replaying, router, events):
    engine, follower = replaying, Follower(router, Rank("w"))
    events.follow(follower, engine.endpoint, "kv@", engine.replay)
    engine.wait_for_a_subscriber()
    await until(lambda: follower.trust.level is Trust.EXACT, "it has said nothing yet")
    engine.publish(payload(1))
    engine.publish(payload(11), is_lost=True)
    engine.publish(payload(21))
    await until(lambda: blocks_of(router) == [1000, 11_000, 21_000], "the gap is filled")
    await until(lambda: follower.trust.level is Trust.EXACT, "it is exact again")


async def test_the_event_thread_follows_a_restart(engine, router, events):
    follower = Follower(router, Rank("w"))
    events.follow(follower, engine.endpoint, "kv@", engine.replay)
    for first_token in (1, 31):
        engine.wait_for_a_subscriber()
        engine.publish(payload(first_token))
        expected = [1000 * first_token]
        await until(lambda blocks=expected: blocks_of(router) == blocks, f"{expected} are known")
        engine.stop()
        await until(lambda: not follower.connected, "the loss is noticed")
        engine.start()


async def test_publishers_in_this_process_may_share_an_endpoint(router):
    memory = MemoryTransport()
    events = EventThread({"memory": lambda: memory})
    events.start()
    endpoint = events.bind("memory://all")
    follower = Follower(router, Rank("w"))
    events.follow_topic(follower, Topic("pod-1", "m"))
    for pod in range(3):
        publisher = memory.publisher(endpoint, topic=f"kv@pod-{pod}@m")
        publisher.publish(payload(10 * pod + 1))
    await until(lambda: blocks_of(router) == [11_000], "the worker's block is known")
    await until(lambda: len(events.dispatcher.unknown) == 2, "the others are counted")
    events.stop()


async def test_an_endpoint_that_the_publisher_names_is_asked(replaying, source):
    replaying.publish(b"said")
    named = replaying.replay.replace("127.0.0.1", "*")
    answer = source.request_replay((0).to_bytes(8, "big"), named)
    assert [said.payload for said in await receive(answer, 1)] == [b"said"]
    await until(lambda: answer.receive(10) or answer.is_ended, "the end is told")
    answer.close()


def test_without_an_endpoint_nobody_is_asked(engine):
    source = engine.transport.connect(engine.endpoint, "kv@", None)
    with pytest.raises(TransportError, match="expected a replay endpoint"):
        source.request_replay(b"", None)
    source.close()
