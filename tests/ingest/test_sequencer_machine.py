"""Whatever the wire does, a repaired stream is the engine's own, or is not called exact.

The engine is a list of messages with a buffer of the last few; the wire drops, repeats, delays and
swaps; replays come in pieces, late, cut short, or not at all; the engine restarts unseen.
"""

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvplug.ingest.message_log import Effect
from kvplug.ingest.replay import ReplaySettings
from kvplug.ingest.sequencer import Sequencer
from kvplug.ingest.trust import Trust
from kvplug.transports.base import Message


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Thousands of restarts are nothing to report here."""
    caplog.set_level("ERROR", logger="kvplug.ingest.sequencer")


SETTINGS = ReplaySettings(max_tries=3, pause_s=30.0)


@dataclass
class ApplyResult:
    """The sink: all that is known of the engine, as a list of payloads since the last clear."""

    payloads: list = field(default_factory=list)

    def apply(self, payloads):
        effect = Effect()
        for payload in payloads:
            if payload.endswith(b"clear"):
                self.payloads, effect.cleared = [], True
            else:
                self.payloads.append(payload)
        return effect

    def clear(self):
        self.payloads = []


class Engine:
    """One life after the other; messages are numbered from 0 in each."""

    def __init__(self, buffer_size):
        self.buffer_size, self.life = buffer_size, -1
        self.restart()

    def restart(self):
        self.life += 1
        self.messages = []

    def publish(self, clears):
        kind = b"clear" if clears else b"store"
        self.messages.append(b"%d.%d.%s" % (self.life, len(self.messages), kind))
        return self.message(len(self.messages) - 1)

    def replay(self, start):
        """What the buffer still has, from number `start` on."""
        first = max(start, len(self.messages) - self.buffer_size)
        return [self.message(n) for n in range(first, len(self.messages))]

    def message(self, number):
        return Message(b"", number, self.messages[number])

    @property
    def held(self):
        """What it has stored since it was last cleared."""
        clears = [n for n, m in enumerate(self.messages) if m.endswith(b"clear")]
        return self.messages[clears[-1] + 1 if clears else 0 :]


class SequencerMachine(RuleBasedStateMachine):
    can_replay = True

    @initialize(buffer_size=st.sampled_from([3, 1000]), published=st.integers(0, 5))
    def start(self, buffer_size, published):
        self.now_s, self.engine, self.sink = 0.0, Engine(buffer_size), ApplyResult()
        self.sequencer = Sequencer("w", self.sink, clock=lambda: self.now_s, settings=SETTINGS)
        self.sequencer.can_replay = self.can_replay
        for _ in range(published):
            self.engine.publish(clears=False)
        self.delayed = []
        self.answer = self.asked = None
        self.sequencer.connected()

    @rule(count=st.integers(1, 4), clears=st.booleans())
    def deliver(self, count, clears):
        messages = [self.engine.publish(clears and i == 0) for i in range(count)]
        self.sequencer.receive(messages)

    @rule(count=st.integers(1, 3))
    def drop(self, count):
        for _ in range(count):
            self.engine.publish(clears=False)

    @rule()
    def delay(self):
        self.delayed.append(self.engine.publish(clears=False))

    @rule()
    def deliver_delayed(self):
        self.delayed.reverse()
        self.sequencer.receive(self.delayed)
        self.delayed = []

    @precondition(lambda self: self.engine.messages)
    @rule(data=st.data())
    def repeat(self, data):
        number = data.draw(st.integers(0, len(self.engine.messages) - 1))
        self.sequencer.receive([self.engine.message(number)])

    @rule()
    def restart_unseen(self):
        """Behind a proxy, or between two heartbeats.

        Its first message arrives: if all that it sent were lost until its numbers go on where the
        former life ended, nobody could tell.
        """
        self.engine.restart()
        self.delayed = []
        self.deliver(1, clears=False)

    @rule(restarts=st.booleans())
    def reconnect(self, restarts):
        self.sequencer.disconnected()
        if restarts:
            self.engine.restart()
            self.delayed = []
        self.sequencer.connected()

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0, 31.0]))
    def wait(self, seconds):
        self.now_s += seconds
        self.sequencer.tick()

    @rule(count=st.integers(1, 3))
    def answer_in_part(self, count):
        self.take_request()
        if self.answer is not None:
            part, self.answer = self.answer[:count], self.answer[count:]
            self.sequencer.replayed(part)

    @rule()
    def answer_fully(self):
        self.take_request()
        if self.answer is not None:
            request = self.sequencer.request
            self.sequencer.replayed(self.answer)
            if self.sequencer.request is request:
                self.sequencer.replay_ended()

    @precondition(lambda self: self.answer)
    @rule()
    def lose_some_of_the_answer(self):
        del self.answer[0]

    def take_request(self):
        """As the owner of the sockets does: another order, another request."""
        if self.sequencer.request is not self.asked:
            self.asked = self.sequencer.request
            self.answer = None
            if self.asked is not None:
                self.answer = self.engine.replay(self.asked.first)

    @invariant()
    def what_is_known_was_said(self):
        """In the engine's order, and never of two lives at once."""
        if not hasattr(self, "sink"):
            return
        lives = {payload.split(b".")[0] for payload in self.sink.payloads}
        numbers = [int(payload.split(b".")[1]) for payload in self.sink.payloads]
        assert len(lives) <= 1
        assert numbers == sorted(set(numbers))
        if self.sequencer.state.level is Trust.EXACT:
            assert (
                numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
            )

    def teardown(self):
        """Once the wire is sound again and time has passed, it is exact, or says why not."""
        if not hasattr(self, "sink"):
            return
        self.sequencer.receive(self.delayed)
        self.settle()
        self.sequencer.receive([self.engine.publish(clears=False)])
        self.settle()
        state = self.sequencer.state
        if state.level is Trust.EXACT:
            assert self.sink.payloads == self.engine.held
        else:
            assert state.reason
            assert state.fix
            assert self.engine.buffer_size == 3 or not self.can_replay, state
        held = self.engine.held
        assert self.sink.payloads == held[len(held) - len(self.sink.payloads) :]
        self.sequencer.receive([self.engine.publish(clears=True)])
        self.settle()
        assert (self.sink.payloads, self.sequencer.state.level) == ([], Trust.EXACT)

    def settle(self):
        for _ in range(20):
            self.now_s += 31.0
            self.sequencer.tick()
            self.asked = None
            self.answer_fully()


class NoReplayMachine(SequencerMachine):
    """The same without a replay endpoint: less is exact, nothing is wrong."""

    can_replay = False


class LostStreamMachine(SequencerMachine):
    """One life, whose stream breaks for a while; what is on its way arrives all the same."""

    is_connected = True
    restart_unseen = None

    @rule(restarts=st.just(False))
    def reconnect(self, restarts):
        super().reconnect(restarts)
        self.is_connected = True

    @rule()
    def disconnect(self):
        self.sequencer.disconnected()
        self.is_connected = False

    def teardown(self):
        if not self.is_connected:
            self.sequencer.connected()
        super().teardown()


TestSequencerMachine = SequencerMachine.TestCase
TestSequencerMachine.settings = settings(stateful_step_count=30)
TestNoReplayMachine = NoReplayMachine.TestCase
TestNoReplayMachine.settings = settings(stateful_step_count=30)
TestLostStreamMachine = LostStreamMachine.TestCase
TestLostStreamMachine.settings = settings(stateful_step_count=30)
