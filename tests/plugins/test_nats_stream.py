"""Our own wire over a real NATS server: whatever that does, a reader ends with what is held."""

import asyncio
import logging
from contextlib import contextmanager

import pytest

from kvplug import protocol
from kvplug.engines import beats
from kvplug.engines.nats_stream import NatsStream
from kvplug.events import AllBlocksCleared, BlockRemoved, BlockStored, Namespace
from kvplug.nats.connection import NatsConnection
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import PublisherName
from kvplug.protocol import Events, Hello, Resident, WorkerHello
from tests.nats_servers import nats_servers
from tests.plugins.nats_reader import make_stream, reading
from tests.plugins.test_event_stream import batch, stored
from tests.waiting import until

NAME = PublisherName("http://10.0.0.7:8000", 0)
ASK = protocol.encode(protocol.Ask(0, 0))
logger = logging.getLogger("tests.plugins")


@pytest.fixture
def node():
    with nats_servers() as [node]:
        yield node


@contextmanager
def streaming(url, *, name=NAME, about=None, **more):
    connection = NatsConnection(NatsSettings(servers=(url,)), "engine")
    connection.start()
    stream = NatsStream(
        connection, name, about or WorkerHello(), lambda batch: batch, logger, closes=True, **more
    )
    try:
        yield stream
    finally:
        stream.shutdown()


async def at_rest(reader, stream):
    """All is applied and sent, and the reader knows it."""
    await until(lambda: stream.num_applied == stream.num_published, "all is applied")

    def is_equal():
        return (reader.life, reader.next) == stream.life.position and reader.is_exact

    await until(is_equal, "the reader has all")
    assert reader.names() == held(stream)


def held(stream):
    return set(stream.life._resident._blocks.slot_of)


async def test_a_reader_of_the_stream_needs_no_answer(node):
    await make_stream(node.url)
    with streaming(node.url, about=WorkerHello(model="m", block_size=4)) as stream:
        for i in range(200):
            stream.publish(batch(stored(10 * i, 3)))
        stream.publish(batch(BlockRemoved(block_hashes=(10,))))
        async with reading(node.url, NAME) as reader:
            await at_rest(reader, stream)
            assert reader.num_asks == 0
            assert reader.about.model == "m"
            assert reader.messages[0].next == 0
            assert len(reader.names()) == 599


async def test_streams_that_come_and_go_leave_nothing_on_their_connection(node):
    """A forwarder has one connection for all of its engines."""
    connection = NatsConnection(NatsSettings(servers=(node.url,)), "engine")
    connection.start()
    await until(lambda: connection.is_connected, "it is connected")
    try:
        for number in range(3):
            about = WorkerHello()
            stream = NatsStream(connection, NAME, about, lambda batch: batch, logger)
            await until(lambda s=stream: s.beats.num_sent, "it beats")
            stream.publish(batch(stored(number, 1)))
            stream.shutdown()
            stream.shutdown()
        assert connection._listeners == []
        kept = [each.subject for each in connection._client._subs.values()]
        assert [each for each in kept if each.startswith("kvplug")] == []
        assert len(kept) <= 1, "nats-py keeps one for all answers"
    finally:
        connection.stop()


async def test_beats_say_what_the_stream_has(node):
    await make_stream(node.url)
    with streaming(node.url, about=WorkerHello(block_size=4)) as stream:
        async with reading(node.url, NAME) as reader:
            stream.publish(batch(stored(1)))
            await until(lambda: reader.beats and reader.beats[-1][1].next == 1, "a beat says it")
            headers, beat = reader.beats[-1]
            assert (int(headers["Kvplug-Seq"]), beat.life) == (2, stream.life.position[0])


async def test_what_is_new_of_the_engine_is_in_the_stream(node):
    await make_stream(node.url)
    with streaming(node.url) as stream:
        async with reading(node.url, NAME) as reader:
            stream.note(model="later")
            await until(lambda: reader.about and reader.about.model == "later", "it is said")


async def test_a_killed_server_costs_nothing_but_time(node):
    await make_stream(node.url)
    with streaming(node.url) as stream:
        async with reading(node.url, NAME) as reader:
            for i in range(100):
                stream.publish(batch(stored(10 * i)))
            node.kill()
            for i in range(100, 300):
                stream.publish(batch(stored(10 * i)))
            await until(lambda: stream.num_applied == 300, "they are in messages")
            node.start()
            await at_rest(reader, stream)
            assert len(reader.names()) == 300
            assert stream.outbox.num_dropped == 0


async def test_a_server_that_comes_later_gets_all(node):
    node.kill()
    with streaming(node.url) as stream:
        stream.publish(batch(stored(1, 3)))
        node.start()
        await make_stream(node.url)
        async with reading(node.url, NAME) as reader:
            await at_rest(reader, stream)


async def test_a_paused_server_is_given_up_and_taken_again(node):
    await make_stream(node.url)
    with streaming(node.url) as stream:
        async with reading(node.url, NAME) as reader:
            await at_rest(reader, stream)
            node.pause()
            for i in range(100):
                stream.publish(batch(stored(10 * i)))
            await until(lambda: stream.outbox.num_resent or stream.outbox.refusals, "it is late")
            node.resume()
            await at_rest(reader, stream)


async def test_a_long_outage_is_a_hole_that_readers_ask_for(node, monkeypatch, caplog):
    monkeypatch.setattr("kvplug.engines.nats_stream.MIN_BACKLOG_BYTES", 2000)
    await make_stream(node.url)
    with streaming(node.url) as stream:
        async with reading(node.url, NAME) as reader:
            stream.publish(batch(stored(1)))
            await at_rest(reader, stream)
            node.kill()
            for i in range(1, 500):
                stream.publish(batch(stored(10 * i)))
                await asyncio.sleep(0)  # so that they do not go into one message
            await until(lambda: stream.num_applied == 500, "they are in messages")
            assert stream.outbox.num_dropped
            assert stream.outbox._num_bytes < 30_000
            node.start()
            await at_rest(reader, stream)
            assert len(reader.names()) == 500
            assert 1 <= reader.num_asks < 10
    assert sum("events are dropped" in each.getMessage() for each in caplog.records) == 1


async def test_a_stream_that_refuses_leaves_answers(node, caplog):
    await make_stream(node.url, max_bytes=3000, discard="new")
    with streaming(node.url) as stream:
        async with reading(node.url, NAME) as reader:
            for i in range(100):
                stream.publish(batch(stored(10 * i)))
            await until(lambda: stream.outbox.refusals, "it is full")
            await at_rest(reader, stream)
            assert reader.num_asks
            stream.publish(batch(BlockRemoved(block_hashes=(10,))))
            await at_rest(reader, stream)
    said = [each.getMessage() for each in caplog.records]
    assert sum("maximum bytes exceeded" in each for each in said) == 1


async def test_without_a_stream_readers_ask(node, caplog):
    with streaming(node.url) as stream:
        async with reading(node.url, NAME) as reader:
            stream.publish(batch(stored(1, 3)))
            await at_rest(reader, stream)
            await make_stream(node.url)
            await until(lambda: not stream.outbox.num_waiting, "the stream has it")
    assert any("no stream" in each.getMessage() for each in caplog.records)


async def test_core_alone_waits_for_no_acknowledgement(node):
    with streaming(node.url, uses_stream=False) as stream:
        async with reading(node.url, NAME) as reader:
            stream.publish(batch(stored(1, 3)))
            await at_rest(reader, stream)
            assert not stream.outbox.num_waiting
            assert "Kvplug-Seq" not in reader.beats[-1][0]


async def test_a_message_that_is_too_large_is_a_hole(caplog):
    with nats_servers(more="max_payload: 4096") as [node]:
        await make_stream(node.url)
        with streaming(node.url) as stream:
            async with reading(node.url, NAME) as reader:
                stream.publish(batch(stored(1, 300)))
                stream.publish(batch(BlockRemoved(block_hashes=tuple(range(10, 300)))))
                await until(lambda: stream.outbox.num_too_large, "it is too large")
                stream.publish(batch(stored(1000)))
                await until(lambda: not stream.outbox.num_waiting, "others go on")
                await until(lambda: not reader.is_exact, "the reader sees the hole")
    assert any("max_payload" in each.getMessage() for each in caplog.records)


async def test_an_answer_that_is_too_large_is_a_failure_with_its_fix(caplog):
    with (
        nats_servers(more="max_payload: 4096") as [node],
        streaming(node.url, uses_stream=False) as stream,
    ):
        stream.publish(batch(*(stored(first) for first in range(1000))))
        async with reading(node.url, NAME):
            failures = stream.answers.failures
            await until(lambda: failures["MaxPayloadError"], "the answer fails")
    said = [each.getMessage() for each in caplog.records]
    assert any("at most 4096 bytes" in each for each in said)
    assert sum("an answer failed: MaxPayloadError" in each for each in said) == 1


async def test_messages_that_are_sent_twice_are_applied_once(node):
    await make_stream(node.url)
    with streaming(node.url) as stream:
        async with reading(node.url, NAME) as reader:
            for i in range(50):
                stream.publish(batch(stored(10 * i)))
                if i % 10 == 0:  # as when acknowledgements are late
                    stream._task._connection.loop.call_soon_threadsafe(stream.outbox._go_back, 0.0)
            await at_rest(reader, stream)
            assert reader.num_asks == 0
            numbers = [each.number for each in reader.messages if isinstance(each, Events)]
            assert sorted(set(numbers)) == list(range(stream.life.position[1]))


async def test_a_full_queue_begins_a_new_life(node):
    await make_stream(node.url)
    with streaming(node.url) as stream:
        async with reading(node.url, NAME) as reader:
            stream.publish(batch(stored(1, 3)))
            await at_rest(reader, stream)
            stream.lose(3, "sender_lost")
            stream.publish(batch(stored(10, 3)))
            await at_rest(reader, stream)
            assert reader.names() == {10, 11, 12}
            assert reader.about.defects == {"sender_lost": 3}
            stream.publish(batch(AllBlocksCleared()))
            await until(lambda: reader.about.defects == {}, "the cache is empty")


async def test_a_large_answer_waits_for_its_reader_and_events_go_on(node):
    await make_stream(node.url)
    with streaming(node.url, about=WorkerHello(block_size=1)) as stream:
        names = tuple(range(1, 200_001))
        event = BlockStored(
            block_hashes=names, token_ids=names, block_size=1, namespace=Namespace()
        )
        stream.publish(batch(event))
        async with reading(node.url, NAME, block_size=1) as reader:
            await at_rest(reader, stream)
            slow = reader.answer(ASK)
            assert isinstance(await anext(slow), Hello)
            parts = [m for m in await reader.ask() if isinstance(m, Resident)]
            assert len(parts) == parts[0].num_parts > 10
            assert stream.answers._unread  # the slow one's
            stream.publish(batch(BlockRemoved(block_hashes=(1,))))
            await at_rest(reader, stream)
            rest = [message async for message in slow]
            assert len(rest) == len(parts) + 1
            assert len(reader.names()) == len(names) - 1


async def test_a_reader_that_does_not_read_is_left(node, monkeypatch):
    monkeypatch.setattr("kvplug.engines.nats_answers.UNREAD_LIMIT_S", 0.2)
    with streaming(node.url, about=WorkerHello(block_size=1), uses_stream=False) as stream:
        names = tuple(range(1, 200_001))
        event = BlockStored(
            block_hashes=names, token_ids=names, block_size=1, namespace=Namespace()
        )
        stream.publish(batch(event))
        async with reading(node.url, NAME, block_size=1) as reader:
            await at_rest(reader, stream)
            slow = reader.answer(ASK)
            await anext(slow)
            await until(lambda: stream.answers.num_abandoned == 1, "it is left")
            await slow.aclose()


async def test_of_two_publishers_of_one_name_the_later_one_speaks(node, monkeypatch, caplog):
    monkeypatch.setattr(beats, "HEARTBEAT_S", 0.3)
    monkeypatch.setattr(beats, "ALONE_S", 0.9)
    await make_stream(node.url)
    with streaming(node.url) as former:
        former.publish(batch(stored(1, 3)))
        async with reading(node.url, NAME) as reader:
            await at_rest(reader, former)
            with streaming(node.url) as later:
                later.publish(batch(stored(50, 3)))
                await until(lambda: former.beats.is_silent, "the former one stops")
                former.publish(batch(stored(7)))
                await at_rest(reader, later)
                assert not later.beats.is_silent
            await until(lambda: not former.beats.is_silent, "it is alone again")
            await at_rest(reader, former)
            assert reader.names() == {1, 2, 3, 7}
    said = [each.getMessage() for each in caplog.records]
    assert sum("another publisher has this one's name" in each for each in said) == 1


async def test_shutdown_sends_what_is_queued_and_again_is_harmless(node):
    await make_stream(node.url)
    async with reading(node.url, NAME) as reader:
        with streaming(node.url) as stream:
            for i in range(100):
                stream.publish(batch(stored(10 * i)))
            stream.shutdown()
            stream.shutdown()
            stream.publish(batch(stored(1)))  # an engine that goes on is not told off
        await until(lambda: len(reader.names()) == 100, "all of it is there")


def test_shutdown_without_a_server_does_not_wait():
    with streaming("nats://127.0.0.1:1") as stream:
        stream.publish(batch(stored(1)))
    assert not stream._task._connection._thread.is_alive()
