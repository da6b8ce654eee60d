"""A real publisher over NATS without a stream, followed by itself; its server is killed."""

import pytest

from kvplug import Rank, Router, RouterConfig
from kvplug.engines.kv_event_publisher import KvEventPublisher
from kvplug.errors import TransportError
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from kvplug.ingest.trust import Trust
from kvplug.kernels._jit import compile_all
from tests.transports.nats_fleet import nats_fleet
from tests.waiting import until

WORKER = "http://10.0.0.7:8000"
ENDPOINT = "nats://http%3A%2F%2F10%2E0%2E0%2E7%3A8000/0"


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    compile_all()


@pytest.fixture
def fleet():
    with nats_fleet() as fleet:
        yield fleet


@pytest.fixture
def publisher(fleet):
    publisher = KvEventPublisher(fleet.node.url, worker=WORKER, kv_block_size=4)
    yield publisher
    publisher.shutdown()


@pytest.fixture
def events(fleet):
    transport = fleet.transport()
    events = EventThread({"nats": lambda: transport})
    events.start()
    yield events
    events.stop()


def store(publisher, first_token):
    tokens = range(first_token, first_token + 4)
    publisher.publish_stored(token_ids=tokens, block_hashes=[1000 * first_token])


async def test_a_publisher_is_followed_from_the_middle_and_through_a_killed_server(
    fleet, publisher, events
):
    router = Router(RouterConfig(block_size=4))
    router.add_worker("w")
    follower = Follower(router, Rank("w"))
    store(publisher, 1)
    store(publisher, 11)

    async def are_known(*expected):
        def known():
            names = router.index.engine_hashes_of(Rank("w")).tolist()
            return sorted(names), follower.trust.level

        await until(
            lambda: events.call(known) == ([*expected], Trust.EXACT), f"{expected} are known"
        )

    events.follow(follower, ENDPOINT)
    await are_known(1000, 11_000)
    publisher.publish_removed(block_hashes=[1000])
    await are_known(11_000)
    fleet.node.kill()
    await until(lambda: not follower.connected, "the loss is noticed")
    store(publisher, 21)
    fleet.node.start()
    await are_known(11_000, 21_000)


def test_an_endpoint_of_no_worker_is_refused(events):
    follower = Follower(Router(RouterConfig(block_size=4)), Rank("w"))
    with pytest.raises(TransportError, match="expected an endpoint like nats://WORKER/0"):
        events.follow(follower, "nats://10.0.0.7:4222")
