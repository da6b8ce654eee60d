"""Who publishes to NATS: KvEventPublisher, and the sender process of an engine; both wires."""

import logging

import msgspec
import pytest

from kvplug.engines.kv_event_publisher import KvEventPublisher
from kvplug.engines.nats_target import NatsTarget
from kvplug.engines.sender_process import SenderProcess
from kvplug.engines.settings import PublisherConfig, read_variables
from kvplug.errors import ConfigError
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import PublisherName
from kvplug.protocol import WorkerHello
from tests.nats_servers import nats_servers
from tests.plugins.nats_reader import make_stream, reading
from tests.plugins.stock_client import engine_batch
from tests.waiting import until

WORKER = "http://10.0.0.7:8000"
NAME = PublisherName(WORKER, 1)
logger = logging.getLogger("tests.plugins")


@pytest.fixture
async def node():
    with nats_servers() as [node]:
        await make_stream(node.url)
        yield node


async def test_an_engine_of_ones_own(node, monkeypatch):
    monkeypatch.setenv("KVPLUG_NATS_FLEET", "default")
    servers = f"{node.url},nats://127.0.0.1:1"
    with KvEventPublisher(servers, worker=WORKER, kv_block_size=4, dp_rank=1) as publisher:
        assert publisher.endpoint == "nats://http%3A%2F%2F10%2E0%2E0%2E7%3A8000/1"
        assert publisher.answers_at is None
        publisher.publish_stored(token_ids=range(8), block_hashes=[71, 72])
        publisher.publish_removed(block_hashes=[72])
        async with reading(node.url, NAME) as reader:
            await until(lambda: reader.names() == {71}, "it is there")


async def test_settings_of_a_program_come_before_those_of_the_environment(monkeypatch):
    monkeypatch.setenv("KVPLUG_NATS", "nats://127.0.0.1:1")
    with nats_servers() as [node]:
        await make_stream(node.url, fleet="blue")
        nats = NatsSettings(servers=(node.url,), fleet="blue")
        with KvEventPublisher(nats=nats, url=f"{WORKER}/", kv_block_size=4, dp_rank=1) as publisher:
            publisher.publish_stored(token_ids=range(4), block_hashes=[71])
            async with reading(node.url, NAME, fleet="blue") as reader:
                await until(lambda: reader.names() == {71}, "it is there")


async def test_the_stock_wire_has_numbers_in_headers_and_past_batches(node):
    with KvEventPublisher(
        node.url, worker=WORKER, kv_block_size=4, dp_rank=1, wire="vllm"
    ) as publisher:
        for i in range(3):
            publisher.publish_stored(token_ids=range(4), block_hashes=[i])
        async with reading(node.url, NAME) as reader:
            js = reader._client.jetstream()
            await until(lambda: not publisher._publisher.outbox.num_waiting, "they are there")
            said = [await js.get_msg("kvplug-default", seq) for seq in (1, 2, 3)]
            assert [each.headers["Kvplug-Number"] for each in said] == ["0", "1", "2"]
            _, [event], rank = msgspec.msgpack.decode(said[2].data)
            assert (event["type"], event["block_hashes"], rank) == ("BlockStored", [2], 1)
            asked = reader.answer((1).to_bytes(8, "big"), bytes, lambda payload: not payload)
            assert [payload async for payload in asked] == [said[1].data, said[2].data, b""]


@pytest.mark.parametrize(
    "said",
    [
        {"endpoint": "nats://127.0.0.1:4222"},  # without a name
        {"endpoint": "nats://a:b@127.0.0.1:4222", "worker": WORKER},
        {"endpoint": "nats://127.0.0.1:4222", "worker": WORKER, "topic": "kv"},
        {"endpoint": "nats://127.0.0.1:4222", "worker": WORKER, "answers_at": "tcp://*:0"},
        {"endpoint": "nats://127.0.0.1:4222", "worker": WORKER, "wire": "json"},
        {"endpoint": "tcp://127.0.0.1:0", "worker": WORKER},
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_sentence(said):
    with pytest.raises(ConfigError, match=r"expected|must be") as raised:
        KvEventPublisher(**said, kv_block_size=4)
    assert "\n" not in str(raised.value)
    assert "a:b" not in str(raised.value)


def test_variables_say_where_and_under_which_name():
    assert read_variables({}).nats is None
    said = read_variables(
        {
            "KVPLUG_NATS": "nats://a:4222, nats://b:4222",
            "KVPLUG_NATS_WORKER": "http://pod:8000/",
            "KVPLUG_NATS_STREAM": "off",
        }
    ).nats
    assert said == NatsTarget(
        settings=NatsSettings(servers=("nats://a:4222", "nats://b:4222")),
        worker="http://pod:8000/",
        uses_stream=False,
    )
    assert said.name(WorkerHello(url="http://other:8000", dp_rank=2)) == ("http://pod:8000", 2)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://10.0.0.7:8000/", "http://10.0.0.7:8000"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://0.0.0.0:8000", None),
        ("http://[::]:8000", None),
        ("", None),
    ],
)
def test_the_url_of_the_engine_is_its_name(url, name):
    target = NatsTarget(settings=NatsSettings(servers=("nats://a:4222",)))
    if name is not None:
        assert target.name(WorkerHello(url=url)) == (name, 0)
    else:
        with pytest.raises(ConfigError, match="needs a name: expected KVPLUG_NATS_WORKER"):
            target.name(WorkerHello(url=url))


@pytest.mark.parametrize(
    "said",
    [
        {"KVPLUG_NATS_STREAM": "off"},
        {"KVPLUG_NATS": "nats://a:4222", "KVPLUG_NATS_STREAM": "no"},
        {"KVPLUG_NATS": "tcp://a:4222"},
        {"KVPLUG_NATS_FLEET": "blue"},
    ],
)
def test_variables_that_contradict_are_named(said):
    with pytest.raises(ConfigError, match=r"KVPLUG_NATS|no NATS URL"):
        read_variables(said)


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["kvplug", "vllm"])
async def test_an_engines_sender_process(node, monkeypatch, wire):
    monkeypatch.setenv("KVPLUG_NATS", node.url)
    monkeypatch.setenv("KVPLUG_NATS_WORKER", WORKER)
    monkeypatch.setenv("KVPLUG_WIRE", wire)
    config = PublisherConfig(endpoint="tcp://*:5557")
    process = SenderProcess(config, WorkerHello(dp_rank=1), logger)
    try:
        assert process.endpoint.startswith("nats://http%3A")
        assert process.answers_at is None
        process.publish(engine_batch(100))
        async with reading(node.url, NAME) as reader:
            if wire == "kvplug":
                await until(lambda: reader.names() == {100}, "it is there")
            else:
                await until(lambda: process.counters.num_applied == 1, "it is there")
    finally:
        process.shutdown()


@pytest.mark.slow
def test_an_engine_without_a_name_serves_without_events(monkeypatch):
    monkeypatch.setenv("KVPLUG_NATS", "nats://127.0.0.1:1")
    monkeypatch.delenv("KVPLUG_NATS_WORKER", raising=False)
    config = PublisherConfig(endpoint="tcp://*:5557")
    with pytest.raises(ConfigError, match="needs a name"):
        SenderProcess(config, WorkerHello(url="http://0.0.0.0:8000"), logger)
