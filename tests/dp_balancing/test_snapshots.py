"""The load of SGLang's ranks, from snapshots and from what has been sent since."""

from types import SimpleNamespace as Bag

import pytest

from kvplug.dp_balancing.chooser import Chooser
from kvplug.dp_balancing.snapshots import Snapshots
from kvplug.events import Rank
from kvplug.kernels import costing
from kvplug.router.core import Router


class Rig:
    """Two ranks whose snapshots a test writes, and a clock that it moves."""

    def __init__(self):
        self.now_s, self.slots = 100.0, {}
        router = Router()
        router.add_worker(Chooser.worker, dp_size=2)
        self.chooser = Bag(router=router, num_ranks=2, worker=Chooser.worker)
        self.snapshots = Snapshots(lambda: list(self.slots.values()), lambda: self.now_s)

    def send(self, rank):
        name = self.snapshots.new_id()
        self.chooser.router.adopt(name, Rank(Chooser.worker, rank), (), 64)
        self.snapshots.sent(name, rank)

    def say(self, rank, *, running=0, waiting=0, after_s=0.05):
        self.now_s += after_s
        self.slots[rank] = Bag(
            timestamp=self.now_s,
            dp_rank=rank,
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_waiting_uncached_tokens=64 * waiting,
        )
        self.snapshots.report(self.chooser)

    @property
    def num_own(self):
        return len(self.chooser.router.load)

    def in_flight(self, rank):
        return self.chooser.router.load.ranks[rank, costing.NUM_RUNNING]


@pytest.fixture
def rig():
    return Rig()


def test_the_second_snapshot_has_a_request_for_certain(rig):
    rig.send(0)
    rig.say(0, running=1)  # an earlier one's
    assert (rig.num_own, rig.in_flight(0)) == (1, 1)
    rig.say(0, running=1, waiting=1)
    assert (rig.num_own, rig.in_flight(0)) == (0, 2)


def test_an_idle_rank_has_served_it(rig):
    rig.send(0)
    rig.say(0, after_s=0.05)
    assert rig.num_own == 1
    rig.send(0)
    rig.say(0, after_s=0.2)
    assert (rig.num_own, rig.in_flight(0)) == (0, 0)


def test_snapshots_of_another_rank_say_nothing(rig):
    rig.send(0)
    for _ in range(3):
        rig.say(1, running=4)
    assert (rig.num_own, rig.in_flight(0), rig.in_flight(1)) == (1, 1, 4)


def test_a_snapshot_counts_once(rig):
    rig.send(0)
    rig.say(0, running=1)
    for _ in range(3):
        rig.now_s += 1
        rig.snapshots.report(rig.chooser)
    assert rig.num_own == 1


def test_snapshots_are_read_every_20_ms_at_most(rig):
    rig.say(0, running=1)
    rig.say(0, running=5, after_s=0.01)
    assert rig.in_flight(0) == 1


def test_a_rank_that_nobody_knows_is_passed_over(rig):
    rig.say(7, running=1)
    assert rig.in_flight(0) == 0
