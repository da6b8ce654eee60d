"""A follower that goes on where another one was; a stream that keeps what is published."""

import msgspec
import pytest

from kvplug import protocol
from kvplug.ingest import trust
from kvplug.ingest.follower import Follower
from kvplug.ingest.position import FollowerPosition
from kvplug.transports.base import Message
from tests.ingest.life_publisher import (
    RANK,
    Clock,
    LifePublisher,
    TellableRouter,
    answer,
    join,
    names,
    wait,
)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def publisher():
    return LifePublisher()


def kept(*messages):
    """As a stream hands them over that keeps what it has."""
    return [Message(m.topic, m.sequence, m.payload, is_live=False) for m in messages]


def newcomer(clock):
    router = TellableRouter()
    router.add_worker("w")
    follower = Follower(router, RANK, clock=clock)
    follower.can_replay = True
    follower.on_resumed()
    return follower, router


def resumed(former, clock, *applied):
    """Another follower, whose index got `applied`, goes on where the former one is."""
    position = msgspec.msgpack.decode(
        msgspec.msgpack.encode(former.position()), type=FollowerPosition
    )
    follower, router = newcomer(clock)
    for message in applied:
        router.apply_packed(RANK, protocol.decode(message.payload).packed, ts=0.0)
    follower.resume(position)
    return follower, router


def test_a_kept_life_that_begins_is_known_and_exact_with_its_first_beat(publisher, clock):
    follower, router = newcomer(clock)
    follower.receive(kept(publisher.hello(), publisher.store(3), publisher.remove_last()))
    assert (names(router), follower.trust) == ([1, 2], trust.NO_HEARTBEAT)
    assert follower.replay_request is None
    follower.receive([publisher.hello()])
    assert (names(router), follower.trust) == ([1, 2], trust.EXACT)


def test_a_truncated_stream_is_asked_for(publisher, clock):
    publisher.store(3)
    follower, router = newcomer(clock)
    follower.receive(kept(publisher.store(1)))
    answer(follower, publisher)
    follower.receive([publisher.hello()])
    assert (names(router), follower.trust) == ([1, 2, 3, 4], trust.EXACT)


def test_what_the_publisher_sends_again_fills_a_hole(publisher, clock):
    follower, router = newcomer(clock)
    follower.receive([publisher.hello()])
    first, second, third = publisher.store(1), publisher.store(2), publisher.remove_last()
    follower.receive(kept(second, third))
    assert follower.trust is trust.CATCHING_UP
    follower.receive(kept(first, second, third))
    assert (names(router), follower.trust) == ([1, 2], trust.EXACT)
    assert follower.replay_request is None
    assert follower.sequencer.num_recovered == 0


def test_a_stream_that_is_read_again_from_the_first_changes_nothing(publisher, clock):
    follower, router = newcomer(clock)
    old = [publisher.hello(), publisher.store(1)]
    publisher.restart()
    old += [publisher.hello(), publisher.store(1), publisher.store(1)]
    follower.receive(kept(*old))
    follower.receive([publisher.hello()])
    wait(follower, clock, 5)
    follower.receive(kept(*old))
    assert names(router) == [2, 3]
    assert follower.trust is trust.NO_HEARTBEAT, "what is kept is no sign of life"
    follower.receive([publisher.hello()])
    assert follower.trust is trust.EXACT
    assert follower.skipped == {"past_life": 2, "duplicate": 2}


def test_a_beat_brings_back_the_life_that_an_old_message_ended(publisher, clock):
    other = LifePublisher(first_name=100)
    other_said = kept(other.hello(), other.store(1))
    follower, router = newcomer(clock)
    follower.receive(kept(publisher.hello(), publisher.store(1)))
    follower.receive([publisher.hello()])
    follower.receive(other_said)  # of before, as the server lost its end
    assert (names(router), follower.trust) == ([100], trust.NO_HEARTBEAT)
    follower.receive([publisher.hello()])
    clock.now_s += 1
    follower.tick()
    answer(follower, publisher)
    assert (names(router), follower.trust) == ([1], trust.EXACT)


def test_an_interruption_forgets_nothing_and_asks_nothing(publisher, clock):
    follower, router = newcomer(clock)
    follower.receive([publisher.hello(), publisher.store(2)])
    num_replays = follower.sequencer.num_replays
    follower.on_interrupted()
    assert follower.trust is trust.INTERRUPTED
    wait(follower, clock, 100)
    meanwhile = publisher.store(1)
    follower.on_resumed()
    assert follower.trust is trust.NO_HEARTBEAT
    follower.receive(kept(meanwhile))
    follower.receive([publisher.hello()])
    assert (names(router), follower.trust) == ([1, 2, 3], trust.EXACT)
    assert follower.sequencer.num_replays == num_replays


def test_a_source_that_failed_and_was_opened_again_is_followed_as_before(publisher, clock):
    follower, router = newcomer(clock)
    follower.receive(kept(publisher.hello(), publisher.store(2)))
    follower.receive([publisher.hello()])
    follower.on_disconnected()
    follower.on_resumed()
    assert follower.trust is trust.NO_HEARTBEAT, "what was on its way may be lost"
    follower.receive([publisher.hello()])
    assert follower.trust is trust.EXACT
    wait(follower, clock, 60, publisher)
    assert (names(router), follower.trust) == ([1, 2], trust.EXACT)


def test_asks_that_failed_before_an_interruption_are_made_at_once_after_it(publisher, clock):
    follower, router = newcomer(clock)
    follower.receive([publisher.hello(), publisher.store(1)])
    publisher.store(1)
    follower.receive([publisher.hello()])
    wait(follower, clock, 20, publisher)
    assert follower.trust is trust.ASKS_SILENT
    follower.on_interrupted()
    follower.on_resumed()
    follower.tick()
    answer(follower, publisher)
    follower.receive([publisher.hello()])
    assert (names(router), follower.trust) == ([1, 2], trust.EXACT)


def test_one_that_resumes_needs_no_answer(publisher, clock):
    former, _ = newcomer(clock)
    hello, *said = publisher.hello(), publisher.store(3), publisher.remove_last()
    former.receive([hello, *said])
    follower, router = resumed(former, clock, *said)
    assert (follower.trust, router.told["blocks"]) == (trust.NO_HEARTBEAT, (4, False))
    follower.receive(kept(*said))
    follower.receive([publisher.store(1), publisher.hello()])
    assert (names(router), follower.trust) == ([1, 2, 4], trust.EXACT)
    assert follower.sequencer.num_replays == 0


def test_one_that_resumes_in_a_hole_asks(publisher, clock):
    former, _ = newcomer(clock)
    said = publisher.store(3)
    former.receive([publisher.hello(), said])
    publisher.remove_last()
    former.receive(kept(publisher.store(1)))  # waits, and is not in the snapshot
    assert former.position().known_next == 3
    follower, router = resumed(former, clock, said)
    follower.tick()
    answer(follower, publisher)
    follower.receive([publisher.hello()])
    assert (names(router), follower.trust) == ([1, 2, 4], trust.EXACT)


def test_one_that_resumes_in_a_former_life_begins_the_present_one(publisher, clock):
    former, _ = newcomer(clock)
    said = publisher.store(3)
    former.receive([publisher.hello(), said])
    follower, router = resumed(former, clock, said)
    publisher.restart()
    follower.receive(kept(publisher.hello(), publisher.store(1)))
    follower.receive([publisher.hello()])
    assert (names(router), follower.trust) == ([4], trust.EXACT)
    follower.receive(kept(said))
    assert follower.skipped == {"past_life": 1}


def test_nothing_is_kept_of_a_stock_publisher_or_of_nobody(clock):
    follower, _ = newcomer(clock)
    assert follower.position() is None


def test_nothing_is_kept_of_a_worker_that_has_lost_its_blocks_by_joining_again(publisher, clock):
    follower, router = newcomer(clock)
    follower.receive(kept(publisher.hello(), publisher.store(1)))
    assert follower.position() is not None
    router.remove_worker("w")
    assert follower.position() is None
    router.add_worker("w")
    assert follower.position() is None
    follower.tick()
    join(follower, publisher)
    assert follower.position() is not None
    assert names(router) == [1]


def test_what_cannot_be_asked_for_is_named(publisher, clock):
    follower, router = newcomer(clock)
    follower.can_replay = False
    publisher.about["answers_at"] = None
    publisher.store(1)
    follower.receive([publisher.hello()])
    assert (names(router), follower.trust) == ([], trust.NO_ASKS)
    join(follower, restarted(publisher))


def restarted(publisher):
    publisher.restart()
    return publisher
