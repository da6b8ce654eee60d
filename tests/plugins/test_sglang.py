"""SGLang's publisher over real sockets; SGLang itself is in tests/engines."""

import msgspec
import pytest

from kvplug.engines.settings import PublisherConfig
from kvplug.engines.sglang import SglangPublisher
from tests.plugins.stock_client import StockClient

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
