import pytest

from kvplug import Rank, Router, RouterConfig
from kvplug.errors import ConfigError
from kvplug.ingest.dispatch import TopicDispatcher
from kvplug.ingest.follower import Follower
from kvplug.topics import Topic
from kvplug.transports.base import Message
from kvplug.transports.zmq import message_of
from tests.ingest.publisher import message, stored


@pytest.fixture
def router():
    router = Router(RouterConfig(block_size=4))
    for worker in ("w0", "w1"):
        router.add_worker(worker)
    return router


@pytest.fixture
def followers(router):
    return [Follower(router, Rank(f"w{i}")) for i in range(2)]


@pytest.fixture
def dispatcher(followers):
    dispatcher = TopicDispatcher()
    for i, follower in enumerate(followers):
        dispatcher.add(follower, Topic(f"pod-{i}", "m"))
        dispatcher.on_connected()
    return dispatcher


def said_by(pod, number, *events, model="m"):
    return [message(number, *events, topic=f"kv@{pod}@{model}".encode())]


def names_of(router, worker):
    return router.index.engine_hashes_of(Rank(worker)).tolist()


def test_each_follower_gets_what_its_worker_says(router, followers, dispatcher):
    assert not followers[0].connected
    dispatcher.receive(said_by("pod-0", 0, stored(1)))
    dispatcher.receive(said_by("pod-1", 0, stored(11)))
    dispatcher.receive(said_by("pod-0", 1, stored(21)))
    assert sorted(names_of(router, "w0")) == [1000, 21_000]
    assert names_of(router, "w1") == [11_000]
    assert followers[0].connected
    assert [follower.trust.reason for follower in followers] == [None, None]


@pytest.mark.parametrize(
    "topic", [b"kv@pod-2@m", b"kv@pod-0@m-2", b"kv@pod-0", b"", b"other", b"kv@\xff", b"kv@pod-1"]
)
def test_unknown_topics_are_counted_and_named_once(router, dispatcher, caplog, topic):
    for number in range(3):
        dispatcher.receive([message(number, stored(1), topic=topic)])
    assert len(router.index) == 0
    assert sum(dispatcher.unknown.values()) == 3
    [record] = caplog.records
    assert "are ignored; known: 'kv@pod-0@m', 'kv@pod-1@m'" in record.getMessage()


def test_no_number_of_topics_fills_the_memory(dispatcher, followers, caplog):
    dispatcher.remove(followers[0])
    dispatcher.add(followers[0], Topic("pod-0"))
    for i in range(300):
        dispatcher.receive([Message(f"kv@made-up-{i}@{'x' * 500}".encode(), 0, b"")])
    assert (len(dispatcher.unknown), dispatcher.unknown["..."]) == (101, 200)
    assert max(map(len, dispatcher.unknown)) <= 80
    assert len(caplog.records) == 101


def test_a_pod_without_a_model_takes_all_its_models(router, dispatcher, followers):
    dispatcher.remove(followers[0])
    dispatcher.add(followers[0], Topic("pod-0"))
    dispatcher.receive(said_by("pod-0", 0, stored(1), model="a"))
    dispatcher.receive(said_by("pod-0", 1, stored(11), model="b"))
    assert len(names_of(router, "w0")) == 2


@pytest.mark.parametrize("topic", [Topic("pod-0", "m"), Topic("pod-0")])
def test_a_topic_belongs_to_one_worker(dispatcher, followers, topic):
    with pytest.raises(ConfigError, match=r"w0 has 'kv@pod-0@m' already; expected a topic of its"):
        dispatcher.add(followers[1], topic)


def test_a_removed_follower_hears_nothing(router, dispatcher, followers):
    dispatcher.receive(said_by("pod-0", 0, stored(1)))
    dispatcher.remove(followers[0])
    dispatcher.receive(said_by("pod-0", 1, stored(11)))
    assert names_of(router, "w0") == [1000]
    assert dispatcher.unknown == {"kv@pod-0@m": 1}
    assert dispatcher.followers == [followers[1]]


def test_when_a_peer_is_lost_the_workers_that_go_on_keep_their_blocks(router, dispatcher):
    dispatcher.receive(said_by("pod-0", 0, stored(1)))
    dispatcher.on_disconnected()
    assert names_of(router, "w0") == [1000]
    dispatcher.receive(said_by("pod-0", 1, stored(11)))
    assert len(names_of(router, "w0")) == 2


def test_after_a_peer_was_lost_a_break_in_the_numbers_is_another_life(
    router, dispatcher, followers
):
    dispatcher.receive(said_by("pod-0", 0, stored(1)))
    dispatcher.on_disconnected()
    dispatcher.receive(said_by("pod-0", 1, stored(11)))  # was still queued
    dispatcher.on_connected()
    dispatcher.receive(said_by("pod-0", 7, stored(21)))
    assert names_of(router, "w0") == [21_000]
    assert followers[0].trust.reason == "the router joined after the engine's first events"
    dispatcher.receive(said_by("pod-0", 9, stored(31)))
    assert followers[0].trust.reason == "1 event messages were lost", "by now it is a mere gap"


def test_without_a_lost_peer_a_break_is_a_gap(router, dispatcher, followers):
    dispatcher.receive(said_by("pod-0", 0, stored(1)))
    dispatcher.receive(said_by("pod-0", 7, stored(21)))
    assert names_of(router, "w0") == [21_000]
    assert followers[0].trust.reason == "6 event messages were lost"


def test_garbage_is_no_break(router, dispatcher, followers):
    dispatcher.receive(said_by("pod-0", 0, stored(1)))
    dispatcher.on_disconnected()
    dispatcher.receive([message_of([b"kv@pod-0@m", b"x", b""]), message_of([])])
    assert names_of(router, "w0") == [1000]
    assert followers[0].skipped == {"undecodable": 1}


def test_with_the_last_peer_all_blocks_go(router, dispatcher, followers):
    dispatcher.receive(said_by("pod-0", 0, stored(1)))
    dispatcher.on_disconnected()
    dispatcher.on_disconnected()
    assert len(router.index) == 0
    assert not followers[0].connected


def test_a_failure_of_ours_starts_the_worker_over(router, dispatcher, followers, caplog):
    dispatcher.receive(said_by("pod-0", 0, stored(1)))
    dispatcher.receive(said_by("pod-1", 0, stored(11)))
    followers[0].receive = None
    dispatcher.receive(said_by("pod-0", 1, stored(1)))
    assert "w0: following its events failed, starting over" in caplog.text
    assert (names_of(router, "w0"), names_of(router, "w1")) == ([], [11_000])
