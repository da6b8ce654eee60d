"""Events of engines over ZMQ, forwarded to a real NATS server: a reader there has what they hold,
or is told that it has not.
"""

import pytest

from kvplug import ConfigError, KvEventPublisher
from kvplug.ingest import trust
from kvplug.nats.subjects import PublisherName
from tests.chaos.faults import Fault, FaultPlan, Odds
from tests.chaos.proxy import EventProxy
from tests.forwarder.engines import WORKER, config_of, engine, forwarding
from tests.nats_servers import nats_servers
from tests.plugins.nats_reader import make_stream, reading
from tests.waiting import until

NAME = PublisherName(WORKER, 0)


@pytest.fixture
async def url():
    with nats_servers() as [node]:
        await make_stream(node.url)
        yield node.url


async def is_exact(reader, engine):
    """The reader holds what the engine does, and is told of no defect."""

    def is_equal():
        is_whole = reader.is_exact and reader.about is not None and not reader.about.defects
        return is_whole and reader.names() == engine.held

    await until(is_equal, "the reader has all")


async def test_a_stock_publisher_becomes_a_life(url):
    with engine() as stock, forwarding(url, stock) as forwarder:
        [one] = forwarder.engines
        await seen(one, stock)
        stock.store(100, 3)
        stock.store(200, parent=102)
        stock.remove(200)
        async with reading(url, NAME) as reader:
            await is_exact(reader, stock)
            assert reader.num_asks == 0
            assert reader.about.block_size == 4
            assert reader.about.url == WORKER
            assert one.trust is trust.EXACT
            assert one.wire.num_blocks == len(stock.held)


async def test_a_forwarder_that_comes_late_has_past_events_sent_again(url):
    with engine() as stock:
        for i in range(50):
            stock.store(10 * i, 2)
        with forwarding(url, stock) as forwarder:
            async with reading(url, NAME) as reader:
                await seen(forwarder.engines[0], stock)
                await is_exact(reader, stock)
                assert len(reader.names()) > 100


async def test_without_replay_a_late_forwarder_says_so_until_the_cache_is_cleared(url):
    with engine(replays=False) as stock:
        stock.store(100)
        with forwarding(url, stock) as forwarder:
            await seen(forwarder.engines[0], stock)
            async with reading(url, NAME) as reader:
                await until(lambda: is_told(reader, "zmq_late_join"), "the reader is told")
                stock.clear()
                stock.store(300)
                await is_exact(reader, stock)


async def seen(one, stock):
    """A message of the engine has come: its subscription is known."""

    def has_come():
        stock.store(5000 + stock.publisher.num_published)
        return one.num_messages

    await until(has_come, "a message comes")


def is_told(reader, reason):
    return reader.about is not None and reason in reader.about.defects


async def test_an_engine_that_restarts_begins_a_life(url):
    with engine() as stock:
        endpoint = stock.endpoint
        with forwarding(url, stock, zmq_replay_endpoint=None) as forwarder:
            [one] = forwarder.engines
            async with reading(url, NAME) as reader:
                await seen(one, stock)
                await until(reader.names, "a block is there")
                life = reader.life
                stock.close()
                await until(lambda: is_told(reader, "zmq_disconnected"), "the reader is told")
                assert reader.life != life
                assert not reader.names()
                with engine(endpoint, replays=False) as another:
                    one.num_messages = 0
                    await seen(one, another)
                    await until(reader.names, "a block of it is there")
                    another.clear()
                    await is_exact(reader, another)


@pytest.mark.parametrize("replays", [True, False])
async def test_lost_messages_are_repaired_or_said(url, replays):
    with (
        engine(replays=replays) as stock,
        EventProxy(stock.endpoint) as proxy,
        forwarding(url, stock, zmq_endpoint=proxy.endpoint) as forwarder,
    ):
        async with reading(url, NAME) as reader:
            await seen(forwarder.engines[0], stock)
            stock.clear()
            stock.store(100)
            await is_exact(reader, stock)
            proxy.inject(FaultPlan(Odds(drop=1.0), seed=0))
            stock.remove(100)
            await until(lambda: proxy.counts[Fault.DROP], "it is lost")
            proxy.heal()
            stock.store(200)
            if replays:
                await is_exact(reader, stock)
            else:
                await until(lambda: is_told(reader, "zmq_lost"), "the reader is told")
                assert reader.names() == {200}
                stock.clear()
                await is_exact(reader, stock)


async def test_our_own_wire_is_passed_on(url):
    with engine(is_ours=True) as ours:
        for i in range(20):
            ours.store(10 * i, 2)
        with forwarding(url, ours):
            async with reading(url, NAME) as reader:
                await is_exact(reader, ours)
                assert reader.life == ours.publisher.life.position[0]
                assert reader.about.model == "m"
                assert reader.about.answers_at is None
                assert reader.num_asks
                ours.store(1000)
                ours.remove(0)
                await is_exact(reader, ours)
                assert (reader.life, reader.next) == ours.publisher.life.position


async def test_a_lost_last_message_of_our_own_wire_shows(url):
    with (
        engine(is_ours=True) as ours,
        EventProxy(ours.endpoint) as proxy,
        forwarding(url, ours, zmq_endpoint=proxy.endpoint),
    ):
        async with reading(url, NAME) as reader:
            ours.store(100)
            await is_exact(reader, ours)
            proxy.inject(FaultPlan(Odds(drop=1.0), seed=0))
            ours.store(200)
            await until(lambda: proxy.counts[Fault.DROP], "it is lost")
            proxy.heal()
            await is_exact(reader, ours)


async def test_a_forwarder_that_restarts_repeats_nothing_of_our_own_wire(url):
    with engine(is_ours=True) as ours:
        async with reading(url, NAME) as reader:
            with forwarding(url, ours):
                ours.store(100)
                await is_exact(reader, ours)
            ours.store(200)
            with forwarding(url, ours):
                await is_exact(reader, ours)
                assert reader.life == ours.publisher.life.position[0]


async def test_without_a_local_indexer_only_past_events_are_said_again(url):
    with engine() as stock, forwarding(url, stock, enable_local_indexer=False) as forwarder:
        await seen(forwarder.engines[0], stock)
        async with reading(url, NAME) as reader:
            await is_exact(reader, stock)
            hello, end = await reader.ask()
            assert end.next == hello.next == forwarder.engines[0].wire.life.position[1]
            events = (await reader.ask(reader.life, 0))[1:-1]
            assert [each.number for each in events] == list(range(end.next))


async def test_a_publisher_of_a_program_forwards_one_engine(url):
    with engine(is_ours=True) as ours:
        ours.store(100)
        with KvEventPublisher(url, zmq_config=config_of(ours)) as publisher:
            async with reading(url, NAME) as reader:
                await is_exact(reader, ours)
            assert publisher.endpoint == f"nats://{NAME}"
            assert publisher.num_dropped == 0
            with pytest.raises(ConfigError, match="expected no publish call"):
                publisher.publish_all_cleared()
    with pytest.raises(ConfigError, match="zmq_config must be"):
        KvEventPublisher(url, kv_block_size=4, zmq_config="tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="needs servers of NATS"):
        KvEventPublisher(zmq_config=config_of(ours, zmq_endpoint="tcp://127.0.0.1:1"))
