"""SGLang's publisher over real sockets; SGLang itself is in tests/engines."""

import msgspec
import pytest

from kvplug.engines.settings import PublisherConfig
from kvplug.engines.sglang import SglangPublisher
from tests.plugins.stock_client import StockClient
from tests.plugins.stream_client import StreamClient

pytestmark = pytest.mark.usefixtures("stock_wire")


class SglangBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list
    attn_dp_rank: int | None = None


@pytest.fixture
def publish(tmp_path):
    publishers = []

    def make(endpoint, *, rank=0, **more):
        config = PublisherConfig(endpoint=endpoint, topic="kv@a", **more)
        publishers.append(SglangPublisher(config, rank))
        return publishers[-1]

    yield make
    for publisher in publishers:
        publisher.shutdown()


@pytest.mark.parametrize(("said", "expected"), [(None, 3), (1, 1)])
def test_a_batch_without_a_rank_gets_the_publishers(publish, said, expected):
    publisher, client = publish("tcp://127.0.0.1:0", rank=3), StockClient()
    try:
        client.subscribe(publisher.publisher.endpoint)
        while not client.has_message(timeout_ms=50):  # the subscription is on its way
            publisher.publish(SglangBatch(0.0, [], said))
        _, _, payload = client.receive()
    finally:
        client.close()
    assert msgspec.msgpack.decode(payload) == [0.0, [], expected]


def test_the_local_source_names_the_port_that_is_bound(publish):
    publisher = publish("tcp://*:0", replay_endpoint="tcp://127.0.0.1:0", rank=2)
    port = publisher.publisher.endpoint.rpartition(":")[2]
    assert publisher.describe_local_source(32) == {
        "dp_rank": 2,
        "endpoint": f"tcp://127.0.0.1:{port}",
        "topic": "kv@a",
        "block_size": 32,
        "replay_endpoint": publisher.publisher.answers_at,
    }


def test_the_local_source_is_an_absolute_path_and_has_no_replay_unless_asked_for(
    publish, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    source = publish("ipc://events", rank=1).describe_local_source(16)
    assert source["endpoint"] == f"ipc://{tmp_path}/events_dp1"
    assert "replay_endpoint" not in source


@pytest.mark.parametrize("endpoint", ["inproc://events"])
def test_what_another_process_cannot_reach_is_no_local_source(publish, endpoint):
    assert publish(endpoint).describe_local_source(16) is None


NOTES = [
    ("block_stored", [7], None, [1, 2], 2, "GPU", None, None, "key"),
    ("node_stored", "GPU", None, 5, None, bytes(16), False, None, None, None),
]


def test_notes_leave_as_sglangs_events(publish):
    publisher, client = publish("tcp://127.0.0.1:0"), StockClient()
    publisher.begin_notes(2, is_dynamo=True)
    try:
        client.subscribe(publisher.publisher.endpoint)
        while not client.has_message(timeout_ms=50):  # the subscription is on its way
            publisher.publish(SglangBatch(0.0, NOTES))
        _, _, payload = client.receive()
    finally:
        client.close()
    of_tuple, of_node = msgspec.msgpack.decode(payload)[1]
    assert (of_tuple["block_hashes"], "cache_salt" in of_tuple) == ([7], False)
    assert (of_node["type"], of_node["token_ids"]) == ("BlockStored", [0, 0])


def test_on_our_wire_the_hello_says_that_extra_keys_are_named(publish, monkeypatch):
    monkeypatch.setenv("KVPLUG_WIRE", "kvplug")
    publisher, client = publish("tcp://127.0.0.1:0"), StreamClient(2)
    try:
        client.join(publisher.publisher.endpoint)
        publisher.begin_notes(2, is_dynamo=True)
        publisher.publish(SglangBatch(0.0, NOTES))
        while not client.about.names_extra_keys:
            client.receive_hello()
        # SGLang's own recorder goes on, which does not name them.
        publisher.on_recorder_failed(ValueError("a test says so"))
        while client.about.names_extra_keys or not client.about.defects:
            client.receive_hello()
        assert client.about.defects == {"recorder_failed": 1}
    finally:
        client.close()
