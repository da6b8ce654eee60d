"""A router that begins with another one's snapshot goes on where its followers were."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplug import Rank, Router, RouterConfig
from kvplug.cluster.fleet_snapshot import freeze, ranks_in, restore_fleet
from kvplug.errors import ConfigError, SnapshotError
from kvplug.index import snapshot_file
from kvplug.ingest import trust
from kvplug.ingest.follower import Follower
from tests.ingest.life_publisher import LifePublisher, answer

RANKS = [Rank("a"), Rank("b")]


class Replica:
    """A router with a follower of each rank."""

    def __init__(self, snapshot=None, ranks=RANKS):
        self.router = Router(RouterConfig(block_size=4, speculative_ttl_s=0.0))
        for rank in ranks:
            self.router.add_worker(rank.worker)
        self.followers = {rank: Follower(self.router, rank) for rank in ranks}
        for follower in self.followers.values():
            follower.can_replay = True
            follower.on_connected()
        if snapshot is not None:
            for rank, position in restore_fleet(self.router, snapshot).items():
                self.followers[rank].resume(position)

    def freeze(self, seq=0):
        return freeze(self.router, self.followers.values(), seq)

    def held(self, rank):
        return sorted(int(name) for name in self.router.index.engine_hashes_of(rank))


def publishers():
    made = {}
    for number, rank in enumerate(RANKS):
        made[rank] = LifePublisher(first_name=1 + 10_000 * number)
    return made


def catch_up(replica, said):
    for rank, publisher in said.items():
        follower = replica.followers[rank]
        follower.receive([publisher.hello()])
        if follower.replay_request is not None:
            answer(follower, publisher)
            follower.receive([publisher.hello()])
        assert follower.trust is trust.EXACT
        assert replica.held(rank) == sorted(publisher.held)


def test_it_goes_on_without_an_ask():
    said, first = publishers(), Replica()
    for rank, publisher in said.items():
        first.followers[rank].receive([publisher.hello(), publisher.store(3), publisher.store(2)])
    frozen = first.freeze(seq=17)
    later = {rank: [p.remove_last(), p.store(4), p.hello()] for rank, p in said.items()}
    assert frozen.seq == 17
    second = Replica(frozen.encode())
    for rank, publisher in said.items():
        follower = second.followers[rank]
        assert follower.trust.level is trust.Trust.STALE
        before = list(publisher.history)[:2]
        follower.receive([*before, *later[rank]])  # the stream may begin with what is known
        assert follower.trust is trust.EXACT
        assert follower.sequencer.num_replays == 0
        assert second.held(rank) == sorted(publisher.held)


steps = st.lists(
    st.tuples(st.sampled_from(RANKS), st.sampled_from(["store", "remove", "clear", "restart"])),
    max_size=12,
)


@settings(max_examples=25)
@given(steps, steps, st.integers(0, 12), st.booleans())
def test_whatever_happens_between_it_ends_equal(before, after, num_lost, has_hello):
    said, first = publishers(), Replica()
    for rank, publisher in said.items():
        first.followers[rank].receive([publisher.hello()])
    for rank, step in before:
        first.followers[rank].receive(said_by(said[rank], step))
    snapshot = first.freeze().encode()
    messages = [(rank, said_by(said[rank], step)) for rank, step in after]
    second = Replica(snapshot)
    for rank, run in messages[num_lost:]:
        second.followers[rank].receive(run if has_hello else run[-1:])
    catch_up(second, said)
    second.router.index.check()


def said_by(publisher, step):
    if step == "restart":
        publisher.restart()
        return [publisher.hello()]
    act = {
        "store": publisher.store, "remove": publisher.remove_last, "clear": publisher.clear,
    }[step]  # fmt: skip
    return [act()]


def test_a_follower_that_knows_nothing_has_no_blocks_and_no_position():
    said, first = publishers(), Replica()
    publisher = said[RANKS[0]]
    first.followers[RANKS[0]].receive([publisher.hello(), publisher.store(3)])
    snapshot = first.freeze().encode()
    assert ranks_in(snapshot) == [RANKS[0]]
    second = Replica(snapshot)
    assert second.held(RANKS[1]) == []
    catch_up(second, said)


def test_workers_that_are_gone_are_left_out():
    said, first = publishers(), Replica()
    for rank, publisher in said.items():
        first.followers[rank].receive([publisher.hello(), publisher.store(3)])
    snapshot = first.freeze().encode()
    second = Replica(ranks=RANKS[:1])
    assert list(restore_fleet(second.router, snapshot)) == RANKS[:1]
    with pytest.raises(ConfigError, match="without blocks"):
        restore_fleet(second.router, snapshot)


def rewritten(data, change):
    file = snapshot_file.decode(data)
    change(file.arrays, file.settings)
    return snapshot_file.FileBytes(file.arrays, file.settings).encode()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _, settings: settings.__setitem__("fleet_layout", 2), "layout 1, got layout 2"),
        (lambda _, settings: settings.pop("fleet_layout"), "got layout None"),
        (lambda arrays, _: arrays.pop("positions"), "missing"),
        (lambda arrays, _: arrays.__setitem__("positions", arrays["workers"]), "damaged"),
    ],
)
def test_foreign_bytes_are_refused(change, reason):
    snapshot = rewritten(Replica().freeze().encode(), change)
    replica = Replica()
    with pytest.raises(SnapshotError, match=reason):
        restore_fleet(replica.router, snapshot)
    for data in (b"", b"\x89PNG", bytes(snapshot)[:-1]):
        with pytest.raises(SnapshotError):
            ranks_in(data)
