"""The listener on real sockets."""

from threading import Event

import pytest

from kvplug import Rank, Router, RouterConfig
from kvplug.errors import TransportError
from kvplug.ingest.follower import Follower
from kvplug.ingest.listener import EventListener
from tests.ingest.publisher import Publisher, message, stored
from tests.waiting import until


@pytest.fixture
def publishers():
    publishers = [Publisher(), Publisher()]
    yield publishers
    for publisher in publishers:
        publisher.close()
        publisher.destroy()


@pytest.fixture
def router():
    router = Router(RouterConfig(block_size=4))
    for worker in ("w0", "w1"):
        router.add_worker(worker)
    return router


@pytest.fixture
def listener():
    listener = EventListener()
    listener.start()
    yield listener
    listener.stop()


def blocks_of(router, worker):
    with router._lock:  # an event may come meanwhile
        return router.index.engine_hashes_of(Rank(worker)).tolist()


async def test_two_publishers_are_followed_apart(router, listener, publishers):
    followers = [Follower(router, Rank(f"w{i}")) for i in range(2)]
    for follower, publisher in zip(followers, publishers, strict=True):
        listener.follow(follower, publisher.endpoint)
        publisher.wait_for_a_subscriber()
    for i, publisher in enumerate(publishers):
        publisher.send(message(0, stored(10 * i + 1)))
    await until(lambda: blocks_of(router, "w0") == [1000], "w0's block is known")
    await until(lambda: blocks_of(router, "w1") == [11_000], "w1's block is known")


async def test_a_publisher_that_dies_and_returns_starts_over(router, listener, publishers):
    follower, publisher = Follower(router, Rank("w0")), publishers[0]
    listener.follow(follower, publisher.endpoint)
    publisher.wait_for_a_subscriber()
    publisher.send(message(0, stored(1)))
    publisher.send(message(1, stored(11)))
    await until(lambda: len(router.index) == 2, "both blocks are known")
    publisher.close()
    await until(lambda: len(router.index) == 0, "the blocks are forgotten")
    assert not follower.connected
    publisher.open()
    publisher.wait_for_a_subscriber()
    # A number beyond the last one of the former life must not pass for its continuation.
    publisher.send(message(2, stored(21)))
    await until(lambda: blocks_of(router, "w0") == [21_000], "the new life is followed")
    reason = "the router joined after the engine's first events"
    await until(lambda: follower.trust.reason == reason, "the late join is named")


async def test_garbage_on_the_socket_harms_nobody(router, listener, publishers):
    follower, publisher = Follower(router, Rank("w0")), publishers[0]
    listener.follow(follower, publisher.endpoint)
    publisher.wait_for_a_subscriber()
    publisher.send([b"x"])
    publisher.send([b"topic", b"12345678", b"\xff" * 1000])
    publisher.send(message(0, stored(1)))
    await until(lambda: len(router.index) == 1, "the good message is applied")
    assert follower.skipped == {"undecodable": 2}


async def test_a_failure_of_ours_does_not_end_the_thread(router, listener, publishers, caplog):
    class Broken(Follower):
        def receive_many(self, messages):
            raise RuntimeError("a mistake of ours")

    broken, sound = Broken(router, Rank("w0")), Follower(router, Rank("w1"))
    for follower, publisher in zip((broken, sound), publishers, strict=True):
        listener.follow(follower, publisher.endpoint)
        publisher.wait_for_a_subscriber()
        publisher.send(message(0, stored(1)))
    await until(lambda: blocks_of(router, "w1") == [1000], "the other one is followed")
    await until(lambda: "following its events failed" in caplog.text, "the failure is logged")


async def test_unfollow_closes_the_subscription(router, listener, publishers):
    follower, publisher = Follower(router, Rank("w0")), publishers[0]
    listener.follow(follower, publisher.endpoint)
    publisher.wait_for_a_subscriber()
    listener.unfollow(follower)
    publisher.wait_for_a_subscriber()  # XPUB: the subscription is taken back
    publisher.send(message(0, stored(1)))
    assert len(router.index) == 0


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://", "tcp://127.0.0.1:notaport"])
def test_an_endpoint_that_is_none_is_refused_by_name(router, listener, endpoint):
    with pytest.raises(TransportError, match="expected an endpoint like tcp://"):
        listener.follow(Follower(router, Rank("w0")), endpoint)


async def test_a_thread_that_is_busy_closes_its_sockets_itself(publishers, monkeypatch, caplog):
    monkeypatch.setattr("kvplug.ingest.listener._STOP_TIMEOUT_S", 0.01)
    follower, is_busy, may_go_on = Follower(Router(), Rank("w0")), Event(), Event()

    def be_busy(messages):
        is_busy.set()
        assert may_go_on.wait(10)

    monkeypatch.setattr(follower, "receive_many", be_busy)
    listener = EventListener()
    listener.start()
    listener.follow(follower, publishers[0].endpoint)
    publishers[0].wait_for_a_subscriber()
    publishers[0].send(message(0, stored(1)))
    await until(is_busy.is_set, "a message is at hand")
    listener.stop()
    assert "is busy" in caplog.text
    may_go_on.set()
    await until(lambda: not listener._thread.is_alive(), "the thread has ended")
    listener.stop()
    assert "following its events failed" not in caplog.text
    assert listener._context.closed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_thread_that_dies_closes_its_sockets(monkeypatch):
    listener = EventListener()

    def die():
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(listener, "_is_tick", die)
    listener.start()
    await until(lambda: not listener._thread.is_alive(), "the thread has ended")
    assert listener._context.closed
    listener.stop()
