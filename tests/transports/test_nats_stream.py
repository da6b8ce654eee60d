"""The stream of a fleet, on a real server that is killed, emptied and made anew."""

import time

import pytest

from kvplug.ingest import trust
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from kvplug.kernels._jit import compile_all
from kvplug.nats.subjects import PublisherName
from kvplug.topics import Topic
from tests.ingest.life_publisher import RANK, LifePublisher, TellableRouter, names
from tests.ingest.publisher import message, stored
from tests.transports.nats_fleet import NatsEngine, nats_fleet
from tests.waiting import until


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    compile_all()


@pytest.fixture
def fleet():
    with nats_fleet() as fleet:
        fleet.make_stream()
        yield fleet


@pytest.fixture
def engine(fleet):
    return NatsEngine(fleet)


class Reader:
    """A router that follows worker `w`."""

    def __init__(self, fleet, *, after=0, worker="w"):
        self.router = TellableRouter()
        self.router.add_worker("w")
        self.transport = fleet.transport()
        self.events = EventThread({"nats": lambda: self.transport})
        self.events.start()
        self.events.bind("nats://")
        self.follower = Follower(self.router, RANK)
        self.events.follow_topic(self.follower, Topic(f"kv@{worker}/0".removeprefix("kv@")))
        if after is not None:
            self.transport.start_after(after)

    @property
    def state(self):
        return self.events.call(lambda: (names(self.router), self.follower.trust))

    async def knows(self, expected, state=trust.EXACT):
        await until(lambda: self.state == (expected, state), f"{expected} are known, {state}")

    async def is_exact(self, engine, expected):
        """While the engine gives signs of life."""
        beats_at_s = 0.0

        def is_known():
            nonlocal beats_at_s
            if time.monotonic() >= beats_at_s:
                beats_at_s = time.monotonic() + 1.0
                engine.beat()
            return self.state == (expected, trust.EXACT)

        await until(is_known, f"{expected} are known for certain")

    async def has_read(self, seq):
        await until(lambda: self.transport.applied_seq == seq, f"{seq} is applied")


@pytest.fixture
def read(fleet):
    readers = []

    def start(**more):
        readers.append(Reader(fleet, **more))
        return readers[-1]

    yield start
    for reader in readers:
        reader.events.stop()


async def test_what_was_said_before_is_known_without_an_ask(engine, read):
    model = engine.model
    engine.say(model.hello(), model.store(3), model.remove_last())
    reader = read()
    await reader.knows([1, 2], trust.NO_HEARTBEAT)
    await reader.is_exact(engine, [1, 2])
    engine.say(model.store(1))
    await reader.is_exact(engine, [1, 2, 4])
    await reader.has_read(4)
    assert engine.asks == []
    await until(lambda: reader.transport.reading.num_pending == 0, "nothing is left")


async def test_nothing_is_read_before_it_is_said_where(engine, read):
    reader = read(after=None)
    engine.say(engine.model.hello(), engine.model.store(1))
    assert reader.transport.reading.num_consumers == 0
    reader.transport.start_after(2)
    engine.say(engine.model.store(1))
    await reader.has_read(3)
    await reader.is_exact(engine, [1, 2])
    assert len(engine.asks) == 1, "what came before was not read"


async def test_a_killed_server_loses_nothing(fleet, engine, read):
    reader = read()
    engine.say(engine.model.hello(), engine.model.store(2))
    await reader.is_exact(engine, [1, 2])
    fleet.node.kill()
    await reader.knows([1, 2], trust.INTERRUPTED)
    fleet.node.start()
    engine.say(engine.model.store(1))
    await reader.knows([1, 2, 3], trust.NO_HEARTBEAT)
    await reader.is_exact(engine, [1, 2, 3])
    assert engine.asks == []
    assert reader.transport.reading.num_rewound == 0


async def test_a_server_that_hangs_shows_within_five_seconds(fleet, engine, read):
    reader = read()
    engine.say(engine.model.hello(), engine.model.store(1))
    await reader.is_exact(engine, [1])
    fleet.node.pause()
    paused_at_s = time.monotonic()
    await until(lambda: reader.state[1].level is trust.Trust.STALE, "it is not exact any more")
    assert time.monotonic() - paused_at_s < 5.0
    fleet.node.resume()
    engine.say(engine.model.store(1))
    await reader.is_exact(engine, [1, 2])
    assert engine.asks == []


async def test_a_consumer_that_is_deleted_is_made_anew(fleet, engine, read):
    reader = read()
    engine.say(engine.model.hello())
    await reader.has_read(1)
    fleet.run(lambda client, js: js.delete_consumer(fleet.subjects.stream, "router-1"))
    await until(lambda: reader.transport.reading.num_consumers == 2, "there is another one")
    engine.say(engine.model.store(1))
    await reader.is_exact(engine, [1])


async def test_a_stream_that_is_made_anew_is_read_from_the_first_message(fleet, engine, read):
    reader = read()
    engine.say(engine.model.hello(), engine.model.store(1), engine.model.store(1))
    await reader.is_exact(engine, [1, 2])
    fleet.delete_stream()
    await until(lambda: reader.transport.reading.error, "it is missed")
    assert "does not exist" in reader.transport.reading.error
    fleet.make_stream()
    engine.say(engine.model.store(1))
    await reader.is_exact(engine, [1, 2, 3])
    await reader.has_read(1)
    assert reader.transport.reading.num_rewound == 1
    assert reader.transport.reading.error is None


async def test_what_somebody_purged_is_asked_for(fleet, engine, read):
    engine.say(engine.model.hello(), engine.model.store(1), engine.model.store(1))
    fleet.run(lambda client, js: js.purge_stream(fleet.subjects.stream, keep=1))
    reader = read()
    await reader.knows([1, 2], trust.NO_HEARTBEAT)
    await reader.is_exact(engine, [1, 2])
    assert len(engine.asks) == 1


async def test_a_lost_tail_shows_with_a_beat(engine, read):
    reader = read()
    engine.say(engine.model.hello(), engine.model.store(1))
    await reader.is_exact(engine, [1])
    engine.model.store(1)
    await reader.is_exact(engine, [1, 2])
    assert len(engine.asks) == 1


async def test_a_beat_waits_for_the_stream(engine, read):
    reader = read()
    engine.say(engine.model.hello(), engine.model.store(1))
    await reader.is_exact(engine, [1])
    late, num_held = engine.model.store(1), reader.transport.reading.num_held
    engine.seq += 1
    engine.beat()
    await until(lambda: reader.transport.reading.num_held > num_held, "the beat waits")
    engine.say(late)
    await reader.is_exact(engine, [1, 2])
    assert (engine.asks, reader.transport.reading.num_late) == ([], 0)


async def test_a_beat_does_not_wait_for_ever(engine, read):
    reader = read()
    engine.say(engine.model.hello(), engine.model.store(1))
    engine.model.store(1)
    engine.seq += 1
    await reader.is_exact(engine, [1, 2])
    assert reader.transport.reading.num_late >= 1


async def test_a_restarted_engine_needs_no_ask(engine, read):
    reader = read()
    engine.say(engine.model.hello(), engine.model.store(1))
    engine.model.restart()
    engine.say(engine.model.hello(), engine.model.store(1))
    await reader.is_exact(engine, [2])
    assert engine.asks == []


async def test_damaged_and_huge_messages_stop_nothing(fleet, engine, read):
    reader = read()
    engine.say(engine.model.hello())
    for payload in (b"", b"\x98\xa6kvplug", bytes(10**6), LifePublisher().store(1).payload[:30]):
        fleet.publish(engine.subject, payload)
    fleet.publish(fleet.subjects.marks, b"")
    fleet.publish("kvplug.default.kv.w", b"too short")
    fleet.publish(engine.subject, b"numbered", headers={"Kvplug-Number": "x"})
    engine.say(engine.model.store(1))
    engine.beat()
    await reader.has_read(engine.seq)
    await reader.is_exact(engine, [1])
    assert reader.events.dispatcher.unknown == {}


async def test_a_reader_that_takes_nothing_makes_the_server_wait(fleet, engine):
    transport = fleet.transport()
    source, _ = transport.bind("nats://", "kv@")
    transport.start_after(0)
    payload = engine.model.store(1).payload

    async def publish_many(client, js):
        for _ in range(3000):
            await client.publish(engine.subject, payload)
        await client.flush()

    fleet.run(publish_many)
    await until(lambda: len(source._arrivals.queue) >= 512, "the queue is full")
    assert consumer_of(fleet).num_pending > 1000, "the rest waits at the server"
    assert len(source._arrivals.queue) <= 1024
    taken = []
    await until(lambda: taken.extend(source.receive(64)) or len(taken) >= 3000, "all has come")
    source.receive(1)
    assert (len(taken), transport.applied_seq) == (3000, 3000)
    await until(lambda: consumer_of(fleet).ack_floor.stream_seq == 3000, "it is acknowledged")
    transport.close()


def consumer_of(fleet):
    return fleet.run(lambda client, js: js.consumer_info(fleet.subjects.stream, "router-1"))


async def test_stock_payloads_have_their_number_in_a_header(fleet, read):
    name, said = PublisherName("stock", 0), {}
    subject = fleet.subjects.events(name)

    async def answer_asks(client, js):
        async def answer(msg):
            for number, payload in said.items():
                headers = {"Kvplug-Number": str(number)}
                await client.publish(msg.reply, payload, headers=headers)
            await client.publish(msg.reply, b"", headers={"Kvplug-Number": "-1"})

        await client.subscribe(fleet.subjects.asks(name), cb=answer)

    fleet.run(answer_asks)
    reader = read(worker="stock")
    for number, token in enumerate((1, 11)):
        payload = said[number] = message(number, stored(token)).payload
        fleet.publish(subject, payload, headers={"Kvplug-Number": str(number)})
    await until(lambda: names(reader.router) == [1000, 11_000], "both are known")
    assert reader.follower.position() is None
    await until(
        lambda: reader.follower.trust is trust.STOCK_OVER_NATS, "what cannot be certain is not"
    )


async def test_beats_that_nobody_takes_are_bounded(fleet, engine, monkeypatch):
    monkeypatch.setattr("kvplug.transports.nats_stream._MAX_BEAT_BYTES", 10_000)
    transport = fleet.transport()
    source, _ = transport.bind("nats://", "")
    transport.start_after(0)
    await until(lambda: transport.reading.num_consumers, "it reads")
    engine.beat()
    await until(lambda: source.receive(10), "a beat comes")
    for _ in range(100):
        engine.beat()
    engine.say(engine.model.hello())
    await until(lambda: transport.reading.num_pending == 0 and source.receive(1), "one comes")
    assert len(source.receive(1000)) < 30
    engine.beat()
    await until(lambda: source.receive(10), "the next beat comes")
    source.close()
