"""The engine's end of the sender process, and the process: what each of them survives."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from kvplug import codec, packed, protocol
from kvplug.engines.connector_events import BlockLabels
from kvplug.engines.sender_process import SenderProcess
from kvplug.engines.settings import PublisherConfig
from kvplug.engines.vllm import VllmPublisher
from kvplug.errors import ConfigError
from kvplug.events import MoeLabel
from kvplug.protocol import Resident, WorkerHello
from tests.plugins.stock_client import StockClient, clear, engine_batch, wait_until
from tests.plugins.stream_client import StreamClient

LOOPBACK = "tcp://127.0.0.1:0"
logger = logging.getLogger("tests.plugins")


@contextmanager
def sending(dp_rank=0, **more):
    config = PublisherConfig(**{"endpoint": LOOPBACK} | more)
    process = SenderProcess(config, WorkerHello(dp_rank=dp_rank), logger)
    try:
        yield process
    finally:
        process.shutdown()


@pytest.fixture
def client():
    client = StreamClient()
    yield client
    client.close()


@pytest.fixture
def stock_client():
    client = StockClient()
    yield client
    client.close()


def settle(process):
    """Wait until everything is in messages."""
    wait_until(
        lambda: (
            process.counters.num_received + process._num_lost == process.num_published
            and process.counters.num_applied >= process.counters.num_received
        ),
        "everything is in a message",
    )
    return process.counters.next


def follow_all(client, process):
    client.follow(settle(process))


def state_of(pid):
    """As /proc has it: T is stopped, Z has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_alive(pid):
    try:
        return state_of(pid) != "Z"
    except OSError:
        return False


def test_batches_of_vllm_mean_what_they_mean_on_the_stock_wire(client):
    with sending() as process:
        client.join(process.endpoint)
        client.catch_up(process.answers_at)
        process.publish(engine_batch(100))
        follow_all(client, process)
        assert client.names() == {100}
        assert client.about.block_size == 4
        process.publish(clear())
        follow_all(client, process)
        assert client.names() == set()


@pytest.mark.usefixtures("stock_wire")
@pytest.mark.parametrize(("said", "expected"), [(None, 3), (7, 7)])
def test_a_batch_without_a_rank_gets_the_publishers(stock_client, said, expected):
    batch = engine_batch(100)
    batch.data_parallel_rank = said
    with sending(3) as process:
        stock_client.subscribe(process.endpoint)
        while not stock_client.has_message(timeout_ms=50):
            process.publish(batch)
        assert codec.decode(stock_client.receive()[2]).dp_rank == expected


def test_labels_of_a_connector_are_in_the_blocks(client):
    batch = engine_batch(100)
    batch.events.append(BlockLabels([100], MoeLabel(1, 2)))
    with sending() as process:
        process.publish(batch)
        settle(process)
        client.join(process.endpoint)
        client.catch_up(process.answers_at)
    [listed] = [each for each in client.captured if isinstance(protocol.decode(each), Resident)]
    [event] = packed.decode(protocol.decode(listed).packed)
    assert (event.engine_hashes, event.moe) == ([100], MoeLabel(1, 2))


def test_what_cannot_be_encoded_is_counted_and_named_once_per_cause(client, caplog):
    """It is lost, and nobody knows what was in it."""
    odd = [object(), engine_batch, [object()]]
    with sending() as process:
        for batch in [*odd, engine_batch(1)]:
            process.publish(batch)
        settle(process)
        wait_until(lambda: process.num_dropped >= 3, "the sender knows")
        client.join(process.endpoint)
        client.catch_up(process.answers_at)
        assert process.failures.total() == 3
    assert caplog.text.count("batches of KV events are lost: TypeError") == 1
    assert client.about.defects["queue_full"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("batch", [None, [1.0, 2], [1.0, [b"no event"], 0]])
def test_what_the_sender_cannot_read_is_counted_and_it_goes_on(client, batch):
    with sending() as process:
        process.publish(batch)
        process.publish(engine_batch(1))
        wait_until(lambda: process.counters.num_applied >= 1, "the next one is read")
        client.join(process.endpoint)
        client.catch_up(process.answers_at)
        assert set(client.about.defects) & {"undecodable", "not_an_event"}


@pytest.mark.slow
def test_a_stopped_sender_holds_nobody_up_and_what_is_lost_is_known(client):
    """Even if the engine says nothing after it."""
    with sending(max_queue_size=10) as process:
        client.join(process.endpoint)
        os.kill(process.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: state_of(process.pid) == "T", "it is stopped")
            for number in range(10_000):
                process.publish(engine_batch(number))
            assert process.num_dropped > 5_000
        finally:
            os.kill(process.pid, signal.SIGCONT)
        while "queue_full" not in client.receive_hello().about.defects:
            pass
        while client.receive_hello().about.defects:
            process.publish(clear())  # the first ones may be lost, too


@pytest.mark.slow
def test_another_sender_takes_the_place_of_one_that_is_killed(client, caplog):
    with sending(endpoint=LOOPBACK) as process:
        process.publish(engine_batch(1))
        settle(process)
        first = process.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: process.pid != first, "another one starts")
        wait_until(lambda: process._new_sockets, "it has an inlet")
        process.publish(engine_batch(2))
        wait_until(lambda: process.counters.num_applied == 1, "it publishes")
        client.join(process.endpoint)
        client.catch_up(process.answers_at)
        assert client.names() == {2}
        assert client.about.defects["sender_lost"] == 1
    assert "ended (status -9) and is started again" in caplog.text


@pytest.mark.slow
def test_a_sender_that_cannot_start_again_is_named_once_and_tried_until_it_can(
    client, caplog, monkeypatch
):
    with sending() as process:
        first = process.pid
        monkeypatch.setenv("KVPLUG_WIRE", "nats")
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: "KVPLUG_WIRE: expected kvplug or vllm" in caplog.text, "it is named")
        refused = process.pid
        wait_until(lambda: process.pid != refused, "it is tried again")
        monkeypatch.delenv("KVPLUG_WIRE")

        def is_heard():
            process.publish(engine_batch(2))  # what those before it were given is lost
            return process.counters.num_received > 0

        wait_until(is_heard, "one that runs has its place")
        client.join(process.endpoint)
    assert caplog.text.count("KVPLUG_WIRE: expected") == 1


def test_shutdown_sends_what_is_queued_and_again_is_harmless(client):
    with sending() as process:
        client.join(process.endpoint)
        client.catch_up(process.answers_at)
        for number in range(100):
            process.publish(engine_batch(10 * number))
        process.shutdown()
        process.shutdown()
        process.publish(engine_batch(0))  # an engine that goes on is not told off
        client.follow(process.counters.next)
        assert len(client.names()) == 100


@pytest.mark.slow
def test_no_file_of_the_inlet_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with sending() as process:
        process.publish(engine_batch(1))
        settle(process)
        assert list(tmp_path.iterdir()) == []


def test_a_setting_that_cannot_be_is_named_where_the_engine_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match=r"tcp://ADDRESS:PORT"):
        SenderProcess(PublisherConfig(endpoint="tcp://5557"), WorkerHello(), logger)
    assert list(tmp_path.iterdir()) == []


class FullOnce:
    """A socket that has no room for the first message."""

    def __init__(self, socket):
        self._socket, self._is_full = socket, True

    def send(self, message, flags):
        if self._is_full:
            self._is_full = False
            raise zmq.Again
        self._socket.send(message, flags)

    def close(self, linger):
        self._socket.close(linger=linger)


@pytest.mark.parametrize(
    "tell", [lambda p: p.lose(1, "recorder_failed"), lambda p: p.publish(clear())]
)
def test_what_finds_no_room_is_known_to_be_lost(client, tell):
    with sending() as process:
        process.publish(engine_batch(1))
        settle(process)
        process._socket = FullOnce(process._socket)
        tell(process)
        process.publish(engine_batch(2))
        wait_until(lambda: process.counters.num_applied == 2, "the next batch is applied")
        client.join(process.endpoint)
        client.catch_up(process.answers_at)
        assert client.names() == {2}
        assert client.about.defects["queue_full"] >= 1


def test_what_notes_mean_is_told_again_if_there_was_no_room():
    with sending() as process:
        process._socket = FullOnce(process._socket)
        process.tell_recorder({"recorder": "vllm"})  # and nothing that it takes
        process.publish(engine_batch(1))
        wait_until(lambda: process.failures, "the sender has heard of it")


@pytest.mark.slow
def test_a_process_that_never_shuts_down_ends():
    program = """
from kvplug.engines.vllm import VllmPublisher
from kvplug.engines.settings import PublisherConfig
shell = VllmPublisher(PublisherConfig(endpoint="tcp://127.0.0.1:0"), 0)
print(shell.publisher.pid, flush=True)
shell.publish(None)
"""
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0
    assert "Traceback" not in run.stderr
    wait_until(lambda: not is_alive(int(run.stdout)), "its sender ends")


def publish_in_child(endpoint):
    """Run by a child process: it may have our modules already (fork) or not (spawn)."""
    shell = VllmPublisher(PublisherConfig(endpoint=endpoint), 0)
    pause = threading.Event()
    while not pause.wait(0.02):
        shell.publish(engine_batch(1))


@pytest.mark.slow
@pytest.mark.usefixtures("stock_wire")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_killed_engine_takes_its_sender_along(method, tmp_path, stock_client):
    endpoint = f"ipc://{tmp_path}/events"
    child = multiprocessing.get_context(method).Process(target=publish_in_child, args=(endpoint,))
    child.start()
    try:
        wait_until((tmp_path / "events").exists, "it publishes")
        stock_client.subscribe(endpoint)
        assert codec.decode(stock_client.receive()[2]).ts == 1.0
        [sender] = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    finally:
        child.kill()
        child.join()
    wait_until(lambda: not is_alive(int(sender)), "its sender ends")
