"""What a follower does with a stream of ours: lives, gaps, asks, answers, heartbeats."""

import pytest

from kvplug import protocol
from kvplug.ingest import trust
from kvplug.ingest.follower import Follower
from kvplug.ingest.replay import ReplaySettings
from kvplug.transports.base import Message
from tests.ingest.life_publisher import (
    RANK,
    LifePublisher,
    answer,
    join,
    names,
    wait,
)
from tests.ingest.publisher import message, stored


def test_a_newcomer_asks_for_everything(follower, router, publisher):
    publisher.store(5)
    follower.receive([publisher.hello()])
    assert protocol.decode(follower.replay_request.payload) == protocol.Ask(0, 0)
    assert follower.replay_request.endpoint == "tcp://*:5558"
    assert follower.trust is trust.CATCHING_UP
    live = publisher.store(2)
    follower.receive([live])
    assert names(router) == []
    answer(follower, publisher)
    assert (names(router), follower.trust) == ([1, 2, 3, 4, 5, 6, 7], trust.EXACT)
    assert follower.sequencer.num_duplicates == 0


def test_an_empty_engine_is_exact(follower, publisher):
    join(follower, publisher)
    assert follower.num_stored == 0


def test_live_events_wait_for_the_end_of_an_answer(follower, router, publisher):
    publisher.store(5)
    follower.receive([publisher.hello()])
    said = publisher.answer(follower.replay_request.payload)
    follower.replayed(said[:2])
    follower.receive([publisher.store(1), publisher.remove_last(1), publisher.store(1)])
    follower.replayed(said[2:])
    assert (names(router), follower.trust) == ([1, 2, 3, 4, 5, 7], trust.EXACT)
    assert follower.replay_request is None


def test_events_in_order_are_applied_at_once(follower, router, publisher):
    join(follower, publisher)
    follower.receive([publisher.store(3), publisher.remove_last(), publisher.hello()])
    assert (names(router), follower.trust) == ([1, 2], trust.EXACT)
    assert (follower.num_stored, follower.num_removed) == (3, 1)
    assert follower.sequencer.last == 1


def test_a_gap_is_filled_from_the_history(follower, router, publisher, clock):
    join(follower, publisher)
    clock.now_s += 1
    follower.receive([publisher.store(1)])
    publisher.store(1)
    publisher.remove_last(2)
    follower.receive([publisher.store(1)])
    assert follower.trust is trust.CATCHING_UP
    ask = protocol.decode(follower.replay_request.payload)
    assert ask == protocol.Ask(publisher.life, 1)
    answer(follower, publisher)
    assert (names(router), follower.trust) == ([3], trust.EXACT)
    assert follower.sequencer.num_missed == 2
    assert follower.sequencer.num_recovered == 3


def test_a_gap_beyond_the_history_is_filled_with_the_resident_set(follower, router, clock):
    publisher = LifePublisher(max_history=2)
    join(follower, publisher)
    follower.receive([publisher.store(4)])
    for _ in range(3):
        publisher.remove_last()
    clock.now_s += 1
    follower.receive([publisher.store(1)])
    answer(follower, publisher)
    assert (names(router), follower.trust) == ([1, 5], trust.EXACT)


def test_a_lost_tail_shows_with_the_next_hello(follower, router, publisher, clock):
    join(follower, publisher)
    publisher.store(2)
    clock.now_s += 1
    follower.receive([publisher.hello()])
    answer(follower, publisher)
    assert (names(router), follower.trust) == ([1, 2], trust.EXACT)


def test_another_life_forgets_the_rank_and_asks(follower, router, publisher, clock):
    join(follower, publisher)
    former = publisher.store(3)
    follower.receive([former])
    clock.now_s += 1
    publisher.restart()
    follower.receive([publisher.store(1)])  # its hello was lost
    assert (names(router), follower.trust) == ([], trust.CATCHING_UP)
    assert follower.replay_request is None, "nobody has said yet who answers"
    follower.receive([publisher.hello()])
    assert follower.replay_request is None, "a life begins with nothing"
    assert (names(router), follower.trust) == ([4], trust.EXACT)
    follower.receive([former])
    assert follower.skipped == {"past_life": 1}
    assert (names(router), follower.sequencer.num_restarts) == ([4], 1)


def test_a_life_that_was_left_comes_back_if_the_present_one_is_silent(follower, publisher, clock):
    join(follower, publisher)
    wait(follower, clock, 1)
    forged = LifePublisher()
    follower.receive([forged.hello()])
    wait(follower, clock, 4)
    follower.receive([publisher.hello()])
    assert follower.sequencer.life == forged.life
    wait(follower, clock, 1)
    follower.receive([publisher.hello()])
    assert follower.sequencer.life == publisher.life


def test_after_a_lost_connection_a_hello_tells_that_nothing_is_missing(follower, router, publisher):
    join(follower, publisher)
    follower.receive([publisher.store(2)])
    follower.on_disconnected()
    assert (follower.trust, names(router)) == (trust.INTERRUPTED, [1, 2])
    follower.on_connected()
    assert follower.trust is trust.CATCHING_UP
    follower.receive([publisher.hello()])
    assert (follower.trust, follower.replay_request) == (trust.EXACT, None)


def test_after_a_lost_connection_what_was_missed_is_asked_for(follower, router, publisher, clock):
    join(follower, publisher)
    follower.receive([publisher.store(2)])
    follower.on_disconnected()
    publisher.remove_last()
    clock.now_s += 1
    follower.on_connected()
    answer(follower, publisher)
    assert (follower.trust, names(router)) == (trust.EXACT, [1])


def test_a_lost_stream_is_forgotten_after_a_while(follower, router, publisher, clock):
    join(follower, publisher)
    follower.receive([publisher.store(2)])
    follower.on_disconnected()
    wait(follower, clock, 11)
    assert (follower.trust, names(router)) == (trust.DISCONNECTED, [])
    follower.on_connected()
    join(follower, publisher)
    assert names(router) == [1, 2]


def test_silence_on_a_connection_that_stands_is_named(follower, router, publisher, clock):
    join(follower, publisher)
    follower.receive([publisher.store(2)])
    wait(follower, clock, 4)
    assert follower.trust is trust.EXACT
    wait(follower, clock, 1)
    assert (follower.trust, names(router)) == (trust.NO_HEARTBEAT, [1, 2])
    follower.receive([publisher.hello()])
    assert follower.trust is trust.EXACT


def test_a_resident_set_that_is_broken_off_is_asked_for_again(follower, router, publisher, clock):
    publisher.store(9)
    follower.receive([publisher.hello()])
    follower.replayed(publisher.answer(follower.replay_request.payload)[:3])
    follower.replay_ended()
    assert follower.skipped == {"incomplete_answer": 1}
    wait(follower, clock, 1, publisher)
    answer(follower, publisher)
    assert (follower.trust, len(names(router))) == (trust.EXACT, 9)
    assert (follower.sequencer.num_replays, follower.sequencer.num_failures) == (2, 1)


def test_without_an_answer_what_was_known_is_forgotten(follower, router, publisher, clock):
    join(follower, publisher)
    follower.receive([publisher.store(3)])
    publisher.store(1)
    follower.receive([publisher.store(1)])
    wait(follower, clock, 19, publisher)
    assert (follower.trust, names(router)) == (trust.ASKS_SILENT, [5])
    follower.receive([publisher.store(2)])
    assert names(router) == [5, 6, 7]
    publisher.store(1)
    follower.receive([publisher.store(1)])  # another gap, while nobody is asked
    assert (follower.trust, names(router)) == (trust.ASKS_SILENT, [9])
    wait(follower, clock, 31, publisher)
    follower.receive([publisher.remove_last()])  # live events go on while it is asked again
    assert (follower.trust, names(router)) == (trust.ASKS_SILENT, [])
    answer(follower, publisher)
    assert (follower.trust, names(router)) == (trust.EXACT, list(range(1, 9)))


def test_a_publisher_that_cannot_be_asked_is_followed_from_now_on(follower, router, clock):
    publisher = LifePublisher(answers_at=None)
    publisher.store(3)
    follower.receive([publisher.hello(), publisher.store(1)])
    assert (follower.trust, names(router)) == (trust.NO_ASKS, [4])
    follower.on_disconnected()
    follower.on_connected()
    follower.receive([publisher.hello()])
    follower.receive([publisher.clear(), publisher.store(1)])
    assert (follower.trust, names(router)) == (trust.EXACT, [5])
    follower.on_disconnected()
    follower.on_connected()
    assert names(router) == [5], "a hello will tell whether something is missing"
    follower.receive([publisher.hello()])
    assert (follower.trust, names(router)) == (trust.EXACT, [5])


def test_live_events_during_a_check_are_in_no_answer_that_is_older(
    follower, router, publisher, clock
):
    join(follower, publisher)
    follower.receive([publisher.store(3)])
    clock.now_s += 1
    follower.sequencer.start_over()
    said = publisher.answer(follower.replay_request.payload)
    follower.receive([publisher.remove_last(2), publisher.store(1)])
    assert names(router) == [1, 4], "a check keeps nobody waiting"
    follower.replayed(said)
    assert (follower.trust, names(router)) == (trust.EXACT, [1, 4])
    assert follower.num_stored == 3 + 1 + 3 + 1


def test_a_configured_endpoint_is_asked_first_and_the_named_one_next(follower, publisher, clock):
    follower.can_replay = True
    publisher.store(1)
    follower.receive([publisher.hello()])
    assert follower.replay_request.endpoint is None
    follower.replay_failed("no answer")
    wait(follower, clock, 1)
    assert follower.replay_request.endpoint == "tcp://*:5558"


def test_what_waits_is_bounded(router, publisher, clock):
    settings = ReplaySettings(max_pending_bytes=1000)
    follower = Follower(router, RANK, clock=clock, settings=settings)
    follower.can_ask_publisher = True
    follower.on_connected()
    publisher.store(1)
    follower.receive([publisher.hello()])
    said = publisher.answer(follower.replay_request.payload)
    follower.receive([publisher.store(1) for _ in range(20)])
    assert len(follower.sequencer._pending) < 6
    clock.now_s += 1
    follower.replayed(said)
    assert follower.trust is trust.EXACT, "as far as anybody has said"
    follower.receive([publisher.hello()])
    answer(follower, publisher)
    assert (follower.trust, len(names(router))) == (trust.EXACT, 21)


def test_what_the_hello_says_is_told_to_the_router(router, follower):
    publisher = LifePublisher(capacity_blocks=77, cxl_pools=(1, 2), bigrams=True)
    join(follower, publisher)
    assert router.told == {
        "blocks": (4, True),
        "pools": ("w", (1, 2)),
        "capacity": (RANK, 77),
    }
    assert follower.about.capacity_blocks == 77


def test_defects_of_the_publisher_are_named_until_it_has_none(follower, publisher):
    join(follower, publisher)
    publisher.about["defects"] = {"queue_full": 3}
    follower.receive([publisher.hello()])
    assert follower.trust == trust.unusable("queue_full")
    publisher.about["defects"] = {"bad\n" * 100: 3}
    follower.receive([publisher.hello()])
    assert follower.trust == trust.unusable("bad" * 10)
    publisher.about["defects"] = {}
    follower.receive([publisher.hello()])
    assert follower.trust is trust.EXACT


def test_hidden_states_are_named(follower, publisher):
    publisher.about["hides_states"] = True
    follower.receive([publisher.hello()])
    assert follower.trust is trust.HIDDEN_STATES


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"hash_scheme": "sha256"}, "hash_scheme"),
        ({"dp_rank": 3}, "other_rank"),
        ({"block_size": 32}, "block_size"),
    ],
)
def test_a_stream_that_is_of_no_use_is_refused_by_name(router, clock, about, reason):
    follower = Follower(router, RANK, engine_rank=0, clock=clock)
    follower.can_ask_publisher = True
    follower.on_connected()
    publisher = LifePublisher(**about)
    for _ in range(3):
        follower.receive([publisher.hello(), publisher.store(2)])
    assert follower.trust == trust.unusable(reason)
    assert follower.skipped == {reason: 4}, "one hello, and the events"
    assert (names(router), follower.replay_request) == ([], None)
    publisher.about = {"block_size": 4, "answers_at": "tcp://*:5558"}
    clock.now_s += 1
    join(follower, publisher)
    assert len(names(router)) == 6


def test_a_newer_protocol_is_named(follower, publisher):
    newer = b"\x94\xa6kvplug\x63\x00\xa5hello"
    follower.receive([Message(b"", 0, newer)])
    assert follower.trust.reason == "events could not be used: unsupported_version"
    assert "same release" in follower.trust.fix
    assert follower.skipped == {"unsupported_version": 1}
    join(follower, publisher)


def test_events_that_cannot_be_read_are_asked_for_once(follower, router, publisher, clock):
    join(follower, publisher)
    clock.now_s += 1
    follower.receive([publisher.store(2), publisher.publish(b"nonsense")])
    assert follower.trust == trust.unusable("undecodable")
    answer(follower, publisher)
    assert (follower.trust, names(router)) == (trust.EXACT, [1, 2])


def test_an_engine_that_changes_its_wire_is_followed(follower, router, publisher, clock):
    follower.receive([message(0, stored(1, 3))])
    assert len(names(router)) == 3
    join(follower, publisher)
    follower.receive([publisher.store(1)])
    assert names(router) == [1]
    follower.receive([Message(b"", 1, b"noise"), message(0, stored(9))])
    assert (names(router), follower.trust) == ([9000], trust.EXACT)
    assert follower.skipped == {"undecodable": 1}
    assert follower.about is None


def test_a_reported_life_keeps_its_confidence(follower, router, publisher, monkeypatch):
    told = []
    monkeypatch.setattr(router, "set_confidence", lambda rank, share: told.append(share))
    join(follower, publisher)
    follower.on_disconnected()
    assert told[-2:] == [1.0, router.config.stale_confidence]
