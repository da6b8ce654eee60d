"""Whatever becomes of a stream that keeps messages, what is called exact is what its engine held.

The stream is a model: it is cut at both ends, read again from anywhere, has messages twice and
others not at all; beats come beside it, late or never. The reader is cut off, saved and restored
with its blocks. The publisher is a model, too (tests/ingest/life_publisher.py).
"""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, precondition, rule

from kvplug import Rank, protocol
from kvplug.cluster.fleet_snapshot import freeze, restore_fleet
from kvplug.ingest.follower import Follower
from kvplug.ingest.trust import Trust
from kvplug.transports.base import Message
from tests.ingest.answered_follower import AnsweredFollower
from tests.ingest.life_publisher import LifePublisher, TellableRouter
from tests.ingest.test_life_sequencer_machine import HARMLESS, SETTINGS

RANK = Rank("w")
EVENTS = st.tuples(st.sampled_from(["store", "branch", "remove", "clear"]), st.integers(1, 4))


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Thousands of restarts are nothing to report here."""
    caplog.set_level("ERROR", logger="kvplug.ingest")


class KeptStreamMachine(AnsweredFollower):
    @initialize(max_history=st.sampled_from([2, 1000]), num_held=st.integers(0, 8))
    def start(self, max_history, num_held):
        self.now_s = 50.0
        self.publisher = LifePublisher(max_history=max_history, answers_at=None)
        self.beats, self.late_beats = {}, []
        self.stream, self.at, self.saved = [], 0, None
        self.asked = self.answer = None
        self.begin()
        self.say_hello()
        self.go_well_for_a_while([("store", num_held)] if num_held else [])

    def begin(self):
        self.router = TellableRouter()
        self.router.add_worker("w")
        self.follower = Follower(self.router, RANK, clock=lambda: self.now_s, settings=SETTINGS)
        self.follower.can_replay = True
        self.is_cut_off = False
        self.follower.on_resumed()

    def keep(self, message):
        self.stream.append(Message(message.topic, None, message.payload, is_live=False))

    def say_hello(self):
        self.keep(self.publisher.hello())

    def published(self, kind, num_blocks):
        publisher = self.publisher
        match kind:
            case "store":
                return publisher.store(num_blocks)
            case "branch":
                return publisher.store(num_blocks, parent=next(iter(publisher.held), None))
            case "remove":
                return publisher.remove_last(num_blocks)
        return publisher.clear()

    @rule(events=st.lists(EVENTS, min_size=1, max_size=6))
    def publish(self, events):
        for event in events:
            self.keep(self.published(*event))

    @rule(event=EVENTS)
    def publish_in_vain(self, event):
        """The stream does not take it."""
        self.published(*event)

    @rule(num_messages=st.integers(1, 6))
    def publish_again(self, num_messages):
        for message in list(self.publisher.history)[-num_messages:]:
            self.keep(message)

    @rule(num_messages=st.integers(1, 10))
    def read(self, num_messages):
        if not self.is_cut_off:
            self.follower.receive(self.stream[self.at : self.at + num_messages])
            self.at = min(len(self.stream), self.at + num_messages)

    @rule(data=st.data())
    def read_from_anywhere(self, data):
        self.at = data.draw(st.integers(0, len(self.stream)))
        self.read(5)

    @rule(num_messages=st.integers(1, 20))
    def lose_the_beginning(self, num_messages):
        del self.stream[:num_messages]
        self.at = max(0, self.at - num_messages)

    @rule(num_messages=st.integers(1, 6))
    def lose_the_end(self, num_messages):
        del self.stream[-num_messages:]
        self.at = min(self.at, len(self.stream))

    @rule(reads=st.booleans())
    def beat(self, *, reads):
        if reads:
            self.read(len(self.stream))
        self.hear(self.publisher.hello())

    @rule()
    def delay_a_beat(self):
        self.late_beats.append(self.publisher.hello())

    @rule()
    def hear_late_beats(self):
        beats, self.late_beats = self.late_beats, []
        for message in beats:
            self.hear(message)

    def hear(self, message):
        if not self.is_cut_off:
            self.follower.receive([message])
            hello = protocol.decode(message.payload)
            if hello.life == self.follower.sequencer.life:
                self.beats[hello.life] = self.now_s, hello.next

    @rule(says_hello=st.booleans())
    def restart(self, says_hello):
        self.publisher.restart()
        if says_hello:
            self.say_hello()

    @rule()
    def lose_count(self):
        self.publisher.begin_life()
        self.say_hello()

    @rule(is_short=st.booleans())
    def cut_off(self, is_short):
        self.is_cut_off = True
        self.follower.on_interrupted()
        if is_short:
            self.go_on()

    @rule()
    def go_on(self):
        self.is_cut_off = False
        self.follower.on_resumed()

    def take_request(self):
        if self.follower.replay_request is not self.asked:
            self.asked = self.follower.replay_request
            is_ours = self.asked is not None and self.follower.speaks_ours
            self.answer = self.publisher.answer(self.asked.payload) if is_ours else None

    @rule()
    def save(self):
        self.saved = freeze(self.router, [self.follower], self.at).encode(), self.at

    @precondition(lambda self: self.saved is not None)
    @rule()
    def restore(self):
        self.begin()
        data, at = self.saved
        position = restore_fleet(self.router, data).get(RANK)
        if position is not None:
            self.follower.resume(position)
        self.at = min(at, len(self.stream))
        self.beat(reads=True)

    @rule(events=st.lists(EVENTS, min_size=1, max_size=6))
    def go_well_for_a_while(self, events):
        self.go_on()
        self.now_s += 0.5
        self.publish(events)
        self.read(len(self.stream))
        self.beat(reads=False)
        self.follower.tick()
        self.answer_fully()

    @invariant()
    def what_is_exact_was_held(self):
        """Before the number that comes next, in the life that is followed and was heard lately."""
        if not hasattr(self, "router"):
            return
        assert not set(self.follower.skipped) - HARMLESS
        if self.follower.trust.level is Trust.EXACT:
            self.follower.tick()
        if self.follower.trust.level is Trust.EXACT:
            sequencer = self.follower.sequencer
            held = self.publisher.held_before[sequencer.life][sequencer.next]
            assert self.known() == sorted(held)
            beat_at_s, beat_next = self.beats[sequencer.life]
            assert self.now_s - beat_at_s <= 4.0
            assert sequencer.next >= beat_next

    def known(self):
        return sorted(int(name) for name in self.router.index.engine_hashes_of(RANK))

    def teardown(self):
        """Once everything is sound again and time has passed, it is exact."""
        if not hasattr(self, "router"):
            return
        self.go_on()
        for _ in range(40):
            self.now_s += 2.0
            self.publish([("store", 1)])
            self.read(len(self.stream))
            self.beat(reads=False)
            self.follower.tick()
            self.asked = None
            self.answer_fully()
            self.what_is_exact_was_held()
        assert self.follower.trust.level is Trust.EXACT, self.follower.trust
        assert self.known() == sorted(self.publisher.held)
        self.router.index.check()


TestKeptStreamMachine = KeptStreamMachine.TestCase
TestKeptStreamMachine.settings = settings(stateful_step_count=30)
