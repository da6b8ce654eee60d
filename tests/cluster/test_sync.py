"""ReplicaSync over a real nats-server: load seen by replicas, lost messages, lost replicas."""

import asyncio
import itertools
import random
import sys
from contextlib import contextmanager

import numpy as np
import pytest

from kvplug import Router, RouterConfig
from kvplug.cluster.load_exchange import SILENCE_S
from kvplug.cluster.sync import ReplicaSync
from kvplug.errors import ConfigError
from kvplug.kernels import costing
from kvplug.nats.connection import NatsConnection
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import Subjects
from tests.cluster.replicas import AGREED, SIZE, WORKERS
from tests.nats_servers import nats_servers
from tests.waiting import until

# A row is lost with the share of messages, so a few seconds may pass.
CONVERGED_S = 15.0


class LossySync(ReplicaSync):
    """Loses messages of others; `loss`: which share."""

    loss = 0.0
    dice = random.Random(3)

    async def _hear(self, message):
        if self.dice.random() >= self.loss:
            await super()._hear(message)


class Replica:
    """A router that shares its load."""

    def __init__(self, url, name, workers=WORKERS, fleet="default"):
        self.router = Router(RouterConfig(block_size=SIZE), random_=random.Random(name))
        for worker in workers:
            self.router.add_worker(worker, model="m" if worker < "http://c" else "n")
        settings = NatsSettings(servers=(url,), fleet=fleet)
        self.connection = NatsConnection(settings, f"router-{name}")
        self.sync = LossySync(self.router, self.connection, Subjects(fleet), name)
        self.flights = []

    def start(self):
        self.connection.start()
        self.sync.start()

    def stop(self):
        self.sync.stop()
        self.connection.stop()

    def route(self, number, **options):
        tokens = np.arange(32, dtype=np.uint32) + 1000 * number
        self.flights.append(self.router.route(tokens, **options).request_id)

    def finish_all(self):
        for request_id in self.flights:
            self.router.finish(request_id, 3)
        self.flights.clear()

    def loads(self):
        with self.router.locked():
            return self.router.load.ranks[:, AGREED].copy()


@contextmanager
def replicas_on(url, num_routers, **options):
    replicas = [Replica(url, f"r{number}", **options) for number in range(num_routers)]
    try:
        for each in replicas:
            each.start()
        yield replicas
    finally:
        for each in replicas:
            each.stop()


@pytest.fixture(scope="module")
def server():
    with nats_servers() as [node]:
        yield node


async def all_heard(replicas):
    others = len(replicas) - 1
    await until(
        lambda: all(len(each.sync.status().peers) == others for each in replicas), "all are heard"
    )


def are_equal(replicas):
    first, *others = (each.loads() for each in replicas)
    return all(np.allclose(first, other, atol=1e-6) for other in others)


def num_in_flight(replica):
    return replica.loads()[:, AGREED.index(costing.NUM_RUNNING)].sum()


async def test_four_replicas_see_the_same_load_after_quiet(server):
    with replicas_on(server.url, 4) as replicas:
        await all_heard(replicas)
        for number in range(80):
            replica = replicas[number % 4]
            replica.route(number, model="mn"[number % 2])
            if number % 3 == 0:
                replica.router.first_token(replica.flights[-1])
            if number % 10 == 9:
                replica.finish_all()
            await asyncio.sleep(0)
        total = sum(len(each.flights) for each in replicas)
        await until(lambda: are_equal(replicas), "the load is equal", timeout_s=CONVERGED_S)
        assert all(num_in_flight(each) == total for each in replicas)
        for each in replicas:
            each.finish_all()
        await until(
            lambda: all((each.loads() == 0).all() for each in replicas), "nothing is in flight"
        )
        assert all(each.sync.status().counts.unsent == 0 for each in replicas)


def num_missed(replicas):
    return sum(each.sync.status().counts.missed for each in replicas)


async def test_what_is_lost_is_put_right_by_rows(server):
    with replicas_on(server.url, 2, fleet="lossy") as replicas:
        await all_heard(replicas)
        for each in replicas:
            each.sync.loss = 0.1
        numbers = itertools.count()
        while num_missed(replicas) == 0:
            for number in itertools.islice(numbers, 20):
                replica = replicas[number % 2]
                replica.route(number)
                if len(replica.flights) > 8:
                    replica.router.finish(replica.flights.pop(0))
            await asyncio.sleep(0.001)  # what is noted at once is one message
            assert next(numbers) < 100_000
        await until(lambda: are_equal(replicas), "the load is equal", timeout_s=CONVERGED_S)
        first, second = replicas
        second.sync.loss = 1.0  # all that says that its requests are over is lost
        first.finish_all()
        await until(lambda: num_in_flight(first) == len(second.flights), "they are over")
        second.sync.loss = 0.0
        await until(lambda: are_equal(replicas), "a row has said it", timeout_s=CONVERGED_S)


async def test_a_replica_that_stops_and_one_that_dies_are_forgotten(server):
    with replicas_on(server.url, 3, fleet="stops") as replicas:
        first, second, third = replicas
        await all_heard(replicas)
        for number, each in enumerate(replicas):
            each.route(number)
        await until(lambda: num_in_flight(first) == 3, "all are counted")
        second.sync.stop()
        await until(lambda: num_in_flight(first) == 2, "it is forgotten", timeout_s=SILENCE_S / 2)
        assert num_in_flight(second) == 1
        third.connection.stop()  # without a word
        await until(lambda: num_in_flight(first) == 1, "it is forgotten, too")
        assert first.sync.status().counts.lost_peers == 1
        second.sync.start()
        await until(lambda: num_in_flight(first) == 2, "it is back")
        await until(lambda: num_in_flight(second) == 2, "it hears the others, too")


async def test_a_message_that_fails_does_not_end_the_sync(server):
    with replicas_on(server.url, 2) as replicas:
        await all_heard(replicas)
        exchange = replicas[0].sync._exchange
        rows, failed = exchange.rows, []

        def rows_failing_once():
            if not failed:
                failed.append(exchange.counts.sent)
                raise ValueError
            return rows()

        exchange.rows = rows_failing_once
        await until(lambda: failed and exchange.counts.sent > failed[0] + 1, "it goes on")


async def test_a_router_without_a_server_counts_for_its_replicas_until_it_is_back():
    with nats_servers() as [node], replicas_on(node.url, 2) as replicas:
        first, second = replicas
        await all_heard(replicas)
        node.kill()
        first.route(0)
        await until(lambda: num_in_flight(first) == 2, "its load counts twice")
        assert first.sync.status().num_assumed == 1
        node.start()
        await until(lambda: num_in_flight(first) == num_in_flight(second) == 1, "all is told")
        assert are_equal(replicas)


async def test_without_a_server_requests_are_routed():
    replica = Replica("nats://127.0.0.1:9", "alone")
    replica.start()
    try:
        for number in range(3):
            replica.route(number)
        assert num_in_flight(replica) == 3
        assert not replica.sync.status().is_connected
    finally:
        replica.stop()


async def test_the_load_of_a_router_is_shared_once(server):
    with replicas_on(server.url, 1) as [replica]:
        again = ReplicaSync(replica.router, replica.connection, Subjects("default"), "again")
        with pytest.raises(ConfigError, match="shared already"):
            again.start()
        again.stop()
        replica.connection.stop()
        replica.sync.stop()  # its connection has ended


@pytest.mark.parametrize("router_id", ["", "x" * 129, None])
def test_an_id_that_is_none_is_refused(router_id):
    connection = NatsConnection(NatsSettings(servers=("nats://127.0.0.1:9",)), "none")
    with pytest.raises(ConfigError, match="the id of a router"):
        ReplicaSync(Router(), connection, Subjects("default"), router_id)
    connection.loop.close()


BUSY = """
import sys, time
import numpy as np
from tests.cluster.test_sync import Replica
replica = Replica(sys.argv[1], "process", fleet="killed")
replica.start()
for number in range(5):
    replica.route(number)
print("busy", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
async def test_the_load_of_a_killed_process_is_forgotten(server):
    with replicas_on(server.url, 1, fleet="killed") as [replica]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", BUSY, server.url, stdout=asyncio.subprocess.PIPE
        )
        assert await process.stdout.readline() == b"busy\n"
        await until(lambda: num_in_flight(replica) == 5, "its load is counted")
        process.kill()
        await process.wait()
        await until(lambda: num_in_flight(replica) == 0, "its load is forgotten")
        assert replica.sync.status().counts.lost_peers == 1
