"""Single cases of sequencing; tests/ingest/test_sequencer_machine.py mixes them."""

from collections import Counter

import pytest

from kvplug.ingest import trust
from kvplug.ingest.message_log import Effect
from kvplug.ingest.replay import ReplaySettings
from kvplug.ingest.sequencer import Sequencer
from kvplug.ingest.trust import Trust
from kvplug.transports.base import Message
from tests.ingest.test_sequencer_machine import ApplyResult


def payload(number, life=0):
    return b"%d.%d.store" % (life, number)


def live(*numbers, life=0):
    return [Message(b"", number, payload(number, life)) for number in numbers]


@pytest.fixture
def sink():
    return ApplyResult()


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def sequencer(sink, clock):
    """An exact stream that has come to message 9."""
    sequencer = Sequencer("w", sink, clock=clock, settings=ReplaySettings())
    sequencer.can_replay = True
    sequencer.connected()
    sequencer.replay_ended()
    sequencer.receive(live(*range(10)))
    assert sequencer.state.level is Trust.EXACT
    return sequencer


def test_a_gap_is_repaired_though_the_buffer_begins_right_behind_the_last_message(sequencer, sink):
    sequencer.receive(live(13))
    assert sequencer.request.first == 9
    sequencer.replayed(live(10, 11, 12, 13))
    sequencer.replay_ended()
    assert (sequencer.state.level, len(sink.payloads)) == (Trust.EXACT, 14)


def test_behind_a_broken_connection_that_is_no_proof(sequencer, sink):
    sequencer.disconnected()
    sequencer.connected()
    sequencer.replayed(live(10, 11, life=1))
    sequencer.replay_ended()
    assert sequencer.state.level is Trust.STALE
    assert "the same engine" in sequencer.state.reason
    assert sink.payloads == [payload(10, 1), payload(11, 1)]


def test_nor_is_it_when_a_number_went_down_meanwhile(sequencer, sink):
    sequencer.receive(live(13))
    sequencer.receive(live(0, life=1))
    sequencer.replayed(live(10, 11, life=1))
    sequencer.replay_ended()
    assert sequencer.state.level is Trust.STALE
    assert all(each.startswith(b"1.") for each in sink.payloads)


def test_live_messages_go_on_during_a_check(sequencer, sink, clock):
    clock.now_s = 100.0
    sequencer.tick()
    assert sequencer.request.is_check
    assert sequencer.state.level is Trust.EXACT
    sequencer.receive(live(10))
    assert (sequencer.state.level, len(sink.payloads)) == (Trust.EXACT, 11)
    sequencer.replayed(live(9, 10, 11))
    sequencer.replay_ended()
    assert (sequencer.request, sequencer.state.level) == (None, Trust.EXACT)
    assert len(sink.payloads) == 12, "what the stream lost is in the answer"


def test_pending_messages_beyond_the_limit_are_asked_for_again(sequencer, sink):
    sequencer._pending._max_bytes = 5
    sequencer.receive(live(12, 13, 14))
    sequencer.replayed(live(9, 10, 11, 12))
    sequencer.replay_ended()
    sequencer.receive(live(15))
    assert sequencer.request.first == 12
    sequencer.replayed(live(12, 13, 14, 15))
    sequencer.replay_ended()
    assert (sequencer.state.level, len(sink.payloads)) == (Trust.EXACT, 16)


def lose(sequencer, clock):
    """The stream breaks, and one more message was on its way."""
    sequencer.disconnected()
    sequencer.receive(live(13))
    assert sequencer.request.first == 9
    clock.now_s += 31.0
    sequencer.tick()


def test_a_lost_stream_takes_its_open_request_along(sequencer, sink, clock):
    lose(sequencer, clock)
    assert (sequencer.last, sequencer.request, sink.payloads) == (None, None, [])
    assert sequencer.state.level is Trust.BLIND
    sequencer.replayed(live(9, 10))
    sequencer.replay_ended()
    assert (sequencer.last, sink.payloads) == (None, [])


def test_behind_a_lost_stream_all_is_asked_for(sequencer, sink, clock):
    lose(sequencer, clock)
    sequencer.connected()
    assert sequencer.request.asks_everything
    answer(sequencer, live(*range(15)))
    assert (sequencer.state, len(sink.payloads)) == (trust.UNCONFIRMED, 15)
    sequencer.receive(live(15))
    answer(sequencer, live(*range(16)))
    assert (sequencer.state.level, len(sink.payloads)) == (Trust.EXACT, 16)


def pass_time(sequencer, clock, seconds):
    """In steps of half a second, without an answer."""
    for _ in range(int(2 * seconds)):
        clock.now_s += 0.5
        sequencer.tick()


def answer(sequencer, messages):
    """Answer the open request in full, with what it asks for."""
    first = sequencer.request.first
    sequencer.replayed([each for each in messages if each.sequence >= first])
    sequencer.replay_ended()


@pytest.fixture
def unanswered(sink, clock):
    """Message 0 came live, and the replay endpoint has not answered for 17 seconds."""
    sequencer = Sequencer("w", sink, clock=clock, settings=ReplaySettings())
    sequencer.can_replay = True
    sequencer.connected()
    sequencer.receive(live(0))
    pass_time(sequencer, clock, 17.0)
    assert sequencer.state is trust.REPLAY_SILENT
    assert sink.payloads == [payload(0)]
    return sequencer


def test_nothing_waits_for_an_endpoint_that_is_silent(unanswered, sink, clock):
    for number in range(1, 200):
        unanswered.receive(live(number))
        assert len(sink.payloads) == number + 1, "each message is applied at once"
        pass_time(unanswered, clock, 1.0)
    assert unanswered.num_failures > 4, "it is asked again now and then"
    assert unanswered.state is trust.REPLAY_SILENT


def test_a_gap_beside_a_silent_endpoint_clears_once(unanswered, sink, clock):
    unanswered.receive(live(5, 6))
    assert sink.payloads == [payload(5), payload(6)]
    pass_time(unanswered, clock, 100.0)
    assert sink.payloads == [payload(5), payload(6)]


def test_an_endpoint_that_answers_again_makes_it_exact(unanswered, sink, clock):
    unanswered.receive(live(5))
    while unanswered.request is None:
        pass_time(unanswered, clock, 1.0)
    answer(unanswered, live(*range(6)))
    assert unanswered.request.asks_everything, "it has what was missed"
    answer(unanswered, live(*range(6)))
    assert (unanswered.state.level, len(sink.payloads)) == (Trust.EXACT, 6)


@pytest.fixture
def joined(sink, clock):
    """Another engine's endpoint answered: three messages of life 7."""
    sequencer = Sequencer("w", sink, clock=clock, settings=ReplaySettings())
    sequencer.can_replay = True
    sequencer.connected()
    answer(sequencer, live(0, 1, 2, life=7))
    assert sequencer.state is trust.UNCONFIRMED
    return sequencer


OTHERS = live(*range(3), life=7)


@pytest.mark.parametrize("numbers", [(8, 9), (1, 2), (0, 1), (3, 4)])
def test_an_endpoint_of_another_engine_is_found_out(joined, sink, clock, numbers):
    for number in range(numbers[0], numbers[0] + 4):
        joined.receive(live(number))
        for _ in range(3):
            if joined.request is not None:
                assert joined.state.level is not Trust.EXACT
                answer(joined, OTHERS)
    assert joined.state is trust.REPLAY_CONTRADICTS
    assert sink.payloads, "the engine's own messages count"
    assert all(each.startswith(b"0.") for each in sink.payloads)
    assert joined.num_replays < 8
    before = joined.num_replays
    joined.receive(live(numbers[0] + 9))
    pass_time(joined, clock, 20.0)
    assert joined.num_replays == before, "it is not asked again for every message"


def test_an_endpoint_that_was_put_right_is_believed_again(joined, sink, clock):
    for number in (8, 9, 10):
        joined.receive(live(number))
        while joined.request is not None:
            answer(joined, OTHERS)
    assert joined.state is trust.REPLAY_CONTRADICTS
    own = live(*range(11))
    while joined.request is None:
        pass_time(joined, clock, 1.0)
    answer(joined, own)
    answer(joined, own)
    joined.receive(live(11))
    while joined.request is not None:
        answer(joined, [*own, *live(11)])
    assert joined.state.level is Trust.EXACT
    assert sink.payloads == [payload(number) for number in range(12)]


def test_a_replay_is_exact_once_a_live_message_is_in_an_answer(sink, clock):
    sequencer = Sequencer("w", sink, clock=clock, settings=ReplaySettings())
    sequencer.can_replay = True
    sequencer.connected()
    answer(sequencer, live(0, 1, 2))
    assert sequencer.state is trust.UNCONFIRMED
    sequencer.receive(live(3))
    assert sequencer.state is trust.UNCONFIRMED
    answer(sequencer, live(0, 1, 2, 3))
    assert (sequencer.state.level, len(sink.payloads)) == (Trust.EXACT, 4)


def test_a_live_message_that_a_replay_brought_before_confirms_it(sink, clock):
    sequencer = Sequencer("w", sink, clock=clock, settings=ReplaySettings())
    sequencer.can_replay = True
    sequencer.connected()
    sequencer.replayed(live(0, 1))
    sequencer.receive(live(1))
    assert sequencer.state is trust.CATCHING_UP
    sequencer.replay_ended()
    assert (sequencer.state.level, len(sink.payloads)) == (Trust.EXACT, 2)


def test_an_empty_answer_behind_live_messages_is_no_beginning(sink, clock):
    """buffer_steps 0, or the endpoint of an engine that is idle."""
    sequencer = Sequencer("w", sink, clock=clock, settings=ReplaySettings())
    sequencer.can_replay = True
    sequencer.connected()
    sequencer.receive(live(80))
    while sequencer.request is not None:
        answer(sequencer, [])
    assert sequencer.state is trust.REPLAY_CONTRADICTS
    sequencer.receive(live(81))
    pass_time(sequencer, clock, 10.0)
    assert sink.payloads == [payload(80), payload(81)]


def test_an_empty_buffer_takes_no_blocks_away(sequencer, sink, clock):
    pass_time(sequencer, clock, 2.0)
    assert sequencer.request.is_check
    while sequencer.request is not None:
        answer(sequencer, [])
    assert sequencer.state is trust.REPLAY_CONTRADICTS
    assert len(sink.payloads) == 10
    sequencer.receive(live(10))
    assert len(sink.payloads) == 11


def test_an_answer_without_an_end_is_given_up(sequencer, clock):
    sequencer.receive(live(13))
    request, number = sequencer.request, 9
    for _ in range(400):
        sequencer.replayed(live(number))
        number += 1
        clock.now_s += 1.0
        sequencer.tick()
        if sequencer.request is not request:
            break
    assert sequencer.num_failures == 1
    assert number < 200


def test_old_messages_do_not_keep_an_answer_open(sequencer, clock):
    sequencer.receive(live(13))
    request = sequencer.request
    for _ in range(20):
        sequencer.replayed(live(9))
        clock.now_s += 1.0
        sequencer.tick()
    assert sequencer.request is not request


def test_empty_messages_are_bounded_too(sequencer):
    sequencer._pending._max_bytes = 10_000
    sequencer.receive([Message(b"", number, b"") for number in range(20, 2000)])
    assert len(sequencer._pending) <= 51


class OneEffect(ApplyResult):
    """A sink on which every message has the effect that the test has chosen."""

    effect = Effect()

    def apply(self, payloads):
        super().apply(payloads)
        return self.effect


@pytest.fixture
def without_replay(clock):
    sequencer = Sequencer("w", OneEffect(), clock=clock)
    sequencer.connected()
    return sequencer


@pytest.mark.parametrize(("number", "known"), [(0, trust.EXACT), (5, trust.LATE_JOIN)])
def test_a_stream_is_exact_from_its_first_message_on(without_replay, number, known):
    without_replay.receive(live(number, number + 1))
    assert (without_replay.state, without_replay.last) == (known, number + 1)


def test_the_last_number_counts_once_its_message_is_applied(without_replay, monkeypatch):
    seen = []
    monkeypatch.setattr(
        without_replay._sink, "apply", lambda _: seen.append(without_replay.last) or Effect()
    )
    without_replay.receive(live(0, 1))
    without_replay.receive(live(2))
    assert (seen, without_replay.last) == ([None, 1], 2)


def test_a_repetition_has_the_number_and_the_bytes(without_replay):
    without_replay.receive(live(0, 1))
    without_replay.receive(live(1))
    assert (without_replay.num_duplicates, without_replay.num_restarts) == (1, 0)
    without_replay.receive(live(1, life=1))
    assert (without_replay.num_duplicates, without_replay.num_restarts) == (1, 1)


def test_what_is_given_up_is_late_when_it_comes(without_replay):
    without_replay.receive(live(0, 4))
    assert without_replay.state == trust.missing(3)
    without_replay.receive(live(1, 2, 3))
    assert (without_replay.num_duplicates, without_replay.num_restarts) == (3, 0)
    assert without_replay._sink.payloads == [payload(4)]


def test_number_0_is_never_late(without_replay):
    without_replay.receive(live(0, 2, 7))
    without_replay.receive(live(0, life=1))
    assert without_replay.num_restarts == 1
    assert without_replay._sink.payloads == [payload(0, 1)]


@pytest.mark.parametrize(
    ("defect", "is_repairable"),
    [("unknown_parent", True), ("undecodable", True), ("block_size", False)],
)
def test_what_was_lost_on_the_way_is_asked_for_once(clock, defect, is_repairable):
    sequencer = Sequencer("w", OneEffect(), clock=clock)
    sequencer.can_replay = True
    sequencer.connected()
    answer(sequencer, [])
    sequencer._sink.effect = Effect(defects=Counter({defect: 1}))
    sequencer.receive(live(0))
    assert (sequencer.request is not None) is is_repairable
    if is_repairable:
        assert sequencer.request.asks_everything
        answer(sequencer, live(0))
    sequencer.receive(live(1))
    while sequencer.request is not None:
        assert sequencer.request.is_check
        answer(sequencer, live(0, 1))
    assert sequencer.state == trust.unusable(defect)


def test_a_clear_by_the_engine_makes_exact_what_has_numbers_or_not(without_replay):
    unnumbered = Message(b"", None, b"a")
    without_replay.receive([unnumbered])
    assert (without_replay.state, without_replay.last) == (trust.UNNUMBERED, None)
    without_replay._sink.effect = Effect(cleared=True)
    without_replay.receive([unnumbered])
    assert without_replay.state is trust.EXACT
