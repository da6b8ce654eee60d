"""Publishers that lie, send garbage, or never end: each is refused by name, and nothing grows."""

import gc
import tracemalloc

import pytest

from kvplug import Rank, packed, protocol
from kvplug.events import CxlState
from kvplug.index import sweeping
from kvplug.ingest import trust
from kvplug.ingest.trust import Trust
from kvplug.transports.base import Message
from tests.ingest.life_publisher import (
    LifePublisher,
    answer,
    join,
    message_of,
    names,
    wait,
)


def answered(follower, *said):
    follower.replayed([message_of(each) for each in said])


@pytest.fixture
def asked(follower, publisher):
    publisher.store(2)
    follower.receive([publisher.hello()])
    return follower


def hello_of(publisher):
    return protocol.decode(publisher.hello().payload)


def part_of(publisher, part=0, num_parts=2, following=None, said=None):
    said = packed.encode([]) if said is None else said
    following = publisher.next if following is None else following
    return protocol.Resident(publisher.life, following, part, num_parts, said)


def assert_refused(follower, reason):
    assert follower.skipped == {reason: 1}
    assert follower.replay_request is None
    assert follower.trust.level is Trust.STALE


def test_a_part_out_of_order(asked, publisher):
    answered(asked, hello_of(publisher), part_of(publisher, part=1))
    assert_refused(asked, "out_of_order")


def test_a_part_that_comes_twice(asked, publisher):
    part = part_of(publisher)
    answered(asked, hello_of(publisher), part, part)
    assert_refused(asked, "out_of_order")


def test_parts_of_two_sets(asked, publisher):
    other = part_of(publisher, part=1, following=publisher.next + 1)
    answered(asked, hello_of(publisher), part_of(publisher), other)
    assert_refused(asked, "out_of_order")


def test_more_parts_than_there_may_be(asked, publisher):
    too_many = protocol.MAX_PARTS + 1
    answered(asked, hello_of(publisher), part_of(publisher, num_parts=too_many))
    assert_refused(asked, "undecodable")


def test_an_end_without_parts(asked, publisher):
    end = protocol.End(publisher.life, publisher.next)
    answered(asked, hello_of(publisher), end)
    assert_refused(asked, "incomplete_answer")


def test_an_end_that_is_not_where_the_set_ends(asked, publisher):
    end = protocol.End(publisher.life, publisher.next + 1)
    part = part_of(publisher, num_parts=1)
    answered(asked, hello_of(publisher), part, end)
    assert_refused(asked, "incomplete_answer")


def test_an_answer_without_a_hello(asked, publisher):
    answered(asked, part_of(publisher))
    assert_refused(asked, "out_of_order")


def test_an_answer_of_another_life(asked):
    answered(asked, hello_of(LifePublisher()))
    assert_refused(asked, "other_life")


def test_events_where_a_resident_set_is_due(asked, publisher):
    said = protocol.Events(publisher.life, 0, 1.0, packed.encode([]))
    answered(asked, hello_of(publisher), said)
    assert_refused(asked, "out_of_order")


def test_a_resident_set_of_too_many_bytes(asked, publisher, monkeypatch):
    monkeypatch.setattr("kvplug.ingest.answer_order._MAX_BYTES", 10)
    part = part_of(publisher, said=packed.encode([packed.PackedRemoved([1, 2])]))
    answered(asked, hello_of(publisher), part)
    assert_refused(asked, "too_long")


def test_a_resident_set_that_takes_too_long(asked, publisher, clock, router):
    answered(asked, hello_of(publisher))
    request = asked.replay_request
    for number in range(protocol.MAX_PARTS):
        answered(asked, part_of(publisher, number, protocol.MAX_PARTS))
        clock.now_s += 4.0
        asked.receive([publisher.hello()])
        asked.tick()
        if asked.replay_request is not request:
            break
    assert clock.now_s < 100 + 120 + 5
    assert asked.sequencer.num_failures == 1


def test_a_hello_that_promises_more_than_there_is(follower, router, publisher, clock):
    join(follower, publisher)
    follower.receive([publisher.store(2)])
    lie = protocol.Hello(publisher.life, 2**63 - 1, 1.0, hello_of(publisher).about)
    clock.now_s += 1
    follower.receive([message_of(lie)])
    for _ in range(3):
        answer(follower, publisher)
        clock.now_s += 1
        follower.tick()
    assert (follower.trust, names(router)) == (trust.BAD_ANSWERS, [])
    wait(follower, clock, 32, publisher)
    answer(follower, publisher)
    assert (follower.trust, names(router)) == (trust.EXACT, [1, 2])


@pytest.mark.parametrize("kind", ["resident", "end", "ask"])
def test_what_does_not_belong_on_a_stream(follower, publisher, kind):
    join(follower, publisher)
    said = {
        "resident": part_of(publisher),
        "end": protocol.End(publisher.life, 0),
        "ask": protocol.Ask(publisher.life, 0),
    }[kind]
    follower.receive([message_of(said)])
    assert follower.skipped == {"out_of_order": 1}
    assert follower.trust is trust.EXACT


def test_ever_new_lives_get_few_asks(follower, router, clock):
    for _ in range(2000):
        forged = LifePublisher()
        forged.store(1)
        follower.receive([forged.hello()])
        clock.now_s += 0.001
    assert follower.sequencer.num_replays <= 11
    assert len(follower.sequencer.position().past_lives) == 8


def test_what_is_kept_does_not_grow(follower, router, publisher, clock, caplog):
    """After thousands of messages of each kind, live and in answers."""
    caplog.set_level("ERROR", logger="kvplug.ingest")

    def feed(count):
        for i in range(count):
            forged = LifePublisher(remembers=False, defects={f"{i}" * 50: i})
            said = [forged.hello(), forged.publish(bytes(500)), forged.end()]
            follower.receive([*said, Message(b"", i, b"%d" % i * 100)])
            if follower.replay_request is not None:
                follower.replayed(list(forged.resident_set()))
            follower.receive([forged.publish(bytes(500)) for _ in range(3)])
            clock.now_s += 0.1
            follower.tick()

    follower.receive([publisher.hello()])
    feed(100)
    gc.collect()
    tracemalloc.start()
    feed(600)
    gc.collect()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 2**18, f"{grown} bytes of 600 publishers are kept"
    assert len(follower.skipped) < 10
    assert names(router) == []


def test_bytes_of_any_kind_change_nothing(follower, router, publisher):
    join(follower, publisher)
    follower.receive([publisher.store(2)])
    bombs = [b"", b"\xff", b"\x91" * 100_000, b"\x98\xa6kvplug" + b"\x91" * 5000]
    bombs += [b"\xdd\xff\xff\xff\xff" * 3, b"\x98\xa6kvplug\x01\x00\xc6\xff\xff\xff\xff"]
    bombs += [publisher.hello().payload + bytes(2**21)]
    follower.receive([Message(b"", 1, bomb) for bomb in bombs])
    assert follower.skipped.keys() <= {"undecodable", "too_long", "unknown_kind"}
    assert sum(follower.skipped.values()) == len(bombs)
    assert (names(router), follower.trust) == ([1, 2], trust.EXACT)


@pytest.mark.parametrize(
    "said",
    [packed.PackedCleared(), packed.PackedCopied([]), packed.PackedRemoved([])],
    ids=["clears", "copies", "removals"],
)
def test_a_message_has_a_limit_of_events(follower, publisher, said):
    join(follower, publisher)
    follower.receive([publisher.publish(*[said] * (protocol.MAX_EVENTS + 1))])
    assert follower.skipped["too_many_events"] == 1
    assert follower.trust == trust.unusable("too_many_events")


def test_events_under_another_head_are_not_counted_but_refused(follower, publisher):
    join(follower, publisher)
    many = packed.encode([packed.PackedCleared()] * 9000)
    follower.receive([publisher.publish(many[:3] + b"\xcc" + many[3:])])
    assert follower.skipped["undecodable"] == 1


def test_a_rank_has_a_limit_of_groups(router, follower, publisher):
    join(follower, publisher)
    stored = [packed.PackedStored([n], [n], group=n, attention="mamba") for n in range(1, 200)]
    follower.receive([publisher.publish(*stored)])
    assert follower.skipped["group_tier"] == 199 - 64
    router.index.check()


def test_a_pool_has_a_limit_of_readers(follower, publisher):
    join(follower, publisher)
    workers = tuple(map(str, range(2000)))
    follower.receive(
        [publisher.publish(packed.PackedTransition([1], CxlState.CXL_POOLED, 1, workers))]
    )
    assert follower.skipped["undecodable"] == 1


def test_clears_of_nothing_cost_little(router, follower, publisher):
    """However many blocks others hold."""
    router.add_worker("other")
    blocks = range(1, 50_000)
    router.apply_packed(Rank("other"), packed.encode([packed.PackedStored(blocks, blocks)]))
    join(follower, publisher)
    sweeps = []
    kernel = sweeping.kernels.cut_holders
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeping.kernels, "cut_holders", lambda *a: (sweeps.append(1), kernel(*a))[1])
        follower.receive([publisher.publish(*[packed.PackedCleared()] * 4000)])
    assert follower.trust is trust.EXACT
    assert sweeps == []
