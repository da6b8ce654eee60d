"""Every fault, as a sentence of orders to a rig.

In:  a rig whose router trusts its index.   Out: the rig at rest, and its Outcome.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.chaos.rig import Outcome, Rig

NUM_MESSAGES = 200
SMALL_BUFFER = 20
_LARGE_BUFFER = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`num_messages` scales the work; `expects` is the level of trust at the end, on the stock
    stream: on our own everything ends exact.
    """

    name: str
    act: Callable[[Rig, int], None]
    expects: str = "exact"
    buffer_steps: int = _LARGE_BUFFER
    begins_empty: bool = False
    rig: dict = field(default_factory=dict)

    @property
    def is_repairable(self):
        """Whether what is missing can be replayed."""
        return not self.begins_empty

    def expects_on(self, wire):
        """The level of trust at the end."""
        return self.expects if wire == "vllm" else "exact"

    def run(self, rig, num_messages=NUM_MESSAGES) -> Outcome:
        if self.begins_empty:  # what came before cannot be replayed
            rig.engine.empty_cache()
        rig.begin_exact()
        self.act(rig, num_messages)
        is_exact = self.expects_on(rig.engine.wire) == "exact"
        return rig.settle_exact() if is_exact else rig.settle_cleared()


def _by_odds(**odds):
    def act(rig, num_messages):
        rig.inject(**odds)
        rig.work(num_messages)
        rig.heal()
        rig.tick(1)  # what was lost last shows in the number of the next message

    return act


def _silence_after_loss(rig, num_messages):
    """Nothing comes after what was lost: no number shows that it is missing."""
    rig.work(num_messages // 2)
    rig.inject(drop=1.0)
    rig.work(num_messages // 10)
    rig.heal()


def _nothing(rig, num_messages):
    rig.work(num_messages)


def _cut(rig, num_messages):
    for _ in range(3):
        rig.work(num_messages // 6)
        rig.proxy.cut()
        rig.work(num_messages // 6)
        rig.proxy.restore()
    rig.heal()
    rig.tick(1)


def _minute_without_connection(rig, num_messages):
    """The engine works on meanwhile."""
    rig.work(num_messages // 2)
    rig.proxy.cut()
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        rig.work(num_messages // 20)
    rig.proxy.restore()
    rig.heal()
    rig.tick(1)


def _router_killed(rig, num_messages):
    for _ in range(2):
        rig.work(num_messages // 3)
        rig.kill_router()
    rig.work(num_messages // 3)


def _late_join(rig, num_messages):
    rig.tick(15 * num_messages)
    rig.kill_router()
    rig.tick(1)


def _engine_killed(rig, num_messages):
    rig.work(num_messages // 2)
    rig.kill_engine()
    rig.work(num_messages // 2)


def _engine_overtakes(rig, num_messages):
    """The new incarnation's numbers pass the old one's before the router hears of it."""
    rig.work(num_messages // 2)
    old_incarnation = rig.engine.held()
    rig.proxy.cut()
    rig.kill_engine()
    rig.work(old_incarnation.last + num_messages // 2)
    rig.proxy.restore()
    rig.heal()
    rig.tick(1)


def _engine_overtakes_unseen(rig, num_messages):
    """The same, and the connection that the router has stays."""
    rig.work(num_messages // 2)
    old_incarnation = rig.engine.held()
    rig.inject(drop=1.0)
    rig.kill_engine()
    rig.work(old_incarnation.last + num_messages // 2)
    rig.heal()
    rig.tick(1)


def _gap_beyond_buffer(rig, num_messages):
    rig.work(num_messages // 4)
    rig.inject(drop=1.0)
    rig.tick(SMALL_BUFFER + 5)
    rig.heal()
    rig.work(num_messages // 4)


def _gap_then_emptied(rig, num_messages):
    """What nobody can replay is forgotten on both sides; our own stream says it anyway."""
    _gap_beyond_buffer(rig, num_messages)
    if rig.engine.wire == "vllm":
        rig.settle_cleared()
    else:
        rig.settle_exact()
    rig.engine.empty_cache()
    rig.work(num_messages // 4)


def _gap(rig, num_messages):
    rig.work(num_messages // 4)
    rig.inject(drop=1.0)
    rig.tick(3)
    rig.heal()
    rig.work(num_messages // 4)


def _late_join_beyond_buffer(rig, num_messages):
    rig.work(num_messages)
    rig.kill_router()
    rig.tick(1)


def _everything(rig, num_messages):
    """Whatever the seed says, in any order, while messages are lost, late and doubled."""
    random = Random(rig.seed)
    orders = (_cut_once, _cut_once, Rig.kill_router, Rig.kill_router, Rig.kill_engine)
    rig.inject(**HARM)
    for _ in range(8):
        rig.work(num_messages // 8)
        random.choice(orders)(rig)
    rig.work(num_messages // 4)
    rig.heal()
    rig.tick(1)


def _cut_once(rig):
    rig.proxy.cut()
    rig.work(10)
    rig.proxy.restore()


HARM = {"drop": 0.03, "duplicate": 0.05, "hold": 0.05, "delay": 0.01, "max_burst": 5}

SCENARIOS = (
    Scenario(name="no fault", act=_nothing),
    Scenario(name="messages lost", act=_by_odds(drop=0.05)),
    Scenario(name="bursts lost", act=_by_odds(drop=0.03, max_burst=20)),
    Scenario(name="messages twice", act=_by_odds(duplicate=0.2)),
    Scenario(name="messages late", act=_by_odds(hold=0.1)),
    Scenario(name="stream delayed", act=_by_odds(delay=0.05)),
    Scenario(name="all of these", act=_by_odds(**HARM)),
    Scenario(name="silence after a loss", act=_silence_after_loss),
    Scenario(name="connection cut", act=_cut),
    Scenario(name="a minute without connection", act=_minute_without_connection),
    Scenario(name="router killed", act=_router_killed),
    Scenario(name="engine killed", act=_engine_killed),
    Scenario(name="killed, a broker between", act=_engine_killed, rig={"hides_restarts": True}),
    Scenario(name="killed, old number passed", act=_engine_overtakes),
    Scenario(
        name="killed and passed, a broker between",
        act=_engine_overtakes_unseen,
        rig={"hides_restarts": True},
    ),
    Scenario(name="everything", act=_everything),
    Scenario(name="everything, a broker between", act=_everything, rig={"hides_restarts": True}),
    Scenario(name="late join, long history", act=_late_join),
    Scenario(
        name="gap, no replay endpoint",
        act=_gap,
        expects="stale",
        begins_empty=True,
        rig={"has_replay": False},
    ),
    Scenario(
        name="gap beyond the buffer",
        act=_gap_beyond_buffer,
        expects="stale",
        begins_empty=True,
        buffer_steps=SMALL_BUFFER,
    ),
    Scenario(
        name="gap beyond the buffer, cache emptied",
        act=_gap_then_emptied,
        begins_empty=True,
        buffer_steps=SMALL_BUFFER,
    ),
    Scenario(
        name="late join beyond the buffer",
        act=_late_join_beyond_buffer,
        expects="stale",
        begins_empty=True,
        buffer_steps=SMALL_BUFFER,
    ),
)


def scenarios(names):
    """Those of the names, in the order of SCENARIOS; KeyError if there is none of a name."""
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    return sorted((by_name[name] for name in names), key=SCENARIOS.index)
