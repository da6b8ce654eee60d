"""The stock wire on real sockets: the format, the gaps, never a wait."""

import errno
import itertools
import logging
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvplug import codec
from kvplug.engines.publisher import STOP_LIMIT_S, Publisher
from kvplug.engines.settings import PublisherConfig
from kvplug.errors import ConfigError
from kvplug.transports.zmq import message_of
from tests.plugins.stock_client import StockClient, clear, engine_batch, stored, wait_until

LOOPBACK = "tcp://127.0.0.1:0"
logger = logging.getLogger("tests.plugins")


def config(**more):
    return PublisherConfig(
        **{"endpoint": LOOPBACK, "replay_endpoint": LOOPBACK, "topic": "kv@pod@model"} | more
    )


@contextmanager
def publishing(dp_rank=0, **more):
    publisher = Publisher(config(**more), dp_rank, msgspec.msgpack.encode, logger)
    try:
        yield publisher
    finally:
        publisher.shutdown()


@pytest.fixture
def client():
    client = StockClient()
    yield client
    client.close()


def join(client, publisher):
    """Subscribe; from here on the client gets everything. The next batch has this number."""
    client.subscribe(publisher.endpoint)
    while not client.has_message(timeout_ms=50):
        publisher.publish(clear())
    next_number = publisher.num_published
    while message_of(client.receive()).sequence != next_number - 1:
        pass
    return next_number


def test_the_wire_is_the_one_that_followers_of_vllm_read(client):
    with publishing() as publisher:
        number = join(client, publisher)
        publisher.publish(engine_batch(100))
        frames = client.receive()
    frame, batch = message_of(frames), codec.decode(frames[2])
    assert (frame.topic, frame.sequence) == (b"kv@pod@model", number)
    assert (batch.ts, batch.skipped) == (100.0, {})
    [event] = batch.events
    assert event.token_ids == stored(100).token_ids


def test_the_numbers_start_at_0_and_a_replay_gives_what_was_sent(client):
    with publishing() as publisher:
        for i in range(20):
            publisher.publish(engine_batch(i))
        wait_until(lambda: publisher.num_sent == 20, "all are sent")
        replayed = client.replay(publisher.replay_endpoint, first=15)
    assert [(topic, number) for topic, number, _ in replayed] == [
        (b"kv@pod@model", number) for number in range(15, 20)
    ]
    assert [codec.decode(payload).ts for _, _, payload in replayed] == [15, 16, 17, 18, 19]


@pytest.mark.parametrize(("buffer_steps", "numbers"), [(3, [7, 8, 9]), (0, [])])
def test_a_replay_has_the_last_buffer_steps(client, buffer_steps, numbers):
    with publishing(buffer_steps=buffer_steps) as publisher:
        for i in range(10):
            publisher.publish(engine_batch(i))
        wait_until(lambda: publisher.num_sent == 10, "all are sent")
        replayed = client.replay(publisher.replay_endpoint, first=0)
    assert [number for _, number, _ in replayed] == numbers


def test_replays_are_whole_while_batches_go_out(client):
    with publishing(buffer_steps=100) as publisher:
        replays = []
        while len(replays) < 20:
            for _ in range(50):
                publisher.publish(clear())
            replays.append(client.replay(publisher.replay_endpoint, first=0))
        wait_until(lambda: publisher.num_sent == publisher.num_published, "all are sent")
        replays.append(client.replay(publisher.replay_endpoint, first=0))
    for replay in replays:
        numbers = [number for _, number, _ in replay]
        assert all(later == number + 1 for number, later in itertools.pairwise(numbers))
    assert len(replays[-1]) == 100


def test_what_is_no_replay_request_is_passed_over_and_named_once(client, caplog):
    with publishing() as publisher:
        client.ask_nonsense(publisher.replay_endpoint)
        assert client.replay(publisher.replay_endpoint, first=0) == []
        wait_until(lambda: "passed over a replay request" in caplog.text, "it is named")
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1


def test_a_client_that_does_not_read_its_replay_is_left_after_a_while(client):
    publisher = Publisher(config(hwm=1), 0, bytes, logger)
    for _ in range(2000):  # 80 MB: more than the buffers on the way take
        publisher.publish(40_000)
    wait_until(lambda: publisher.num_sent == 2000, "all are sent")
    client.ask_and_not_read(publisher.replay_endpoint)
    wait_until(lambda: publisher._replay.num_abandoned == 1, "the one that does not read is left")
    assert len(client.replay(publisher.replay_endpoint, first=0)) == 2000
    publisher.shutdown()


class StalledSender:
    """A publisher whose thread hangs in its first batch until it is let go."""

    def __init__(self, **more):
        self.reached, self.let_go = threading.Event(), threading.Event()
        self.publisher = Publisher(config(**more), 0, self._encode, logger)
        self.publisher.publish(b"the one in hand")
        assert self.reached.wait(10)

    def _encode(self, batch):
        self.reached.set()
        assert self.let_go.wait(60)
        return batch


def test_a_full_queue_drops_counts_and_leaves_a_gap_in_the_numbers(client, caplog):
    stalled = StalledSender(max_queue_size=10)
    publisher = stalled.publisher
    for i in range(1000):  # nobody takes any of them: waiting for room would wait for ever
        publisher.publish(b"%d" % i)
    assert (publisher.num_published, publisher.num_dropped) == (1001, 990)
    stalled.let_go.set()
    wait_until(lambda: publisher.num_sent == 11, "the queue is sent")
    publisher.publish(b"after")
    wait_until(lambda: publisher.num_sent == 12, "the stream goes on")
    replayed = client.replay(publisher.replay_endpoint, first=0)
    publisher.shutdown()
    assert [number for _, number, _ in replayed] == [*range(11), 1001]
    assert caplog.text.count("the queue was full") == 1


def test_what_cannot_be_encoded_is_counted_and_named_once_per_cause(client, caplog):
    odd = [object(), engine_batch]
    unwritable = [clear() for _ in range(3)]
    for batch in unwritable:
        batch.events = [object()]
    with publishing() as publisher:
        for batch in [*odd, *unwritable, engine_batch(1)]:
            publisher.publish(batch)
        wait_until(lambda: publisher.num_sent == 1, "the good one is sent")
        replayed = client.replay(publisher.replay_endpoint, first=0)
        failures = publisher.failures
    assert [number for _, number, _ in replayed] == [5]
    assert failures.total() == 5
    assert caplog.text.count("batches of KV events are lost") == len(failures) == 1


def test_a_subscriber_that_does_not_read_holds_nobody_up(client):
    with publishing(hwm=10) as publisher:
        client.subscribe(publisher.endpoint)
        for i in range(5000):
            publisher.publish(engine_batch(i))
        wait_until(lambda: publisher.num_sent == 5000, "all are sent or dropped by the socket")
        assert publisher.num_dropped == 0


def test_subscribers_come_and_go(client):
    with publishing() as publisher:
        join(client, publisher)
        client.close()
        other = StockClient()
        number = join(other, publisher)
        publisher.publish(engine_batch(1))
        assert message_of(other.receive()).sequence == number
        other.close()


def test_an_explicit_address_is_bound_and_no_other():
    with publishing() as publisher:
        port = int(publisher.endpoint.rpartition(":")[2])
        listening = [
            line.split()[1]
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
            if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
        ]
    assert listening == [f"0100007F:{port:04X}"]


def test_an_occupied_port_is_named_once_and_taken_when_it_is_free(client, caplog):
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        publisher = Publisher(config(endpoint=endpoint), 0, msgspec.msgpack.encode, logger)
        publisher.publish(engine_batch(0))
        wait_until(lambda: publisher.num_sent == 1, "the sender goes on")
    number = join(client, publisher)
    publisher.publish(engine_batch(1))
    assert message_of(client.receive()).sequence == number
    publisher.shutdown()
    [warning] = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "Address already in use" in warning
    assert endpoint in warning


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_named_and_the_engine_goes_on(host, caplog):
    with publishing(endpoint=f"tcp://{host}:5557") as publisher:
        publisher.publish(engine_batch(0))
        wait_until(lambda: publisher.num_sent == 1, "the sender goes on")
    [warning] = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert f"tcp://{host}:5557: expected an address of this machine" in warning


def test_ranks_have_ports_and_names_of_their_own(tmp_path, client):
    endpoint = f"ipc://{tmp_path}/events"
    with publishing(endpoint=endpoint) as first, publishing(1, endpoint=endpoint) as second:
        assert second.endpoint == f"{endpoint}_dp1"
        join(client, second)
        first.publish(engine_batch(5))
        second.publish(engine_batch(6))
        assert codec.decode(client.receive()[2]).ts == 6.0


def test_shutdown_sends_what_is_queued_and_again_is_harmless(client):
    with publishing() as publisher:
        join(client, publisher)
        for i in range(100):
            publisher.publish(engine_batch(i))
        publisher.shutdown()
        publisher.shutdown()
        assert [codec.decode(client.receive()[2]).ts for _ in range(100)] == list(range(100))
        publisher.publish(engine_batch(0))  # an engine that goes on is not told off


def test_shutdown_does_not_wait_for_a_stalled_sender():
    stalled = StalledSender()
    started = time.monotonic()
    stalled.publisher.shutdown()
    assert time.monotonic() - started < 10 * STOP_LIMIT_S
    stalled.let_go.set()
    stalled.publisher._sender.join(10)
    stalled.publisher._context.term()


@pytest.mark.parametrize("name", ["buffer_steps", "hwm", "max_queue_size"])
def test_sizes_below_0_are_rejected_by_name(name):
    with pytest.raises(ConfigError, match=f"{name} must be 0 or more, got -1"):
        config(**{name: -1})


def test_errno_names_are_those_of_zmq():
    """Binding looks at errno's numbers; ZMQ defines its own only where a system has none."""
    import zmq

    assert zmq.EADDRINUSE == errno.EADDRINUSE
    assert zmq.EADDRNOTAVAIL == errno.EADDRNOTAVAIL
