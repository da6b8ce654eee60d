"""Publishers of ours over real sockets and in this process; with keys and without."""

import os

import pytest
import zmq
from zmq.auth import create_certificates

from kvplug import Rank, protocol
from kvplug.curve_keys import ClientKeys, ServerKeys
from kvplug.ingest import trust
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from kvplug.ingest.replay import ReplaySettings
from kvplug.transports import transports_with
from kvplug.transports.memory import MemoryTransport
from tests.ingest.life_publisher import LifePublisher, TellableRouter
from tests.ingest.life_server import LifeServer
from tests.waiting import until

RANK = Rank("w")


@pytest.fixture
def router():
    router = TellableRouter()
    router.add_worker("w")
    return router


@pytest.fixture
def thread():
    """start(*transports) -> a running EventThread."""
    started = []

    def start(*transports):
        started.append(EventThread(*transports))
        started[-1].start()
        return started[-1]

    yield start
    for each in started:
        each.stop()


@pytest.fixture
def serve():
    """serve(keys) -> a LifeServer."""
    servers = []

    def start(*arguments, **about):
        servers.append(LifeServer(*arguments, **about))
        return servers[-1]

    yield start
    for each in servers:
        each.close()


@pytest.fixture
def keys(tmp_path):
    """keys(name) -> (public, secret) key files."""

    def make(name):
        public, secret = create_certificates(tmp_path, name)
        os.chmod(secret, 0o600)
        return public, secret

    return make


def allow(folder, public):
    with open(public) as file:
        (folder / os.path.basename(public)).write_text(file.read())


def names(router):
    with router._lock:  # an event may come meanwhile
        return sorted(int(name) for name in router.index.engine_hashes_of(RANK))


async def exact(follower, router, expected):
    await until(
        lambda: (names(router), follower.trust) == (expected, trust.EXACT),
        f"{expected} are known for certain",
    )


async def test_a_newcomer_a_gap_and_a_restart(router, thread, serve):
    server, follower = serve(), Follower(router, RANK)
    server.publisher.store(3)
    thread().follow(follower, server.endpoint)
    await exact(follower, router, [1, 2, 3])
    server.send(lambda p: p.store(2))
    await exact(follower, router, [1, 2, 3, 4, 5])
    server.send(lambda p: p.remove_last() and None)  # lost on its way
    server.send(lambda p: p.store(1))
    await exact(follower, router, [1, 2, 3, 4, 6])
    server.send(lambda p: p.restart() or p.hello())
    server.send(lambda p: p.store(1))
    await exact(follower, router, [7])
    asks = [protocol.decode(each).next for each in server.asks]
    assert asks == [0, 4 - 2], "everything, from a number on; a new life has nothing"


async def test_an_endpoint_for_asks_that_is_none_is_no_end(router, thread, serve):
    server = serve(answers_at="inproc://secrets")
    server.send(lambda p: p.store(1))
    settings = ReplaySettings(answer_timeout_s=0.05)
    follower = Follower(router, RANK, settings=settings)
    thread().follow(follower, server.endpoint)
    await until(lambda: follower.trust is trust.ASKS_SILENT, "nobody can be asked")
    server.send(lambda p: p.store(1))
    await until(lambda: names(router) == [2], "live events count")


async def test_a_publisher_in_this_process(router, thread):
    memory, said, follower = MemoryTransport(), LifePublisher(), Follower(router, RANK)
    said.about["answers_at"] = "memory://engine"

    def answered(request):
        return [each.payload for each in said.answer(request)]

    publisher = memory.publisher("memory://engine", answer=answered)
    thread({"memory": lambda: memory}).follow(follower, "memory://engine")
    await until(lambda: follower.connected, "it follows")
    publisher.publish(said.store(2).payload)
    publisher.publish(said.hello().payload)
    await exact(follower, router, [1, 2])
    publisher.close()


class TestKeys:
    """Without an allowed key nobody reads, feeds or asks."""

    @pytest.fixture
    def allowed(self, tmp_path, keys):
        """(folder of allowed clients, the allowed one's secret key file)"""
        folder = tmp_path / "clients"
        folder.mkdir()
        public, secret = keys("router")
        allow(folder, public)
        return folder, secret

    @pytest.fixture
    def engine(self, keys):
        return keys("engine")

    @pytest.fixture
    def server(self, serve, engine, allowed):
        server = serve(ServerKeys.from_files(engine[1], allowed[0]))
        server.publisher.store(3)
        return server

    async def test_an_allowed_client_reads_and_asks(self, server, router, thread, engine, allowed):
        follower = Follower(router, RANK)
        client = ClientKeys.from_files(allowed[1], engine[0])
        thread(transports_with(client)).follow(follower, server.endpoint)
        await exact(follower, router, [1, 2, 3])
        server.send(lambda p: p.store(1) and None)
        server.send(lambda p: p.store(1))
        await exact(follower, router, [1, 2, 3, 4, 5])
        assert server.authenticator.num_denied == 0

    async def test_a_key_that_is_allowed_later_counts(
        self, server, router, thread, engine, allowed, keys
    ):
        public, secret = keys("late")
        follower = Follower(router, RANK)
        client = ClientKeys.from_files(secret, engine[0])
        thread(transports_with(client)).follow(follower, server.endpoint)
        await until(lambda: server.authenticator.num_denied == 1, "it is refused")
        allow(allowed[0], public)
        await exact(follower, router, [1, 2, 3])
        assert server.authenticator.num_denied < 6, "after pauses"

    async def test_others_neither_read_nor_ask(self, server, router, thread, engine, keys):
        other = ClientKeys.from_files(keys("other")[1], engine[0])
        wrong_server = ClientKeys.from_files(keys("another")[1], keys("impostor")[0])
        askers, answers_at = [], server.publisher.about["answers_at"].replace("*", "127.0.0.1")
        followers = []
        for client in (None, other, wrong_server):
            followers.append(Follower(router, RANK))
            events = thread() if client is None else thread(transports_with(client))
            events.follow(followers[-1], server.endpoint, replay=answers_at)
            askers.append(self.ask(server, answers_at, client))
        await until(lambda: server.authenticator.num_denied >= 2, "the foreign key is refused")
        server.send(lambda p: p.store(1))
        assert (server.num_subscriptions, server.asks) == (0, [])
        assert {each.num_messages for each in followers} == {0}
        assert not any(each.connected for each in followers)
        for each in askers:
            each.close()

    def ask(self, server, endpoint, client):
        dealer = server.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        if client is not None:
            client.apply(dealer)
        dealer.connect(endpoint)
        dealer.send_multipart([b"", protocol.encode(protocol.Ask(0, 0))])
        return dealer

    async def test_a_publisher_without_the_secret_key_feeds_nobody(
        self, serve, router, thread, engine, allowed, keys
    ):
        client = ClientKeys.from_files(allowed[1], engine[0])
        impostor = ServerKeys.from_files(keys("impostor")[1])
        for fake in (serve(), serve(impostor)):
            fake.publisher.store(3)
            follower = Follower(router, RANK)
            thread(transports_with(client)).follow(follower, fake.endpoint)
            monitored = await self.refused_handshakes(fake)
            fake.send(lambda p: p.store(1))
            assert (fake.num_subscriptions, follower.num_messages) == (0, 0)
            assert monitored

    async def refused_handshakes(self, server):
        """Once a client has tried and failed."""
        failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        with server.lock:
            monitor = server._xpub.get_monitor_socket(failed | zmq.EVENT_DISCONNECTED)
        try:
            return await until(lambda: monitor.poll(0), "a handshake has failed")
        finally:
            with server.lock:
                server._xpub.disable_monitor()
            monitor.close()
