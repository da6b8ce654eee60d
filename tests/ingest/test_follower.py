import logging

import msgspec
import pytest

from kvplug import Rank, Router, RouterConfig
from kvplug.events import AllBlocksCleared, BlockCopied, BlockRemoved, EventBatch, Tier
from kvplug.ingest.follower import Follower
from kvplug.ingest.trust import Trust
from kvplug.transports.base import Message
from kvplug.transports.zmq import message_of
from tests.ingest.publisher import message, stored

RANK = Rank("w")


@pytest.fixture
def router():
    router = Router(RouterConfig(block_size=4))
    router.add_worker("w")
    return router


@pytest.fixture
def follower(router):
    follower = Follower(router, RANK)
    follower.on_connected()
    return follower


def test_events_reach_the_index(router, follower):
    follower.receive([message(0, stored(1, 3))])
    follower.receive([message(1, BlockRemoved(block_hashes=(1002,)))])
    assert len(router.index) == 2
    assert (follower.num_stored, follower.num_removed, follower.trust.reason) == (3, 1, None)


def test_the_first_blocks_count_as_soon_as_they_are_applied(router, follower, monkeypatch):
    seen, apply_records = [], router.apply_records

    def apply_and_route(rank, records):
        applied = apply_records(rank, records)
        seen.append(router.route(range(1, 14)).predicted_ttft_ms)
        return applied

    monkeypatch.setattr(router, "apply_records", apply_and_route)
    first = router.route(range(1, 14))  # expected until the event confirms it
    router.finish(first.request_id)
    follower.receive([message(0, stored(1, 3))])
    assert seen[0] < first.predicted_ttft_ms


def test_a_message_that_cannot_be_read_earns_no_trust(router, follower):
    follower.receive([message(0, stored(1, 3))])
    exact = router.route(range(1, 14))
    router.finish(exact.request_id)
    follower.on_disconnected()
    follower.on_connected()
    router.apply(RANK, EventBatch(events=(stored(1, 3),)))
    follower.receive([message_of([b"nothing"])])
    assert follower.trust.level is Trust.BLIND
    assert router.route(range(1, 14)).predicted_ttft_ms > exact.predicted_ttft_ms


def test_a_duplicate_is_not_applied_twice(router, follower):
    follower.receive([message(0, stored(1))])
    follower.receive([message(0, stored(1))])
    follower.receive([message(1, BlockRemoved(block_hashes=(1000,)))])
    assert len(router.index) == 0
    assert follower.skipped == {"duplicate": 1}


def test_a_gap_is_counted_and_named(router, follower, caplog):
    follower.receive([message(0, stored(1))])
    follower.receive([message(5, stored(9))])
    assert len(router.index) == 1, "removals may be among what was lost"
    assert follower.sequencer.num_missed == 4
    assert follower.trust.level is Trust.STALE
    assert follower.trust.reason == "4 event messages were lost"
    assert "stale: 4 event messages were lost; start the engine with a replay" in caplog.text


def test_a_restart_forgets_the_former_life(router, follower):
    for number in range(3):
        follower.receive([message(number, stored(10 * number + 1))])
    follower.receive([message(0, stored(91))])
    assert router.index.engine_hashes_of(RANK).tolist() == [91_000]
    assert follower.trust.reason is None


def test_a_lost_connection_forgets_everything(router, follower):
    follower.receive([message(0, stored(1, 3))])
    follower.on_disconnected()
    assert len(router.index) == 0
    assert not follower.connected
    follower.on_connected()
    follower.receive([message(0, stored(5))])
    assert (len(router.index), follower.trust.reason) == (1, None)


def test_a_check_without_an_answer_keeps_no_gap_from_being_asked_for(router):
    now_s = [0.0]
    follower = Follower(router, RANK, clock=lambda: now_s[0])
    follower.can_replay = True
    follower.on_connected()
    follower.replay_ended()
    follower.receive([message(0, stored(1))])
    for now_s[0] in (2.0, 8.0):  # it falls silent, is asked, and says nothing
        follower.tick()
    assert (follower.trust.level, follower.replay_request) == (Trust.EXACT, None)
    follower.receive([message(5, stored(9))])
    assert follower.replay_request.first == 0
    assert len(router.index) == 1


def test_joining_late_is_said(follower):
    follower.receive([message(17, stored(1))])
    assert follower.trust.reason == "the router joined after the engine's first events"


def test_a_clear_makes_a_rank_complete_again(follower):
    follower.receive([message(17, stored(1))])
    follower.receive([message(18, AllBlocksCleared(), stored(5))])
    assert follower.trust.reason is None


def test_an_unknown_parent_makes_the_rank_incomplete(router, follower):
    follower.receive([message(0, stored(1, parent=4711))])
    assert len(router.index) == 0
    assert follower.skipped == {"unknown_parent": 1}
    assert follower.trust.reason == "events could not be used: unknown_parent"


@pytest.mark.parametrize(
    "garbage",
    [
        [b"one frame"],
        [b"topic", b"short", b"\x93"],
        [],
    ],
)
def test_garbage_is_counted_skipped_and_logged_once(router, follower, caplog, garbage):
    follower.receive([message_of(garbage)])
    follower.receive([message_of(garbage)])
    follower.receive([message(0, stored(1))])
    assert follower.skipped == {"undecodable": 2}
    assert len(router.index) == 1
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "check that the endpoint is an event publisher" in warnings[0].getMessage()


@pytest.mark.parametrize("payload", [b"\xc1\xff garbage", b""])
def test_a_message_that_is_no_batch_leaves_the_rank_incomplete(router, follower, caplog, payload):
    for number in range(2):
        follower.receive([Message(b"topic", number, payload)])
    follower.receive([message(2, stored(1))])
    assert follower.skipped == {"undecodable": 2}
    assert len(router.index) == 1
    assert follower.trust.reason == "events could not be used: undecodable"
    assert caplog.text.count("check that the endpoint is an event publisher") == 1


def test_a_wrong_block_size_is_named_with_the_fix(follower, caplog):
    follower.receive([message(0, stored(1, block_size=8))])
    assert follower.skipped == {"block_size": 1}
    assert "start the router with the engine's --block-size" in caplog.text


def test_removals_in_other_groups_of_a_hybrid_model_are_left_alone(router, follower):
    follower.receive([message(0, stored(1, group=1))])
    follower.receive([message(1, BlockRemoved(block_hashes=(1000,), group=0))])
    assert len(router.index) == 1
    assert follower.skipped == {"unknown_block": 1}
    follower.receive([message(2, BlockRemoved(block_hashes=(1000,), group=1))])
    assert len(router.index) == 0


@pytest.mark.parametrize(
    ("event", "reason", "num_before"),
    [
        (BlockCopied(block_hashes=(1000,), tier=Tier.HOST), "no_tokens", 0),
        (stored(1, bigrams=True), "bigram_tokens", 1),
    ],
)
def test_what_the_index_cannot_take_makes_the_rank_incomplete(
    router, follower, event, reason, num_before
):
    before = [stored(50)] if num_before else []
    follower.receive([message(0, *before, event)])
    assert len(router.index) == num_before
    assert follower.skipped == {reason: 1}
    assert follower.trust.reason == f"events could not be used: {reason}"


def test_a_pooled_medium_is_named_once(follower, caplog):
    caplog.set_level(logging.INFO)
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CXL"}
    for number in range(2):
        payload = msgspec.msgpack.encode([0.0, [removed], 0])
        follower.receive([Message(b"", number, payload)])
    assert caplog.text.count("blocks in CXL count as in host memory") == 1
    assert "unknown_medium" not in follower.skipped


def test_a_rank_that_is_not_routed_to_is_counted(follower):
    follower.receive([message(0, stored(1), dp_rank=3)])
    assert follower.skipped == {"unknown_rank": 1}
    assert Rank("w", 3) not in follower._applier.ranks, "or any number would be remembered"


class Answers:
    """What they tell of an engine's events."""

    counts = None

    def confidence(self):
        return 0.5 if self.counts is None else 0.0

    def contradicted(self):
        return self.counts


@pytest.mark.parametrize("can_replay", [False, True])
def test_an_engine_that_contradicts_its_events_counts_no_more_and_is_asked_for_all(
    router, can_replay
):
    answers = Answers()
    follower = Follower(router, RANK, evidence=answers)
    follower.on_connected()
    follower.receive([message(0, stored(1, 3))])
    follower.can_replay = can_replay
    follower.tick()
    assert (follower.trust.level, follower.sequencer.request) == (Trust.EXACT, None)
    answers.counts = (4, 9)
    follower.tick()
    assert router.fleet_index.confidence_of(RANK) == 0.0
    assert follower.trust.level is Trust.STALE
    if can_replay:
        assert follower.sequencer.request.asks_everything
        follower.replayed([message(0, stored(11, 3))])
        follower.replay_ended()
        follower.receive([message(0, stored(11, 3))])  # which was on its way
        assert len(router.index) == 3
    follower.tick()
    assert (
        follower.trust.reason
        == "4 of the last 9 requests had fewer cached tokens than its events say"
    )
    assert follower.sequencer.request is None
    assert router.fleet_index.confidence_of(RANK) == 0.0
    answers.counts = None
    follower.tick()
    assert (follower.trust.level, follower.trust.reason) == (Trust.EXACT, None)
    assert router.fleet_index.confidence_of(RANK) == 1.0


def test_what_an_engine_says_after_its_worker_was_removed_hurts_nobody(router, follower):
    follower.receive([message(0, stored(1))])
    router.remove_worker("w")
    follower.receive([message(1, stored(9)), message(7, stored(3))])
    follower.on_disconnected()
    follower.on_connected()
    follower.receive([message_of([b"nothing"])])
    assert follower.num_stored == 1
    assert follower.skipped["unknown_rank"] > 0
    assert router.ranks == []
