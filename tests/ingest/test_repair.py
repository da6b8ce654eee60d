"""Single cases of repair; tests/ingest/test_repair_machine.py mixes them."""

import pytest

from kvplug.ingest.repair import Repair
from kvplug.ingest.repair_settings import RepairSettings
from kvplug.ingest.trust import Trust
from tests.ingest.test_repair_machine import Applied


def payload(number, life=0):
    return b"%d.%d.store" % (life, number)


def live(*numbers, life=0):
    return [(number, payload(number, life)) for number in numbers]


@pytest.fixture
def sink():
    return Applied()


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def repair(sink, clock):
    """An exact stream that has come to message 9."""
    repair = Repair("w", sink, clock=clock, settings=RepairSettings())
    repair.can_replay = True
    repair.connected()
    repair.replay_ended()
    repair.receive(live(*range(10)))
    assert repair.state.level is Trust.EXACT
    return repair


def test_a_gap_is_repaired_though_the_buffer_begins_right_behind_the_last_message(repair, sink):
    repair.receive(live(13))
    assert repair.order.start == 9
    repair.replayed(live(10, 11, 12, 13))
    repair.replay_ended()
    assert (repair.state.level, len(sink.payloads)) == (Trust.EXACT, 14)


def test_behind_a_broken_connection_that_is_no_proof(repair, sink):
    repair.disconnected()
    repair.connected()
    repair.replayed(live(10, 11, life=1))
    repair.replay_ended()
    assert repair.state.level is Trust.STALE
    assert "the same engine" in repair.state.reason
    assert sink.payloads == [payload(10, 1), payload(11, 1)]


def test_nor_is_it_when_a_number_went_down_meanwhile(repair, sink):
    repair.receive(live(13))
    repair.receive(live(0, life=1))
    repair.replayed(live(10, 11, life=1))
    repair.replay_ended()
    assert repair.state.level is Trust.STALE
    assert all(each.startswith(b"1.") for each in sink.payloads)


def test_live_messages_during_a_check_end_it(repair, sink, clock):
    clock.now_s = 100.0
    repair.tick()
    assert repair.order.is_check
    assert repair.state.level is Trust.EXACT
    repair.receive(live(10))
    assert (repair.order, len(sink.payloads)) == (None, 11)


def test_held_messages_beyond_the_limit_are_asked_for_again(repair, sink):
    repair._held._max_bytes = 5
    repair.receive(live(12, 13, 14))
    repair.replayed(live(9, 10, 11, 12))
    repair.replay_ended()
    repair.receive(live(15))
    assert repair.order.start == 12
    repair.replayed(live(12, 13, 14, 15))
    repair.replay_ended()
    assert (repair.state.level, len(sink.payloads)) == (Trust.EXACT, 16)


def lose(repair, clock):
    """The stream breaks, and one more message was on its way."""
    repair.disconnected()
    repair.receive(live(13))
    assert repair.order.start == 9
    clock.now_s += 31.0
    repair.tick()


def test_a_lost_stream_takes_its_open_order_along(repair, sink, clock):
    lose(repair, clock)
    assert (repair.last, repair.order, sink.payloads) == (None, None, [])
    assert repair.state.level is Trust.BLIND
    repair.replayed(live(9, 10))
    repair.replay_ended()
    assert (repair.last, sink.payloads) == (None, [])


def test_behind_a_lost_stream_all_is_asked_for(repair, sink, clock):
    lose(repair, clock)
    repair.connected()
    assert repair.order.asks_everything
    repair.replayed(live(*range(15)))
    repair.replay_ended()
    assert (repair.state.level, len(sink.payloads)) == (Trust.EXACT, 15)
