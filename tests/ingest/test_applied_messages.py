"""What is known of a stream, and how other messages stand to it."""

import pytest

from kvplug.ingest import trust
from kvplug.ingest.applied_messages import AppliedMessages
from kvplug.ingest.applier import Effect


class OneEffect:
    """A sink on which every message has the effect that the test has chosen."""

    def __init__(self):
        self.payloads, self.num_clears, self.effect = [], 0, Effect()

    def apply(self, payloads):
        self.payloads += payloads
        return self.effect

    def clear(self):
        self.payloads, self.num_clears = [], self.num_clears + 1


@pytest.fixture
def sink():
    return OneEffect()


@pytest.fixture
def applied(sink):
    return AppliedMessages(sink)


def test_only_messages_without_a_gap_are_in_order(applied):
    messages = [(0, b"a"), (1, b"b"), (3, b"d"), (None, b"e")]
    assert applied.leading_in_order(messages) == [(0, b"a"), (1, b"b")]
    assert applied.leading_in_order(messages[1:]) == applied.leading_in_order(messages[3:]) == []


@pytest.mark.parametrize(("number", "flaw"), [(0, trust.EXACT), (5, trust.LATE_JOIN)])
def test_a_stream_is_exact_from_its_first_message_on(applied, number, flaw):
    applied.flaw = trust.LATE_JOIN
    assert not applied.apply([(number, b"a"), (number + 1, b"b")])
    assert (applied.flaw, applied.last, applied.next_number) == (flaw, number + 1, number + 2)


def test_the_last_number_counts_once_its_message_is_applied(applied, sink, monkeypatch):
    seen = []
    monkeypatch.setattr(sink, "apply", lambda _: seen.append(applied.last) or Effect())
    applied.apply([(0, b"a"), (1, b"b")])
    applied.apply([(2, b"c")])
    assert (seen, applied.last) == ([None, 1], 2)


def test_a_repetition_has_the_number_and_the_bytes(applied):
    applied.apply([(0, b"a"), (1, b"b")])
    assert applied.is_repeated(1, b"b")
    assert not applied.is_repeated(1, b"c")
    assert not applied.is_repeated(2, b"b")
    assert (applied.remembers(1), applied.remembers(2)) == (True, False)


def test_what_is_given_up_is_late_when_it_comes(applied, sink):
    applied.apply([(0, b"a")])
    applied.skip_to(4, trust.missing(3))
    assert (sink.num_clears, applied.next_number, applied.flaw) == (1, 4, trust.missing(3))
    assert [applied.is_late(number) for number in range(5)] == [False, True, True, True, False]


def test_number_0_is_never_late(applied):
    applied.skip_to(3, trust.missing(3))
    assert [applied.is_late(number) for number in range(3)] == [False, True, True]


@pytest.mark.parametrize(("last", "flaw"), [(-1, trust.EXACT), (6, trust.truncated(7))])
def test_a_stream_that_starts_over_lacks_what_is_not_sent(applied, sink, last, flaw):
    applied.apply([(0, b"a")])
    applied.start_over(last)
    assert (sink.payloads, applied.last, applied.flaw) == ([], last, flaw)
    assert not applied.remembers(0)


@pytest.mark.parametrize(
    ("defect", "is_curable"),
    [("unknown_parent", True), ("undecodable", True), ("block_size", False)],
)
def test_what_was_lost_on_the_way_is_curable(applied, sink, defect, is_curable):
    sink.effect = Effect(defects={defect: 1})
    assert applied.apply([(0, b"a")]) is is_curable
    assert applied.flaw == trust.unusable(defect)


def test_a_clear_by_the_engine_makes_exact_what_has_numbers_or_not(applied, sink):
    applied.apply_unnumbered(b"a")
    assert (applied.flaw, applied.last) == (trust.UNNUMBERED, None)
    sink.effect = Effect(cleared=True)
    applied.apply_unnumbered(b"b")
    assert applied.flaw is trust.EXACT
