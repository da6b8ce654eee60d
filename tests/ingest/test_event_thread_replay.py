"""Replays over real sockets: late joins, gaps, endpoints that are silent, wrong or gone."""

import pytest

from kvplug import Rank, Router, RouterConfig
from kvplug.errors import TransportError
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from kvplug.ingest.replay import ReplaySettings
from kvplug.ingest.trust import REPLAY_CONTRADICTS, UNCONFIRMED, Trust
from kvplug.transports.memory import MemoryTransport
from kvplug.transports.zmq import ZmqTransport
from tests.ingest.publisher import Publisher, ReplayServer, message, stored
from tests.waiting import until


@pytest.fixture
def publisher():
    publisher = Publisher()
    yield publisher
    publisher.destroy()


@pytest.fixture(params=[True, False], ids=["with topic", "without"])
def server(request):
    server = ReplayServer(with_topic=request.param)
    yield server
    server.close()


@pytest.fixture
def router():
    router = Router(RouterConfig(block_size=4))
    router.add_worker("w")
    return router


@pytest.fixture
def follower(router):
    return Follower(router, Rank("w"), settings=settings_of())


def settings_of(*, check_after_s=60.0, pause_s=0.5):
    """By default nothing is asked for in the silence."""
    return ReplaySettings(answer_timeout_s=0.3, check_after_s=check_after_s, pause_s=pause_s)


@pytest.fixture
def events():
    events = EventThread()
    events.start()
    yield events
    events.stop()


def names(router):
    with router._lock:  # an event may come meanwhile
        return sorted(int(n) for n in router.index.engine_hashes_of(Rank("w")))


async def test_a_late_join_and_a_gap_are_filled(router, follower, events, publisher, server):
    server.history = [message(n, stored(10 * n + 1)) for n in range(3)]
    events.follow(follower, publisher.endpoint, replay=server.endpoint)
    publisher.wait_for_a_subscriber()
    await until(lambda: follower.trust is UNCONFIRMED, "the late join is as the replay has it")
    assert names(router) == [1000, 11_000, 21_000]
    server.history += [message(n, stored(10 * n + 1)) for n in range(3, 6)]
    publisher.send(server.history[5])
    await until(lambda: len(names(router)) == 6, "the gap is filled")
    await until(lambda: follower.trust.level is Trust.EXACT, "it is exact again")
    assert follower.sequencer.num_missed == 2
    assert follower.sequencer.last_repair_s < 10


async def test_a_loss_at_the_end_is_found_in_the_silence(router, events, publisher, server):
    follower = Follower(router, Rank("w"), settings=settings_of(check_after_s=0.2))
    events.follow(follower, publisher.endpoint, replay=server.endpoint)
    publisher.wait_for_a_subscriber()
    server.history = [message(0, stored(1)), message(1, stored(11))]
    publisher.send(server.history[0])  # and the other one is lost
    await until(lambda: names(router) == [1000, 11_000], "the silence is noticed")


async def test_another_life_behind_a_connection_that_stays(
    router, follower, events, publisher, server
):
    server.history = [message(n, stored(10 * n + 1)) for n in range(2)]
    events.follow(follower, publisher.endpoint, replay=server.endpoint)
    publisher.wait_for_a_subscriber()
    await until(lambda: len(names(router)) == 2, "the first life is known")
    server.history = [message(n, stored(500 + 10 * n)) for n in range(4)]
    publisher.send(server.history[3])
    await until(lambda: names(router) == [500_000, 510_000, 520_000, 530_000], "the other one is")
    await until(lambda: follower.trust.level is Trust.EXACT, "it is exact")
    assert follower.sequencer.num_restarts == 1


async def test_what_the_buffer_no_longer_has_is_named(router, follower, events, publisher, server):
    server.history = [message(n, stored(10 * n + 1)) for n in range(5, 8)]
    events.follow(follower, publisher.endpoint, replay=server.endpoint)
    publisher.wait_for_a_subscriber()
    await until(lambda: len(names(router)) == 3, "what there is is known")
    reason = "5 event messages are gone from the engine's replay buffer"
    await until(lambda: follower.trust.reason == reason, "the loss is named")
    assert follower.trust.level is Trust.STALE
    assert "buffer_steps" in follower.trust.fix


async def test_a_gap_that_begins_where_the_buffer_begins_is_filled(
    router, follower, events, publisher, server
):
    server.history = [message(0, stored(1))]
    events.follow(follower, publisher.endpoint, replay=server.endpoint)
    publisher.wait_for_a_subscriber()
    await until(lambda: names(router) == [1000], "the first message is applied")
    server.history = [message(n, stored(10 * n + 1)) for n in (1, 2)]
    publisher.send(server.history[1])
    await until(lambda: names(router) == [1000, 11_000, 21_000], "the gap is filled")
    await until(lambda: follower.trust.level is Trust.EXACT, "it is exact again")


async def test_a_silent_endpoint_is_named_and_asked_again(router, events, publisher, server):
    follower = Follower(router, Rank("w"), settings=settings_of(pause_s=2.0))
    server.is_silent = True
    server.history = [message(n, stored(10 * n + 1)) for n in range(2)]
    events.follow(follower, publisher.endpoint, replay=server.endpoint)
    publisher.wait_for_a_subscriber()
    await until(lambda: "does not answer" in (follower.trust.reason or ""), "it is named")
    assert follower.sequencer.num_failures == 3
    server.is_silent = False
    await until(lambda: names(router) == [1000, 11_000], "it is asked again")
    server.history.append(message(2, stored(21)))
    publisher.send(server.history[2])
    await until(lambda: follower.trust.level is Trust.EXACT, "a live message confirms it")


async def test_events_arrive_though_nobody_replays(router, follower, events, publisher):
    events.follow(follower, publisher.endpoint, replay="tcp://127.0.0.1:9")
    publisher.wait_for_a_subscriber()
    publisher.send(message(0, stored(1)))
    await until(lambda: names(router) == [1000], "the live message is applied in the end")
    await until(lambda: follower.trust.level is Trust.STALE, "what is missing is named")


def test_a_replay_endpoint_that_is_none_is_rejected(follower, events, publisher):
    with pytest.raises(TransportError, match="nonsense"):
        events.follow(follower, publisher.endpoint, replay="nonsense")


def test_a_replay_endpoint_of_another_transport_is_rejected(follower):
    events = EventThread({"tcp": ZmqTransport, "ipc": ZmqTransport, "memory": MemoryTransport})
    events.start()
    with pytest.raises(TransportError, match="expected endpoints of one transport"):
        events.follow(follower, "memory://engine", replay="tcp://127.0.0.1:9")
    events.follow(follower, "tcp://127.0.0.1:8", replay="ipc:///run/replay")
    events.stop()


@pytest.fixture
def two_engines():
    """(publisher, replay server) of each."""
    engines = [(Publisher(), ReplayServer()) for _ in range(2)]
    yield engines
    for publisher, server in engines:
        server.close()
        publisher.destroy()


async def test_replay_endpoints_that_are_swapped_are_found_out(events, two_engines):
    router = Router(RouterConfig(block_size=4))
    followers, histories = [], []
    for i, (_, server) in enumerate(two_engines):
        router.add_worker(f"w{i}")
        followers.append(Follower(router, Rank(f"w{i}"), settings=settings_of(pause_s=60.0)))
        histories.append([message(n, stored(1000 * i + 10 * n + 1)) for n in range(5)])
        server.history = list(histories[i])

    def has_only_its_own(i):
        with router._lock:
            known = {int(n) // 1_000_000 for n in router.index.engine_hashes_of(Rank(f"w{i}"))}
        return known == {i}

    for i, (publisher, _) in enumerate(two_engines):
        swapped = two_engines[1 - i][1].endpoint
        events.follow(followers[i], publisher.endpoint, replay=swapped)
        publisher.wait_for_a_subscriber()
    await until(lambda: all(f.trust is UNCONFIRMED for f in followers), "both have replayed")
    for n in range(5, 12):
        for i, (publisher, server) in enumerate(two_engines):
            server.history.append(message(n, stored(1000 * i + 10 * n + 1)))
            publisher.send(server.history[n])
            assert followers[i].trust.level is not Trust.EXACT
    await until(lambda: all(f.trust is REPLAY_CONTRADICTS for f in followers), "both are found out")
    for i, (publisher, _) in enumerate(two_engines):
        publisher.send(message(12, stored(1000 * i + 121)))
    await until(lambda: has_only_its_own(0) and has_only_its_own(1), "nobody has other blocks")
