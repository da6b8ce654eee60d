"""Our own wire on real sockets: hashes only, nothing lost unnoticed, never a wait."""

import itertools
import logging
import multiprocessing
import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest
import zmq

from kvplug import protocol
from kvplug.engines import answers, event_stream, life_stream
from kvplug.engines.event_stream import EventStream
from kvplug.engines.settings import PublisherConfig
from kvplug.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Namespace,
)
from kvplug.hashing import as_hashes
from kvplug.index.block_copies import copies_of
from kvplug.protocol import Events, Hello, Resident, WorkerHello
from tests.plugins.stock_client import wait_until
from tests.plugins.stream_client import RANK, StreamClient

LOOPBACK = "tcp://127.0.0.1:0"
SIZE = 4
logger = logging.getLogger("tests.plugins")


def stored(first, num_blocks=1, parent=None):
    """Blocks `first`, `first` + 1, ...; their tokens are as many numbers as no other number is."""
    names = tuple(range(first, first + num_blocks))
    tokens = tuple(1_000_000 + SIZE * first + i for i in range(SIZE * num_blocks))
    namespace = Namespace() if parent is None else None
    return BlockStored(
        block_hashes=names, token_ids=tokens, block_size=SIZE, parent=parent, namespace=namespace
    )


def batch(*events):
    return EventBatch(events=events)


@contextmanager
def streaming(config=None, about=None, decode=lambda batch: batch, **more):
    config = config or PublisherConfig(endpoint=LOOPBACK, topic="kv@")
    stream = EventStream(config, about or WorkerHello(), decode, logger, **more)
    try:
        yield stream
    finally:
        stream.shutdown()


@pytest.fixture
def client():
    client = StreamClient()
    yield client
    client.close()


def settle(stream):
    wait_until(lambda: stream.num_applied == stream.num_published, "all is applied")
    wait_until(lambda: not stream._queue and stream._is_asleep, "all is sent")


def follow_all(client, stream):
    settle(stream)
    client.follow(stream.life.position[1])


def test_a_subscriber_is_greeted_and_follows(client):
    with streaming(about=WorkerHello(model="m", block_size=SIZE)) as stream:
        hello = client.join(stream.endpoint)
        assert (hello.about.model, hello.about.block_size) == ("m", SIZE)
        assert hello.about.answers_at == stream.answers_at
        client.catch_up(stream.answers_at)
        stream.publish(batch(stored(1, 3)))
        stream.publish(batch(BlockRemoved(block_hashes=(2,))))
        follow_all(client, stream)
        assert client.names() == {1, 3}


def test_a_latecomer_gets_what_is_held_and_goes_on(client):
    with streaming() as stream:
        stream.publish(batch(stored(1, 3), stored(10, 2), BlockRemoved(block_hashes=(10, 11))))
        settle(stream)
        client.join(stream.endpoint)
        client.catch_up(stream.answers_at)
        assert client.names() == {1, 2, 3}
        stream.publish(batch(stored(4, 2, parent=3)))
        follow_all(client, stream)
        assert client.names() == {1, 2, 3, 4, 5}


def test_who_missed_a_few_events_gets_these(client):
    with streaming() as stream:
        client.join(stream.endpoint)
        client.catch_up(stream.answers_at)
        for i in range(5):
            stream.publish(batch(stored(10 * i)))
            settle(stream)
        life, next_ = stream.life.position
        _, *events, _ = client.ask(stream.answers_at, life, next_ - 3)
        assert [event.number for event in events] == [next_ - 3, next_ - 2, next_ - 1]


def test_what_history_has_not_is_said_whole(client):
    with streaming() as stream:
        stream.life._history_bytes = 200
        for i in range(10):
            stream.publish(batch(stored(10 * i)))
            settle(stream)
        life, _ = stream.life.position
        _, part, _ = client.ask(stream.answers_at, life, 1)
        assert isinstance(part, Resident)


@pytest.mark.parametrize("about_life", [0, 1])
def test_an_empty_cache_is_said_as_such(client, about_life):
    """A follower of another life must not take a silent answer for "nothing new"."""
    with streaming() as stream:
        _, part, end = client.ask(stream.answers_at, about_life, 0)
        assert (part.part, part.num_parts, part.next, end.next) == (0, 1, 0, 0)


def test_no_tokens_salts_or_adapter_hashes_of_tokens_are_on_the_wire(client):
    tokens = tuple(0x61626364 + i for i in range(SIZE))
    event = BlockStored(
        block_hashes=(1,), token_ids=tokens, block_size=SIZE, namespace=Namespace(salt="pepper")
    )
    with streaming() as stream:
        client.join(stream.endpoint)
        client.catch_up(stream.answers_at)
        stream.publish(batch(event))
        follow_all(client, stream)
        client.ask(stream.answers_at)
    said = b"".join(client.captured)
    assert b"pepper" not in said
    for token, order in itertools.product(tokens, ("big", "little")):
        assert token.to_bytes(4, order) not in said


def test_what_depends_on_a_hello_comes_behind_it(client):
    with streaming() as stream:
        assert client.join(stream.endpoint).about.block_size is None
        stream.publish(batch(stored(1)))
        messages = [client.receive() for _ in range(2)]
    assert [type(each) for each in messages] == [Hello, Events]
    assert messages[0].about.block_size == SIZE


def test_defects_are_named_until_the_cache_is_empty(client):
    with streaming() as stream:
        client.join(stream.endpoint)
        stream.publish(EventBatch(events=(stored(5, 2, parent=99),), skipped={"bad_hash": 2}))
        hello = client.receive_hello()
        assert hello.about.defects == {"bad_hash": 2, "unknown_parent": 2}
        stream.publish(batch(AllBlocksCleared()))
        assert client.receive_hello().about.defects == {}


def test_a_known_defect_that_grows_is_no_hello_of_its_own(client):
    orphans = batch(stored(5, 2, parent=99), stored(1))
    with streaming() as stream:
        client.join(stream.endpoint)
        for _ in range(3):
            stream.publish(orphans)
            settle(stream)
        assert client.receive_hello().about.defects == {"unknown_parent": 2}
        messages = [client.receive() for _ in range(2)]
        assert all(isinstance(each, Events) for each in messages)
        assert client.ask(stream.answers_at)[0].about.defects == {"unknown_parent": 6}


class Stalled:
    """A stream whose sender hangs in its first batch until it is let go."""

    def __init__(self, **more):
        self.reached, self.let_go = threading.Event(), threading.Event()
        config = PublisherConfig(endpoint=LOOPBACK, **more)
        self.stream = EventStream(config, WorkerHello(), self._decode, logger)
        self.stream.publish(batch(stored(1)))
        assert self.reached.wait(10)

    def _decode(self, batch):
        self.reached.set()
        assert self.let_go.wait(60)
        return batch


def test_a_full_queue_begins_a_new_life_that_knows_its_defect(client, caplog):
    stalled = Stalled(max_queue_size=10)
    stream = stalled.stream
    life, _ = stream.life.position
    for i in range(100):  # nobody takes any of them: waiting for room would wait for ever
        stream.publish(batch(stored(100 + i)))
    assert (stream.num_published, stream.num_dropped) == (101, 90)
    stalled.let_go.set()
    wait_until(lambda: stream.life.position[0] != life, "a new life begins")
    client.join(stream.endpoint)
    client.catch_up(stream.answers_at)
    assert (client.names(), client.about.defects) == (set(), {"queue_full": 100})
    stream.publish(batch(BlockRemoved(block_hashes=(1,)), stored(7, 2)))
    client.follow(1)
    assert client.names() == {7, 8}
    stream.publish(batch(AllBlocksCleared(), stored(9)))
    client.follow(2)
    assert (client.names(), client.about.defects) == ({9}, {})
    assert caplog.text.count("the queue was full") == 1
    stream.shutdown()


def test_what_cannot_be_read_is_a_defect_and_the_next_batch_is_fine(client, caplog):
    def decode(batch):
        if batch is None:
            raise ValueError("odd")
        return batch

    with streaming(decode=decode) as stream:
        for each in (None, None, batch(stored(1))):
            stream.publish(each)
        settle(stream)
        client.join(stream.endpoint)
        client.catch_up(stream.answers_at)
        assert (client.names(), client.about.defects) == ({1}, {"undecodable": 2})
    assert caplog.text.count("batches of KV events are lost") == 1


def test_windows_that_an_engine_hides_are_marked_by_the_publisher(client):
    with streaming(about=WorkerHello(hides_states=True)) as stream:
        client.join(stream.endpoint)
        client.catch_up(stream.answers_at)
        stream.publish(batch(stored(1, 3)))
        follow_all(client, stream)
        assert [(group.group, group.attention) for group in client.about.groups] == [
            (0, "full_attention"), (1, "mamba"),
        ]  # fmt: skip
        hashes = as_hashes(
            [int(client.index.hash_spaces.hash_of(RANK, name)) for name in (1, 2, 3)]
        )
        copies = copies_of(hashes, client.index.block_store, client.index.numbers)
        assert [each[RANK].num_groups for each in copies] == [0, 0, 1]


def test_reports_and_removals_of_nothing_are_not_sent(client):
    with streaming() as stream:
        stream.publish(batch(stored(1, 3)))
        settle(stream)
        _, next_ = stream.life.position
        stream.publish(batch(stored(1, 3), BlockRemoved(block_hashes=(77,))))
        settle(stream)
        assert stream.life.position[1] == next_


def test_an_event_of_any_length_fits_in_messages(client):
    with streaming() as stream:
        client.join(stream.endpoint)
        client.catch_up(stream.answers_at)
        stream.publish(batch(stored(1, 60_000)))
        follow_all(client, stream)
        assert len(client.names()) == 60_000
        assert max(map(len, client.captured)) < protocol.MAX_MESSAGE_BYTES // 2
        other = StreamClient()
        other.catch_up(stream.answers_at)
        assert other.names() == client.names()
        other.close()


def test_a_heartbeat_says_how_far_the_numbers_are(client, monkeypatch):
    monkeypatch.setattr(event_stream, "HEARTBEAT_S", 0.05)
    with streaming() as stream:
        stream.publish(batch(stored(1)))
        client.join(stream.endpoint)
        hellos = [client.receive_hello() for _ in range(3)]
    assert hellos[-1].next == 1
    assert all(later.sent_at >= each.sent_at for each, later in itertools.pairwise(hellos))


def test_what_is_no_ask_is_passed_over(client):
    with streaming() as stream:
        client.send_nonsense(stream.answers_at)
        wait_until(lambda: stream._answers.num_malformed == 5, "all of it is counted")
        assert len(client.ask(stream.answers_at)) == 3


def test_a_client_that_does_not_read_is_left_and_others_are_answered(client, monkeypatch):
    monkeypatch.setattr(answers, "UNREAD_LIMIT_S", 0.3)
    with streaming(about=WorkerHello(block_size=1)) as stream:
        names = tuple(range(1, 300_001))
        event = BlockStored(
            block_hashes=names, token_ids=names, block_size=1, namespace=Namespace()
        )
        stream.publish(batch(event))
        settle(stream)
        client.ask_and_not_read(stream.answers_at)
        parts = [m for m in client.ask(stream.answers_at) if isinstance(m, Resident)]
        assert len(parts) == parts[0].num_parts > 10
        wait_until(lambda: stream._answers.num_abandoned == 1, "the one that does not read is left")
        stream.publish(batch(stored(10**6)))
        settle(stream)


def test_all_who_ask_at_once_get_the_same_set(client):
    with streaming() as stream:
        stream.publish(batch(stored(1, 100)))
        settle(stream)
        others = [StreamClient() for _ in range(8)]
        threads = [
            threading.Thread(target=each.catch_up, args=(stream.answers_at,)) for each in others
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert stream._answers.maker.num_resident_sets == 1
        assert all(len(each.names()) == 100 for each in others)
        for each in others:
            each.close()


def test_answers_are_whole_while_events_go_on(client):
    with streaming() as stream:
        client.join(stream.endpoint)
        stop = threading.Event()

        def publish():
            for i in itertools.count():
                if stop.wait(0.001):
                    return
                stream.publish(batch(stored(10 + i), BlockRemoved(block_hashes=(i,))))

        thread = threading.Thread(target=publish)
        thread.start()
        others = [StreamClient() for _ in range(3)]
        for each in others:
            each.join(stream.endpoint)
            each.catch_up(stream.answers_at)
        stop.set()
        thread.join()
        settle(stream)
        for each in others:
            each.catch_up(stream.answers_at)
            assert each.names() == set(stream.life._resident._blocks.slot_of)
            each.close()


def hang(endpoint):
    """Subscribe, and never read."""
    socket = zmq.Context().socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    threading.Event().wait()


def test_subscribers_that_hang_or_die_hold_nobody_up(client):
    with streaming(PublisherConfig(endpoint=LOOPBACK, hwm=5)) as stream:
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=hang, args=(stream.endpoint,))
        num_sent = stream.num_sent
        child.start()
        wait_until(lambda: stream.num_sent > num_sent, "it is there")
        for i in range(3000):
            stream.publish(batch(stored(10 + i)))
        settle(stream)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        client.join(stream.endpoint)
        client.catch_up(stream.answers_at)
        assert len(client.names()) == 3000


def test_shutdown_sends_what_is_queued_and_again_is_harmless(client):
    with streaming() as stream:
        client.join(stream.endpoint)
        client.catch_up(stream.answers_at)
        for i in range(100):
            stream.publish(batch(stored(10 * i)))
        stream.shutdown()
        stream.shutdown()
        client.follow(stream.life.position[1])
        assert len(client.names()) == 100
        stream.publish(batch(stored(1)))  # an engine that goes on is not told off


def test_shutdown_does_not_wait_for_a_stalled_sender():
    stalled = Stalled()
    started = time.monotonic()
    stalled.stream.shutdown()
    assert time.monotonic() - started < 10 * life_stream.STOP_LIMIT_S
    stalled.let_go.set()
    stalled.stream._sender.join(10)
    stalled.stream._context.term()


def test_many_threads_may_publish(client):
    with streaming() as stream:

        def publish(first):
            for i in range(200):
                stream.publish(batch(stored(first + i)))

        threads = [threading.Thread(target=publish, args=(1000 * i,)) for i in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        settle(stream)
        client.catch_up(stream.answers_at)
        assert len(client.names()) == 800
