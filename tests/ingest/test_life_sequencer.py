"""What a follower does with a stream of ours: lives, gaps, asks, answers, heartbeats."""

import gc
import tracemalloc

import pytest

from kvplug import Rank, packed, protocol
from kvplug.ingest import trust
from kvplug.ingest.follower import Follower
from kvplug.ingest.replay import ReplaySettings
from kvplug.ingest.trust import Trust
from kvplug.transports.base import Message
from tests.ingest.life_publisher import LifePublisher, TellableRouter, message_of
from tests.ingest.publisher import message, stored

RANK = Rank("w")


@pytest.fixture
def router():
    router = TellableRouter()
    router.add_worker("w")
    return router


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def follower(router, clock):
    follower = Follower(router, RANK, clock=clock)
    follower.can_ask_publisher = True
    follower.on_connected()
    return follower


@pytest.fixture
def publisher():
    return LifePublisher()


def names(router):
    return sorted(int(name) for name in router.index.engine_hashes_of(RANK))


def answer(follower, publisher):
    """The ask that is open, if any, is answered in full."""
    request = follower.replay_request
    assert request is not None
    follower.replayed(publisher.answer(request.payload))
    if follower.replay_request is request:
        follower.replay_ended()


def join(follower, publisher):
    follower.receive([publisher.hello()])
    answer(follower, publisher)
    assert follower.trust is trust.EXACT


def wait(follower, clock, seconds, publisher=None):
    """Heartbeats go on, if there is a publisher."""
    for _ in range(round(seconds)):
        clock.now_s += 1.0
        if publisher is not None:
            follower.receive([publisher.hello()])
        follower.tick()


def test_a_newcomer_asks_for_everything(follower, router, publisher):
    publisher.store(5)
    follower.receive([publisher.hello()])
    assert protocol.decode(follower.replay_request.payload) == protocol.Ask(0, 0)
    assert follower.replay_request.endpoint == "tcp://*:5558"
    assert follower.trust is trust.CATCHING_UP
    live = publisher.store(2)
    follower.receive([live])
    assert names(router) == []
    answer(follower, publisher)
    assert (names(router), follower.trust) == ([1, 2, 3, 4, 5, 6, 7], trust.EXACT)
    assert follower.sequencer.num_duplicates == 0


def test_an_empty_engine_is_exact(follower, publisher):
    join(follower, publisher)
    assert follower.num_stored == 0


def test_live_events_wait_for_the_end_of_an_answer(follower, router, publisher):
    publisher.store(5)
    follower.receive([publisher.hello()])
    said = publisher.answer(follower.replay_request.payload)
    follower.replayed(said[:2])
    follower.receive([publisher.store(1), publisher.remove_last(1), publisher.store(1)])
    follower.replayed(said[2:])
    assert (names(router), follower.trust) == ([1, 2, 3, 4, 5, 7], trust.EXACT)
    assert follower.replay_request is None


def test_events_in_order_are_applied_at_once(follower, router, publisher):
    join(follower, publisher)
    follower.receive([publisher.store(3), publisher.remove_last(), publisher.hello()])
    assert (names(router), follower.trust) == ([1, 2], trust.EXACT)
    assert (follower.num_stored, follower.num_removed) == (3, 1)
    assert follower.sequencer.last == 1


def test_a_gap_is_filled_from_the_history(follower, router, publisher, clock):
    join(follower, publisher)
    clock.now_s += 1
    follower.receive([publisher.store(1)])
    publisher.store(1)
    publisher.remove_last(2)
    follower.receive([publisher.store(1)])
    assert follower.trust is trust.CATCHING_UP
    ask = protocol.decode(follower.replay_request.payload)
    assert ask == protocol.Ask(publisher.life, 1)
    answer(follower, publisher)
    assert (names(router), follower.trust) == ([3], trust.EXACT)
    assert follower.sequencer.num_missed == 2
    assert follower.sequencer.num_recovered == 4  # the answer to the first ask was one


def test_a_gap_beyond_the_history_is_filled_with_the_resident_set(follower, router, clock):
    publisher = LifePublisher(max_history=2)
    join(follower, publisher)
    follower.receive([publisher.store(4)])
    for _ in range(3):
        publisher.remove_last()
    clock.now_s += 1
    follower.receive([publisher.store(1)])
    answer(follower, publisher)
    assert (names(router), follower.trust) == ([1, 5], trust.EXACT)


def test_a_lost_tail_shows_with_the_next_hello(follower, router, publisher, clock):
    join(follower, publisher)
    publisher.store(2)
    clock.now_s += 1
    follower.receive([publisher.hello()])
    answer(follower, publisher)
    assert (names(router), follower.trust) == ([1, 2], trust.EXACT)


def test_another_life_forgets_the_rank_and_asks(follower, router, publisher, clock):
    join(follower, publisher)
    former = publisher.store(3)
    follower.receive([former])
    clock.now_s += 1
    publisher.restart()
    follower.receive([publisher.store(1)])  # its hello was lost
    assert (names(router), follower.trust) == ([], trust.CATCHING_UP)
    assert follower.replay_request is None, "nobody has said yet who answers"
    follower.receive([publisher.hello()])
    answer(follower, publisher)
    assert (names(router), follower.trust) == ([4], trust.EXACT)
    follower.receive([former])
    assert follower.skipped == {"past_life": 1}
    assert (names(router), follower.sequencer.num_restarts) == ([4], 1)


def test_a_life_that_was_left_comes_back_if_the_present_one_is_silent(follower, publisher, clock):
    join(follower, publisher)
    wait(follower, clock, 1)
    forged = LifePublisher()
    follower.receive([forged.hello()])
    wait(follower, clock, 5)
    follower.receive([publisher.hello()])
    assert follower.sequencer.life == forged.life
    wait(follower, clock, 5)
    follower.receive([publisher.hello()])
    assert follower.sequencer.life == publisher.life


def test_after_a_lost_connection_a_hello_tells_that_nothing_is_missing(follower, router, publisher):
    join(follower, publisher)
    follower.receive([publisher.store(2)])
    follower.on_disconnected()
    assert (follower.trust, names(router)) == (trust.INTERRUPTED, [1, 2])
    follower.on_connected()
    assert follower.trust is trust.CATCHING_UP
    follower.receive([publisher.hello()])
    assert (follower.trust, follower.replay_request) == (trust.EXACT, None)


def test_after_a_lost_connection_what_was_missed_is_asked_for(follower, router, publisher, clock):
    join(follower, publisher)
    follower.receive([publisher.store(2)])
    follower.on_disconnected()
    publisher.remove_last()
    clock.now_s += 1
    follower.on_connected()
    answer(follower, publisher)
    assert (follower.trust, names(router)) == (trust.EXACT, [1])


def test_a_lost_stream_is_forgotten_after_a_while(follower, router, publisher, clock):
    join(follower, publisher)
    follower.receive([publisher.store(2)])
    follower.on_disconnected()
    wait(follower, clock, 11)
    assert (follower.trust, names(router)) == (trust.DISCONNECTED, [])
    follower.on_connected()
    join(follower, publisher)
    assert names(router) == [1, 2]


def test_silence_on_a_connection_that_stands_is_named(follower, router, publisher, clock):
    join(follower, publisher)
    follower.receive([publisher.store(2)])
    wait(follower, clock, 6)
    assert follower.trust is trust.EXACT
    wait(follower, clock, 1)
    assert (follower.trust, names(router)) == (trust.NO_HEARTBEAT, [1, 2])
    follower.receive([publisher.hello()])
    assert follower.trust is trust.EXACT


def test_a_resident_set_that_is_broken_off_is_asked_for_again(follower, router, publisher, clock):
    publisher.store(9)
    follower.receive([publisher.hello()])
    follower.replayed(publisher.answer(follower.replay_request.payload)[:3])
    follower.replay_ended()
    assert follower.skipped == {"incomplete_answer": 1}
    wait(follower, clock, 1, publisher)
    answer(follower, publisher)
    assert (follower.trust, len(names(router))) == (trust.EXACT, 9)
    assert (follower.sequencer.num_replays, follower.sequencer.num_failures) == (2, 1)


def test_without_an_answer_what_was_known_is_forgotten(follower, router, publisher, clock):
    join(follower, publisher)
    follower.receive([publisher.store(3)])
    publisher.store(1)
    follower.receive([publisher.store(1)])
    wait(follower, clock, 19, publisher)
    assert (follower.trust, names(router)) == (trust.ASKS_SILENT, [5])
    follower.receive([publisher.store(2)])
    assert names(router) == [5, 6, 7]
    publisher.store(1)
    follower.receive([publisher.store(1)])  # another gap, while nobody is asked
    assert (follower.trust, names(router)) == (trust.ASKS_SILENT, [9])
    wait(follower, clock, 31, publisher)
    follower.receive([publisher.remove_last()])  # live events go on while it is asked again
    assert (follower.trust, names(router)) == (trust.ASKS_SILENT, [])
    answer(follower, publisher)
    assert (follower.trust, names(router)) == (trust.EXACT, list(range(1, 9)))


def test_a_publisher_that_cannot_be_asked_is_followed_from_now_on(follower, router, clock):
    publisher = LifePublisher(answers_at=None)
    publisher.store(3)
    follower.receive([publisher.hello(), publisher.store(1)])
    assert (follower.trust, names(router)) == (trust.NO_ASKS, [4])
    follower.on_disconnected()
    follower.on_connected()
    follower.receive([publisher.hello()])
    follower.receive([publisher.clear(), publisher.store(1)])
    assert (follower.trust, names(router)) == (trust.EXACT, [5])
    follower.on_disconnected()
    follower.on_connected()
    assert names(router) == [5], "a hello will tell whether something is missing"
    follower.receive([publisher.hello()])
    assert (follower.trust, names(router)) == (trust.EXACT, [5])


def test_live_events_during_a_check_are_in_no_answer_that_is_older(
    follower, router, publisher, clock
):
    join(follower, publisher)
    follower.receive([publisher.store(3)])
    clock.now_s += 1
    follower.sequencer.start_over()
    said = publisher.answer(follower.replay_request.payload)
    follower.receive([publisher.remove_last(2), publisher.store(1)])
    assert names(router) == [1, 4], "a check keeps nobody waiting"
    follower.replayed(said)
    assert (follower.trust, names(router)) == (trust.EXACT, [1, 4])
    assert follower.num_stored == 3 + 1 + 3 + 1


def test_a_configured_endpoint_is_asked_first_and_the_named_one_next(follower, publisher, clock):
    follower.can_replay = True
    follower.receive([publisher.hello()])
    assert follower.replay_request.endpoint is None
    follower.replay_failed("no answer")
    wait(follower, clock, 1)
    assert follower.replay_request.endpoint == "tcp://*:5558"


def test_what_waits_is_bounded(router, publisher, clock):
    settings = ReplaySettings(max_pending_bytes=1000)
    follower = Follower(router, RANK, clock=clock, settings=settings)
    follower.can_ask_publisher = True
    follower.on_connected()
    follower.receive([publisher.hello()])
    said = publisher.answer(follower.replay_request.payload)
    follower.receive([publisher.store(1) for _ in range(20)])
    assert len(follower.sequencer._pending) < 6
    clock.now_s += 1
    follower.replayed(said)
    assert follower.trust is trust.EXACT, "as far as anybody has said"
    follower.receive([publisher.hello()])
    answer(follower, publisher)
    assert (follower.trust, len(names(router))) == (trust.EXACT, 20)


def test_what_the_hello_says_is_told_to_the_router(router, follower):
    publisher = LifePublisher(capacity_blocks=77, cxl_pools=(1, 2), bigrams=True)
    join(follower, publisher)
    assert router.told == {
        "blocks": (4, True),
        "pools": ("w", (1, 2)),
        "capacity": (RANK, 77),
    }
    assert follower.about.capacity_blocks == 77


def test_defects_of_the_publisher_are_named_until_it_has_none(follower, publisher):
    join(follower, publisher)
    publisher.about["defects"] = {"queue_full": 3}
    follower.receive([publisher.hello()])
    assert follower.trust == trust.unusable("queue_full")
    publisher.about["defects"] = {"bad\n" * 100: 3}
    follower.receive([publisher.hello()])
    assert follower.trust == trust.unusable("bad" * 10)
    publisher.about["defects"] = {}
    follower.receive([publisher.hello()])
    assert follower.trust is trust.EXACT


def test_hidden_states_are_named(follower, publisher):
    publisher.about["hides_states"] = True
    follower.receive([publisher.hello()])
    answer(follower, publisher)
    assert follower.trust is trust.HIDDEN_STATES


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"hash_scheme": "sha256"}, "hash_scheme"),
        ({"dp_rank": 3}, "other_rank"),
        ({"block_size": 32}, "block_size"),
    ],
)
def test_a_stream_that_is_of_no_use_is_refused_by_name(router, clock, about, reason):
    follower = Follower(router, RANK, engine_rank=0, clock=clock)
    follower.can_ask_publisher = True
    follower.on_connected()
    publisher = LifePublisher(**about)
    for _ in range(3):
        follower.receive([publisher.hello(), publisher.store(2)])
    assert follower.trust == trust.unusable(reason)
    assert follower.skipped == {reason: 4}, "one hello, and the events"
    assert (names(router), follower.replay_request) == ([], None)
    publisher.about = {"block_size": 4, "answers_at": "tcp://*:5558"}
    clock.now_s += 1
    join(follower, publisher)
    assert len(names(router)) == 6


def test_a_newer_protocol_is_named(follower, publisher):
    newer = b"\x94\xa6kvplug\x63\x00\xa5hello"
    follower.receive([Message(b"", 0, newer)])
    assert follower.trust.reason == "events could not be used: unsupported_version"
    assert "same release" in follower.trust.fix
    assert follower.skipped == {"unsupported_version": 1}
    join(follower, publisher)


def test_events_that_cannot_be_read_are_asked_for_once(follower, router, publisher, clock):
    join(follower, publisher)
    clock.now_s += 1
    follower.receive([publisher.store(2), publisher.publish(b"nonsense")])
    assert follower.trust == trust.unusable("undecodable")
    answer(follower, publisher)
    assert (follower.trust, names(router)) == (trust.EXACT, [1, 2])


def test_an_engine_that_changes_its_wire_is_followed(follower, router, publisher, clock):
    follower.receive([message(0, stored(1, 3))])
    assert len(names(router)) == 3
    join(follower, publisher)
    follower.receive([publisher.store(1)])
    assert names(router) == [1]
    follower.receive([Message(b"", 1, b"noise"), message(0, stored(9))])
    assert (names(router), follower.trust) == ([9000], trust.EXACT)
    assert follower.skipped == {"undecodable": 1}
    assert follower.about is None


def test_a_reported_life_keeps_its_confidence(follower, router, publisher, monkeypatch):
    told = []
    monkeypatch.setattr(router, "set_confidence", lambda rank, share: told.append(share))
    join(follower, publisher)
    follower.on_disconnected()
    assert told[-2:] == [1.0, router.config.stale_confidence]


class TestHostilePeers:
    """Each is refused by name; what is credited is what the present life said."""

    def answered(self, follower, *said):
        follower.replayed([message_of(each) for each in said])

    @pytest.fixture
    def asked(self, follower, publisher):
        publisher.store(2)
        follower.receive([publisher.hello()])
        return follower

    def hello_of(self, publisher):
        return protocol.decode(publisher.hello().payload)

    def part(self, publisher, part=0, num_parts=2, following=None, said=None):
        said = packed.encode([]) if said is None else said
        following = publisher.next if following is None else following
        return protocol.Resident(publisher.life, following, part, num_parts, said)

    def refused(self, follower, reason):
        assert follower.skipped == {reason: 1}
        assert follower.replay_request is None
        assert follower.trust.level is Trust.STALE

    def test_a_part_out_of_order(self, asked, publisher):
        self.answered(asked, self.hello_of(publisher), self.part(publisher, part=1))
        self.refused(asked, "out_of_order")

    def test_a_part_that_comes_twice(self, asked, publisher):
        part = self.part(publisher)
        self.answered(asked, self.hello_of(publisher), part, part)
        self.refused(asked, "out_of_order")

    def test_parts_of_two_sets(self, asked, publisher):
        other = self.part(publisher, part=1, following=publisher.next + 1)
        self.answered(asked, self.hello_of(publisher), self.part(publisher), other)
        self.refused(asked, "out_of_order")

    def test_more_parts_than_there_may_be(self, asked, publisher):
        too_many = protocol.MAX_PARTS + 1
        self.answered(asked, self.hello_of(publisher), self.part(publisher, num_parts=too_many))
        self.refused(asked, "undecodable")

    def test_an_end_without_parts(self, asked, publisher):
        end = protocol.End(publisher.life, publisher.next)
        self.answered(asked, self.hello_of(publisher), end)
        self.refused(asked, "incomplete_answer")

    def test_an_end_that_is_not_where_the_set_ends(self, asked, publisher):
        end = protocol.End(publisher.life, publisher.next + 1)
        part = self.part(publisher, num_parts=1)
        self.answered(asked, self.hello_of(publisher), part, end)
        self.refused(asked, "incomplete_answer")

    def test_an_answer_without_a_hello(self, asked, publisher):
        self.answered(asked, self.part(publisher))
        self.refused(asked, "out_of_order")

    def test_an_answer_of_another_life(self, asked):
        self.answered(asked, self.hello_of(LifePublisher()))
        self.refused(asked, "other_life")

    def test_events_where_a_resident_set_is_due(self, asked, publisher):
        said = protocol.Events(publisher.life, 0, 1.0, packed.encode([]))
        self.answered(asked, self.hello_of(publisher), said)
        self.refused(asked, "out_of_order")

    def test_a_resident_set_of_too_many_bytes(self, asked, publisher, monkeypatch):
        monkeypatch.setattr("kvplug.ingest.answer_order._MAX_BYTES", 10)
        part = self.part(publisher, said=packed.encode([packed.PackedRemoved([1, 2])]))
        self.answered(asked, self.hello_of(publisher), part)
        self.refused(asked, "too_long")

    def test_a_resident_set_that_takes_too_long(self, asked, publisher, clock, router):
        self.answered(asked, self.hello_of(publisher))
        request = asked.replay_request
        for number in range(protocol.MAX_PARTS):
            self.answered(asked, self.part(publisher, number, protocol.MAX_PARTS))
            clock.now_s += 4.0
            asked.receive([publisher.hello()])
            asked.tick()
            if asked.replay_request is not request:
                break
        assert clock.now_s < 100 + 120 + 5
        assert asked.sequencer.num_failures == 1

    def test_a_hello_that_promises_more_than_there_is(self, follower, router, publisher, clock):
        join(follower, publisher)
        follower.receive([publisher.store(2)])
        lie = protocol.Hello(publisher.life, 2**64 - 1, 1.0, self.hello_of(publisher).about)
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
    def test_what_does_not_belong_on_a_stream(self, follower, publisher, kind):
        join(follower, publisher)
        said = {
            "resident": self.part(publisher),
            "end": protocol.End(publisher.life, 0),
            "ask": protocol.Ask(publisher.life, 0),
        }[kind]
        follower.receive([message_of(said)])
        assert follower.skipped == {"out_of_order": 1}
        assert follower.trust is trust.EXACT

    def test_ever_new_lives_get_few_asks(self, follower, router, clock):
        for _ in range(2000):
            follower.receive([LifePublisher().hello()])
            clock.now_s += 0.001
        assert follower.sequencer.num_replays <= 11
        assert len(follower.sequencer._past) == 8

    def test_what_is_kept_does_not_grow(self, follower, router, publisher, clock, caplog):
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
        feed(300)
        gc.collect()
        tracemalloc.start()
        feed(1500)
        gc.collect()
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert grown < 2**18, f"{grown} bytes of 1500 publishers are kept"
        assert len(follower.skipped) < 10
        assert names(router) == []

    def test_bytes_of_any_kind_change_nothing(self, follower, router, publisher):
        join(follower, publisher)
        follower.receive([publisher.store(2)])
        bombs = [b"", b"\xff", b"\x91" * 100_000, b"\x98\xa6kvplug" + b"\x91" * 5000]
        bombs += [b"\xdd\xff\xff\xff\xff" * 3, b"\x98\xa6kvplug\x01\x00\xc6\xff\xff\xff\xff"]
        bombs += [publisher.hello().payload + bytes(2**21)]
        follower.receive([Message(b"", 1, bomb) for bomb in bombs])
        assert follower.skipped.keys() <= {"undecodable", "too_long", "unknown_kind"}
        assert sum(follower.skipped.values()) == len(bombs)
        assert (names(router), follower.trust) == ([1, 2], trust.EXACT)
