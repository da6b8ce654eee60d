"""The event thread on real sockets."""

import threading
from threading import Event

import pytest
import zmq

from kvplug import Rank, Router, RouterConfig
from kvplug.errors import TransportError
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from kvplug.ingest.trust import Trust
from kvplug.transports import TRANSPORTS
from kvplug.transports.zmq import ZmqTransport
from tests.ingest.publisher import Publisher, bind, frames_of, message, stored
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
def events():
    events = EventThread()
    events.start()
    yield events
    events.stop()


def blocks_of(router, worker):
    with router._lock:  # an event may come meanwhile
        return router.index.engine_hashes_of(Rank(worker)).tolist()


async def test_two_publishers_are_followed_apart(router, events, publishers):
    followers = [Follower(router, Rank(f"w{i}")) for i in range(2)]
    for follower, publisher in zip(followers, publishers, strict=True):
        events.follow(follower, publisher.endpoint)
        publisher.wait_for_a_subscriber()
    for i, publisher in enumerate(publishers):
        publisher.send(message(0, stored(10 * i + 1)))
    await until(lambda: blocks_of(router, "w0") == [1000], "w0's block is known")
    await until(lambda: blocks_of(router, "w1") == [11_000], "w1's block is known")


async def test_a_publisher_that_dies_and_returns_starts_over(router, events, publishers):
    follower, publisher = Follower(router, Rank("w0")), publishers[0]
    events.follow(follower, publisher.endpoint)
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


async def test_garbage_on_the_socket_harms_nobody(router, events, publishers):
    follower, publisher = Follower(router, Rank("w0")), publishers[0]
    events.follow(follower, publisher.endpoint)
    publisher.wait_for_a_subscriber()
    publisher.send([b"x"])
    publisher.send([b"topic", b"12345678", b"\xff" * 1000])
    publisher.send(message(0, stored(1)))
    await until(lambda: len(router.index) == 1, "the good message is applied")
    assert follower.skipped == {"undecodable": 2}


async def test_a_failure_of_ours_does_not_end_the_thread(router, events, publishers, caplog):
    class Broken(Follower):
        def receive(self, messages):
            raise RuntimeError("a mistake of ours")

    broken, sound = Broken(router, Rank("w0")), Follower(router, Rank("w1"))
    for follower, publisher in zip((broken, sound), publishers, strict=True):
        events.follow(follower, publisher.endpoint)
        publisher.wait_for_a_subscriber()
        publisher.send(message(0, stored(1)))
    await until(lambda: blocks_of(router, "w1") == [1000], "the other one is followed")
    await until(lambda: "following its events failed" in caplog.text, "the failure is logged")


async def test_unfollow_closes_the_subscription(router, events, publishers):
    follower, publisher = Follower(router, Rank("w0")), publishers[0]
    events.follow(follower, publisher.endpoint)
    publisher.wait_for_a_subscriber()
    events.unfollow(follower)
    publisher.wait_for_a_subscriber()  # XPUB: the subscription is taken back
    publisher.send(message(0, stored(1)))
    assert len(router.index) == 0


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://", "tcp://127.0.0.1:notaport"])
def test_an_endpoint_that_is_none_is_rejected_by_name(router, events, endpoint):
    with pytest.raises(TransportError, match="expected an endpoint like tcp://"):
        events.follow(Follower(router, Rank("w0")), endpoint)


async def test_a_thread_that_is_busy_closes_its_sockets_itself(publishers, monkeypatch, caplog):
    monkeypatch.setattr("kvplug.ingest.event_thread._STOP_TIMEOUT_S", 0.01)
    follower, is_busy, may_go_on = Follower(Router(), Rank("w0")), Event(), Event()

    def be_busy(messages):
        is_busy.set()
        assert may_go_on.wait(10)

    monkeypatch.setattr(follower, "receive", be_busy)
    events = EventThread()
    events.start()
    events.follow(follower, publishers[0].endpoint)
    publishers[0].wait_for_a_subscriber()
    publishers[0].send(message(0, stored(1)))
    await until(is_busy.is_set, "a message is at hand")
    events.stop()
    assert "is busy" in caplog.text
    may_go_on.set()
    await until(lambda: not events.is_alive, "the thread has ended")
    events.stop()
    assert "following its events failed" not in caplog.text


async def test_nothing_that_fails_ends_the_thread(router, events, publishers, monkeypatch, caplog):
    calls = iter([RuntimeError("a mistake of ours"), OSError(24, "Too many open files")])

    def fail_twice():
        if (error := next(calls, None)) is not None:
            raise error
        return False

    monkeypatch.setattr(events, "_is_tick", fail_twice)
    await until(lambda: "Too many open files" in caplog.text, "both failures are logged")
    follower, publisher = Follower(router, Rank("w0")), publishers[0]
    events.follow(follower, publisher.endpoint)
    publisher.wait_for_a_subscriber()
    publisher.send(message(0, stored(1)))
    await until(lambda: len(router.index) == 1, "events are received")


class ScarceTransport(ZmqTransport):
    """Opens nothing while `is_exhausted`, as without descriptors."""

    is_exhausted = False

    def connect(self, endpoint, topic, replay):
        if self.is_exhausted:
            raise TransportError("no socket: Too many open files")
        return super().connect(endpoint, topic, replay)


@pytest.fixture
def scarce():
    return ScarceTransport()


@pytest.fixture
def scarce_events(scarce):
    events = EventThread({"tcp": lambda: scarce})
    events.start()
    yield events
    events.stop()


async def test_a_source_that_cannot_be_opened_is_opened_later(
    router, scarce, scarce_events, publishers, caplog
):
    follower, publisher = Follower(router, Rank("w0")), publishers[0]
    scarce_events.follow(follower, publisher.endpoint)
    publisher.wait_for_a_subscriber()
    publisher.send(message(0, stored(1)))
    await until(lambda: len(router.index) == 1, "the block is known")
    scarce.is_exhausted = True
    publisher.close()
    await until(lambda: "Too many open files" in caplog.text, "it cannot be renewed")
    assert not follower.connected
    assert scarce_events.is_alive
    scarce.is_exhausted = False
    publisher.open()
    publisher.wait_for_a_subscriber()
    publisher.send(message(0, stored(21)))
    await until(lambda: blocks_of(router, "w0") == [21_000], "the new incarnation is followed")
    await until(lambda: follower.trust.level is Trust.EXACT, "nothing is missing")


@pytest.mark.slow
async def test_more_engines_than_zmq_has_sockets_by_default(router, events):
    num_engines = 400
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.linger = 0
        port = bind(publisher)
        for i in range(num_engines):
            router.add_worker(f"many-{i}")
        followers = [Follower(router, Rank(f"many-{i}")) for i in range(num_engines)]
        for follower in followers:
            events.follow(follower, f"tcp://127.0.0.1:{port}")
        await until(lambda: all(f.connected for f in followers), "all are connected")
        assert publisher.poll(10_000)
        publisher.send_multipart(frames_of(message(0, stored(1))))
        await until(lambda: followers[-1].num_stored == 1, "the last one hears it, too")


def test_calls_without_a_running_thread_are_rejected_by_name(router):
    with pytest.raises(TransportError, match="expected a call after start"):
        EventThread().bind("tcp://127.0.0.1:*")


def test_a_scheme_without_a_transport_is_rejected_by_name(router, events):
    schemes = ", ".join(f"{scheme}://" for scheme in sorted(TRANSPORTS))
    with pytest.raises(TransportError, match=f"one of the schemes {schemes}"):
        events.follow(Follower(router, Rank("w0")), "carrier-pigeon://roof")


async def test_a_call_runs_between_messages_and_returns_what_it_found(events):
    names = events.call(lambda: [threading.current_thread().name, events.is_alive])
    assert names == ["kvplug-events", True]

    def fail():
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        events.call(fail)
    events.stop()
    with pytest.raises(TransportError, match="expected a call after start"):
        events.call(lambda: None)
