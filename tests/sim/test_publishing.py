"""What a simulated engine publishes, over real sockets: live, and replayed."""

import asyncio
import logging

import aiohttp
import pytest
import zmq

from kvplug import codec
from kvplug.engines.publisher import Publisher
from kvplug.engines.replay_server import END
from kvplug.engines.settings import PublisherConfig
from kvplug.errors import TransportError
from kvplug.events import BlockRemoved, EventBatch
from kvplug.nats.connection import NatsConnection
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import PublisherName, Subjects
from kvplug.sim.engine_service import EngineService
from kvplug.transports.zmq import message_of
from tests.nats_servers import free_ports, nats_servers
from tests.sim.test_engine_service import config
from tests.waiting import until

LOOPBACK = "tcp://127.0.0.1:0"
logger = logging.getLogger("tests.sim")


def batch(number):
    return EventBatch(events=(BlockRemoved(block_hashes=(number,)),), ts=float(number), dp_rank=0)


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


def publisher_at(**options):
    """As EngineService makes it."""
    return Publisher(PublisherConfig(**options), 0, codec.encode, logger, must_bind=True)


@pytest.fixture
def publisher():
    options = {"replay_endpoint": LOOPBACK, "topic": "kv@sim@m", "buffer_steps": 5}
    publisher = publisher_at(endpoint=LOOPBACK, **options)
    yield publisher
    publisher.shutdown()


async def publish(publisher, num_batches):
    for number in range(num_batches):
        publisher.publish(batch(number))
    await until(lambda: publisher.num_sent == num_batches, "all are sent")


def number_of(parts):
    return int.from_bytes(parts[1], "big", signed=True)


def replay(context, endpoint, first):
    """What vLLM's own example client does, with a DEALER, which gets more than one reply."""
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(endpoint)
        dealer.send_multipart([b"", first.to_bytes(8, "big")])
        messages = []
        while True:
            assert dealer.poll(10_000)
            empty, *message = dealer.recv_multipart()
            assert empty == b""
            if number_of(message) == -1:
                assert message == [b"", END, b""]
                return messages
            messages.append(message)


async def test_subscribers_get_topic_number_and_batch(context, publisher):
    with context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
        subscriber.connect(publisher.endpoint)
        numbers = iter(range(10_000))

        def hears():  # a subscription takes a moment to arrive; what is sent before is lost
            publisher.publish(batch(next(numbers)))
            return subscriber.poll(0)

        await until(hears, "the subscriber hears something")
        frame = message_of(subscriber.recv_multipart())
    assert frame.topic == b"kv@sim@m"
    assert codec.decode(frame.payload) == batch(frame.sequence)


async def test_replay_starts_where_it_is_asked_to(context, publisher):
    await publish(publisher, 4)
    messages = replay(context, publisher.replay_endpoint, 2)
    assert [codec.decode(payload) for _, _, payload in messages] == [batch(2), batch(3)]
    assert [(topic, number_of((topic, number))) for topic, number, _ in messages] == [
        (b"kv@sim@m", 2),
        (b"kv@sim@m", 3),
    ]
    assert replay(context, publisher.replay_endpoint, 4) == []


async def test_only_the_last_batches_are_kept(context, publisher):
    await publish(publisher, 12)
    messages = replay(context, publisher.replay_endpoint, 0)
    assert list(map(number_of, messages)) == [7, 8, 9, 10, 11]


async def test_a_request_that_makes_no_sense_is_read_over(context, publisher, caplog):
    await publish(publisher, 1)
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart([b"nonsense"])
        dealer.send_multipart([b"", bytes(8)])
        assert dealer.poll(10_000)
        assert number_of(dealer.recv_multipart()[1:]) == 0
    assert "replay request of 1 parts, expected 2" in caplog.text


@pytest.mark.parametrize("which", ["endpoint", "replay_endpoint"])
def test_a_taken_port_is_an_error_that_names_it(publisher, which):
    taken = {"endpoint": LOOPBACK, "replay_endpoint": LOOPBACK, which: publisher.endpoint}
    with pytest.raises(TransportError, match=f"cannot publish events at '{publisher.endpoint}'"):
        publisher_at(**taken)


@pytest.mark.parametrize("wire", ["kvplug", "vllm"])
async def test_events_go_to_nats_if_the_environment_says_so(wire, monkeypatch):
    with nats_servers() as [node]:
        monkeypatch.setenv("KVPLUG_NATS", node.url)
        monkeypatch.setenv("KVPLUG_NATS_STREAM", "off")
        [port] = free_ports(1)
        worker = PublisherName(f"http://127.0.0.1:{port}", 0)
        connection = NatsConnection(NatsSettings(servers=(node.url,)), "reader")
        heard = []
        connection.start()
        async with EngineService(config(port=port, wire=wire)) as engine:
            endpoint = engine.event_sources["0"]["endpoint"]
            assert endpoint == f"nats://{worker}"
            listening = listen(connection, Subjects("default").events(worker), heard.append)
            await asyncio.wrap_future(connection.submit(listening))
            await ask(engine, list(range(100, 164)))
            await until(lambda: heard, "events have come")
        connection.stop()


async def listen(connection, subject, hear):
    async def take(message):
        hear(message)

    client = await connection.connected()
    await client.subscribe(subject, cb=take)
    await client.flush()


async def ask(engine, prompt):
    body = {"model": "simulated", "prompt": prompt, "max_tokens": 1}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{engine.url}/v1/completions", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
