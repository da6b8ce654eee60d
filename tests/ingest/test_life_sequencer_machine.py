"""Whatever the wire does to a stream of ours, what is called exact is what its engine held then.

The publisher is a model (tests/ingest/life_publisher.py) with lives, a history of a few messages
and resident sets; the wire loses, repeats, delays and swaps; answers come in pieces, cut short,
late, or from a former life; the connection breaks; the engine restarts with and without being seen.
"""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, precondition, rule

from kvplug import Rank
from kvplug.ingest.follower import Follower
from kvplug.ingest.replay import ReplaySettings
from kvplug.ingest.trust import Trust
from tests.ingest.answered_follower import AnsweredFollower
from tests.ingest.life_publisher import LifePublisher, TellableRouter

RANK = Rank("w")
SETTINGS = ReplaySettings(max_pending_bytes=2000)
HARMLESS = frozenset(
    {
        "unknown_parent",
        "unknown_block",
        "duplicate",
        "past_life",
        "out_of_order",
        "incomplete_answer",
        "other_life",
    }
)


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Thousands of restarts are nothing to report here."""
    caplog.set_level("ERROR", logger="kvplug.ingest")


class LifeMachine(AnsweredFollower):
    @initialize(max_history=st.sampled_from([2, 1000]), num_held=st.integers(0, 8))
    def start(self, max_history, num_held):
        self.now_s = 50.0
        self.router = TellableRouter()
        self.router.add_worker("w")
        self.follower = Follower(self.router, RANK, clock=lambda: self.now_s, settings=SETTINGS)
        self.follower.can_ask_publisher = True
        self.publisher = LifePublisher(max_history=max_history)
        self.publisher.store(num_held)
        self.delayed, self.sent = [], []
        self.asked = self.answer = None
        self.is_connected = True
        self.follower.on_connected()
        self.send([self.publisher.hello()])

    def send(self, messages):
        self.sent += messages
        if self.is_connected:
            self.follower.receive(messages)

    def published(self, kind, num_blocks):
        publisher = self.publisher
        match kind:
            case "store":
                return publisher.store(num_blocks)
            case "branch":
                return publisher.store(num_blocks, parent=next(iter(publisher.held), None))
            case "remove":
                return publisher.remove_last(num_blocks)
            case "clear":
                return publisher.clear()
        return publisher.hello()

    events = st.tuples(
        st.sampled_from(["store", "branch", "remove", "clear", "hello"]), st.integers(1, 4)
    )

    @rule(events=st.lists(events, min_size=1, max_size=6))
    def deliver(self, events):
        self.send([self.published(*each) for each in events])

    @rule(event=events)
    def lose(self, event):
        self.published(*event)

    @rule(event=events)
    def delay(self, event):
        self.delayed.append(self.published(*event))

    @rule(is_swapped=st.booleans())
    def deliver_delayed(self, is_swapped):
        late, self.delayed = self.delayed[:: -1 if is_swapped else 1], []
        self.send(late)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def repeat(self, data):
        """Of any life that was."""
        age = data.draw(st.integers(1, len(self.sent)))
        if self.is_connected:
            self.follower.receive([self.sent[-age]])

    @rule(is_seen=st.booleans(), says_hello=st.booleans())
    def restart(self, is_seen, says_hello):
        if is_seen and self.is_connected:
            self.follower.on_disconnected()
            self.follower.on_connected()
        self.publisher.restart()
        if says_hello:
            self.send([self.publisher.hello()])

    @rule()
    def lose_count(self):
        self.publisher.begin_life()
        self.send([self.publisher.hello()])

    @rule()
    def disconnect(self):
        self.follower.on_disconnected()
        self.is_connected = False

    @rule(says_hello=st.booleans())
    def reconnect(self, says_hello):
        self.is_connected = True
        self.follower.on_connected()
        if says_hello:
            self.send([self.publisher.hello()])

    @rule(events=st.lists(events, min_size=1, max_size=6))
    def go_well_for_a_while(self, events):
        if self.is_connected:
            self.now_s += 0.5
            self.deliver_delayed(is_swapped=False)
            self.send([self.publisher.hello()])
            self.follower.tick()
            self.answer_fully()
            self.deliver(events)

    @precondition(lambda self: self.answer)
    @rule(data=st.data())
    def damage_the_answer(self, data):
        at = data.draw(st.integers(0, len(self.answer) - 1))
        if data.draw(st.booleans()):
            del self.answer[at]
        else:
            self.answer.insert(at, self.answer[data.draw(st.integers(0, len(self.answer) - 1))])

    def take_request(self):
        """As the owner of the sockets does: another order, another request."""
        if self.follower.replay_request is not self.asked:
            self.asked = self.follower.replay_request
            self.answer = None
            if self.asked is not None:
                self.answer = self.publisher.answer(self.asked.payload)

    @invariant()
    def what_is_exact_was_held(self):
        """Before the number that comes next, in the life that is followed."""
        if not hasattr(self, "router"):
            return
        assert not set(self.follower.skipped) - HARMLESS
        if self.follower.trust.level is Trust.EXACT:
            sequencer = self.follower.sequencer
            held = self.publisher.held_before[sequencer.life][sequencer.next]
            assert self.known() == sorted(held)

    def known(self):
        return sorted(int(name) for name in self.router.index.engine_hashes_of(RANK))

    def teardown(self):
        """Once the wire is sound again and time has passed, it is exact."""
        if not hasattr(self, "router"):
            return
        if not self.is_connected:
            self.reconnect(says_hello=True)
        for _ in range(40):
            self.now_s += 2.0
            self.send([self.publisher.hello()])
            self.follower.tick()
            self.asked = None
            self.answer_fully()
            self.send([self.publisher.store(1)])
            self.what_is_exact_was_held()
        assert self.follower.trust.level is Trust.EXACT, self.follower.trust
        assert self.known() == sorted(self.publisher.held)
        self.router.index.check()


TestLifeMachine = LifeMachine.TestCase
TestLifeMachine.settings = settings(stateful_step_count=30)
