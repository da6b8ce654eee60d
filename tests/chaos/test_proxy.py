"""The proxy does what its plan says, and nothing else."""

from collections import Counter

import pytest

from kvplug.transports.zmq import message_of
from tests.chaos.faults import Fault, FaultPlan, Odds
from tests.chaos.proxy import EventProxy
from tests.ingest.publisher import Publisher, message, stored
from tests.plugins.stock_client import StockClient, wait_until

HARM = Odds(drop=0.1, duplicate=0.1, hold=0.1, delay=0.05, max_burst=4, max_delay_s=0.002)


@pytest.fixture
def engine():
    publisher = Publisher()
    yield publisher
    publisher.destroy()


@pytest.fixture
def client():
    subscriber = StockClient()
    yield subscriber
    subscriber.close()


@pytest.fixture
def proxy(engine, client):
    with EventProxy(engine.endpoint) as between:
        join(between, engine, client)
        yield between


def join(proxy, engine, client):
    engine.wait_for_a_subscriber()
    client.subscribe(proxy.endpoint)
    wait_until(lambda: proxy.has_subscriber, "the subscription has arrived")


def wait_for_return(proxy, client):
    # ZMQ subscribes again in the client's own thread, within whatever call it makes next.
    wait_until(
        lambda: not client.has_message(timeout_ms=0) and proxy.has_subscriber, "the client is back"
    )


def send(engine, proxy, numbers):
    for number in numbers:
        engine.send(message(number, stored(number)))
    wait_until(lambda: proxy.num_seen >= len(numbers), "the proxy has seen them all")


def received(client, num_messages):
    numbers = [int.from_bytes(client.receive()[1], "big") for _ in range(num_messages)]
    assert not client.has_message(timeout_ms=50)
    return numbers


def test_a_plan_is_the_same_for_the_same_seed():
    plans = [FaultPlan(HARM, seed=3) for _ in range(2)]
    verdicts = [[plan.next() for _ in range(2000)] for plan in plans]
    assert verdicts[0] == verdicts[1]
    counts = Counter(fault for fault, _ in verdicts[0])
    assert all(counts[fault] > 20 for fault in Fault)
    assert counts[Fault.DROP] > 1.5 * counts[Fault.DUPLICATE]  # bursts


def test_without_a_plan_every_frame_is_handed_on(engine, proxy, client):
    sent = [message(number, stored(number)) for number in range(50)]
    for each in sent:
        engine.send(each)
    assert [message_of(client.receive()) for _ in sent] == sent


def test_with_a_plan_messages_are_lost_doubled_and_late(engine, proxy, client):
    proxy.inject(FaultPlan(HARM, seed=5))
    send(engine, proxy, range(300))
    proxy.heal()
    counts = proxy.counts
    numbers = received(client, 300 - counts[Fault.DROP] + counts[Fault.DUPLICATE])
    assert len(set(numbers)) == 300 - counts[Fault.DROP]
    assert numbers != sorted(numbers)
    overtaken_by = [max(numbers[: i + 1]) - number for i, number in enumerate(numbers)]
    assert 0 < max(overtaken_by) <= 50


def test_a_delay_keeps_the_order(engine, proxy, client):
    proxy.inject(FaultPlan(Odds(delay=0.2, max_delay_s=0.01), seed=5))
    send(engine, proxy, range(100))
    assert received(client, 100) == list(range(100))
    assert proxy.counts[Fault.DELAY] > 10


def test_what_is_said_while_it_is_cut_is_lost(engine, proxy, client):
    endpoint = proxy.endpoint
    proxy.cut()
    send(engine, proxy, range(5))
    assert proxy.counts["cut off"] == 5
    proxy.restore()
    assert (proxy.endpoint, len(proxy.restored_at)) == (endpoint, 2)
    wait_for_return(proxy, client)
    engine.send(message(5, stored(5)))
    assert received(client, 1) == [5]


@pytest.mark.parametrize("hides_restarts", [False, True])
def test_the_death_of_the_engine_is_seen_through_it_unless_a_broker_hides_it(
    engine, client, hides_restarts
):
    with EventProxy(engine.endpoint, hides_restarts=hides_restarts) as proxy:
        join(proxy, engine, client)
        engine.close()
        wait_until(lambda: not proxy.is_upstream_connected, "the proxy sees it")
        wait_until(lambda: proxy.has_subscriber == hides_restarts, "its clients see it, or not")
        engine.open()
        wait_until(lambda: proxy.is_upstream_connected, "the proxy is back")
        wait_for_return(proxy, client)
        assert len(proxy.restored_at) == 2
