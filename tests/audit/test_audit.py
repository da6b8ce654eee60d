"""The audit of an in-process router: what the engine reports against what was predicted."""

import random

import pytest

from kvplug import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Rank,
    Router,
    RouterConfig,
    codec,
)
from kvplug.audit.audit import Audit, Usage
from kvplug.audit.expectation import Verdict
from kvplug.errors import ConfigError
from kvplug.hashing import as_tokens
from kvplug.records import read_payloads
from kvplug.router import followed_fleet

RANK = Rank("a")
BLOCK = 4
PROMPT = list(range(4 * BLOCK + 1))  # four full blocks and one token
SOON_S, LATER_S = 5.0, 20.0


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def router(clock):
    router = Router(RouterConfig(block_size=BLOCK), clock=clock)
    router.add_worker("a")
    return router


@pytest.fixture
def audit(router):
    return Audit(router)


def stored(tokens, *, start=0):
    """The full blocks of a prompt from `start` on, named by their place."""
    num_blocks = len(tokens) // BLOCK
    return BlockStored(
        block_hashes=tuple(100 + i for i in range(start, num_blocks)),
        token_ids=tuple(tokens[start * BLOCK : num_blocks * BLOCK]),
        block_size=BLOCK,
        parent=100 + start - 1 if start else None,
    )


def removed(*places):
    return BlockRemoved(block_hashes=tuple(100 + place for place in places))


def say(router, *events, ts=0.0):
    return router.apply(RANK, EventBatch(events=events, ts=ts))


def expect(router, tokens=PROMPT):
    return router.route(tokens).request_id


def answer(audit, request_id, cached_blocks, prompt=PROMPT):
    audit.router.finish(request_id)
    cached_tokens = None if cached_blocks is None else cached_blocks * BLOCK
    audit.answered(request_id, Usage(len(prompt), cached_tokens))


def ledger(audit, clock):
    """What is known when the events have had their time."""
    clock.now_s += LATER_S
    return audit.ledgers()[RANK]


def verdict(audit, clock):
    [(verdict, count)] = ledger(audit, clock).num_by_verdict.items()
    assert count == 1
    return verdict


@pytest.mark.parametrize("cached_blocks", [2, 3, 4])
def test_a_rank_that_has_what_was_predicted_or_more_is_right(router, audit, clock, cached_blocks):
    say(router, stored(PROMPT[: 2 * BLOCK]))
    answer(audit, expect(router), cached_blocks)
    assert verdict(audit, clock) is Verdict.AS_PREDICTED


def test_a_rank_that_has_less_than_its_events_said_is_wrong(router, audit, clock):
    say(router, stored(PROMPT))
    answer(audit, expect(router), 1)
    assert verdict(audit, clock) is Verdict.WRONG_RESIDENT


def test_blocks_that_an_earlier_request_was_to_create_are_told_apart(router, audit, clock):
    say(router, stored(PROMPT[: 2 * BLOCK]))
    audit.abandon(expect(router), "failed")
    answer(audit, expect(router), 2)
    assert ledger(audit, clock).num_by_verdict == {Verdict.WRONG_SPECULATIVE: 1}


def test_a_prompt_that_is_cached_as_a_whole_is_reported_a_block_short(router, audit, clock):
    prompt = PROMPT[: 4 * BLOCK]
    say(router, stored(prompt))
    answer(audit, expect(router, prompt), 3, prompt)
    assert verdict(audit, clock) is Verdict.AS_PREDICTED
    assert ledger(audit, clock).incorrect_rate == 0


def test_an_eviction_before_the_request_was_scheduled_is_no_mistake(router, audit, clock):
    say(router, stored(PROMPT))
    request_id = expect(router)
    say(router, removed(3), removed(2))
    answer(audit, request_id, 2)
    assert verdict(audit, clock) is Verdict.EVICTED


def test_an_eviction_is_seen_though_the_same_batch_stores_the_block_again(router, audit, clock):
    say(router, stored(PROMPT))
    request_id = expect(router)
    applied = say(router, removed(3), removed(2), stored(PROMPT, start=2))
    assert (applied.num_removed, applied.num_stored, applied.rejected.total()) == (2, 2, 0)
    answer(audit, request_id, 2)
    assert verdict(audit, clock) is Verdict.EVICTED


def test_a_speculative_block_that_came_and_went_was_evicted(router, audit, clock):
    expect(router)
    request_id = expect(router)  # counts on the blocks of the first
    say(router, stored(PROMPT), removed(3))
    answer(audit, request_id, 3)
    assert verdict(audit, clock) is Verdict.EVICTED


def test_a_request_that_overtook_the_one_that_it_counts_on_is_told_apart(router, audit, clock):
    first, second = expect(router), expect(router)
    answer(audit, second, 0)
    clock.now_s += SOON_S
    assert audit.ledgers()[RANK].num_audited == 0  # the first may still explain it
    answer(audit, first, 4)
    clock.now_s += LATER_S
    assert ledger(audit, clock).num_by_verdict == {
        Verdict.OVERTAKEN: 1,
        Verdict.AS_PREDICTED: 1,
    }


def test_nobody_is_waited_for_for_ever(router, audit, clock):
    expect(router)
    answer(audit, expect(router), 0)
    clock.now_s += 60.0
    assert verdict(audit, clock) is Verdict.WRONG_SPECULATIVE


def test_one_surplus_excuses_one_shortfall(router, audit, clock):
    first, second, third = expect(router), expect(router), expect(router)
    answer(audit, second, 0)
    answer(audit, third, 0)
    answer(audit, first, 4)
    clock.now_s += LATER_S
    assert ledger(audit, clock).num_by_verdict == {
        Verdict.OVERTAKEN: 1,
        Verdict.WRONG_SPECULATIVE: 1,
        Verdict.AS_PREDICTED: 1,
    }


def test_a_surplus_of_a_request_that_was_over_excuses_nothing(router, audit, clock):
    first = expect(router)
    answer(audit, first, 4)
    clock.now_s += 0.1
    answer(audit, expect(router), 0)
    assert ledger(audit, clock).num_by_verdict[Verdict.WRONG_SPECULATIVE] == 1


def test_an_eviction_may_become_known_after_the_answer(router, audit, clock):
    say(router, stored(PROMPT))
    answer(audit, expect(router), 2)
    say(router, removed(3), removed(2), stored(PROMPT, start=2))
    assert verdict(audit, clock) is Verdict.EVICTED


@pytest.mark.parametrize(
    ("sent_s", "expected"),
    [
        (1009.5, Verdict.LATE_EVENT),
        (1010.5, Verdict.EVICTED),
        (1011.5, Verdict.WRONG_RESIDENT),
    ],
)
def test_an_event_counts_from_when_it_was_sent(router, audit, clock, sent_s, expected):
    say(router, stored(PROMPT), ts=1000.0)  # the engine's clock is 1000 s ahead
    clock.now_s = 10.0
    request_id = expect(router)
    clock.now_s = 11.0
    answer(audit, request_id, 2)
    clock.now_s = 13.0
    say(router, removed(3), removed(2), ts=sent_s)
    assert verdict(audit, clock) is expected


def test_the_lag_of_events_is_what_the_fastest_did_not_take(router, audit, clock):
    assert audit.event_lag_s(RANK) is None
    say(router, stored(PROMPT), ts=1000.0)
    assert audit.event_lag_s(RANK) == 0.0
    clock.now_s = 5.0
    say(router, removed(3), ts=1001.5)
    assert audit.event_lag_s(RANK) == 3.5
    say(router, removed(2), ts=1005.0)
    assert audit.event_lag_s(RANK) == 0.0
    say(router, removed(1))  # without a timestamp nothing is known
    assert audit.event_lag_s(RANK) == 0.0
    router.remove_worker("a")
    assert audit.event_lag_s(RANK) is None


def test_a_shortfall_is_judged_when_the_events_of_its_time_have_come(router, audit, clock):
    say(router, stored(PROMPT), ts=1000.0)
    answer(audit, expect(router), 2)
    clock.now_s = SOON_S
    assert audit.ledgers()[RANK].num_audited == 0
    say(router, stored([7] * BLOCK), ts=1000.0 + SOON_S)
    clock.now_s += SOON_S
    assert dict(audit.ledgers()[RANK].num_by_verdict) == {Verdict.WRONG_RESIDENT: 1}


def test_an_eviction_long_after_the_answer_excuses_nothing(router, audit, clock):
    say(router, stored(PROMPT))
    answer(audit, expect(router), 2)
    clock.now_s += LATER_S
    audit.ledgers()
    say(router, removed(3), removed(2))
    assert verdict(audit, clock) is Verdict.WRONG_RESIDENT


def test_an_eviction_of_less_than_what_is_missing_excuses_nothing(router, audit, clock):
    say(router, stored(PROMPT))
    request_id = expect(router)
    say(router, removed(3))
    answer(audit, request_id, 1)
    assert verdict(audit, clock) is Verdict.WRONG_RESIDENT


@pytest.mark.parametrize("forget", ["event", "disconnection"])
def test_a_cache_that_was_cleared_meanwhile_is_no_mistake(router, audit, clock, forget):
    say(router, stored(PROMPT))
    request_id = expect(router)
    if forget == "event":
        say(router, AllBlocksCleared())
    else:
        router.clear(RANK)
    answer(audit, request_id, 0)
    assert verdict(audit, clock) is Verdict.EVICTED


def test_errors_are_counted_in_blocks_of_the_prediction(router, audit, clock):
    say(router, stored(PROMPT[: 2 * BLOCK]))
    for cached_blocks in (0, 2, 4):
        answer(audit, expect(router, PROMPT), cached_blocks)
        router.index.speculative.forget(0)
    by_bound = dict(ledger(audit, clock).error_histogram)
    assert {bound: by_bound[bound] for bound in ("-4", "-1", "0", "1", "4", "+Inf")} == {
        "-4": 0,
        "-1": 1,
        "0": 2,
        "1": 2,
        "4": 3,
        "+Inf": 3,
    }


def test_accuracy_starts_at_one_half_and_follows_what_is_found(router, audit, clock):
    assert audit.accuracy(RANK) == 0.5
    say(router, stored(PROMPT))
    for _ in range(300):
        answer(audit, expect(router), 1)
    assert 0.24 < ledger(audit, clock).accuracy < 0.31
    for _ in range(300):
        answer(audit, expect(router), 4)
    ledger(audit, clock)
    assert audit.accuracy(RANK) > 0.95


@pytest.mark.parametrize(
    ("usage", "reason"),
    [
        (None, "no_usage"),
        (Usage(len(PROMPT), None), "no_cached_tokens"),
        (Usage(len(PROMPT) + 1, 4), "other_prompt_tokens"),
    ],
)
def test_an_answer_that_says_nothing_is_not_audited(router, audit, clock, usage, reason):
    audit.answered(expect(router), usage)
    result = ledger(audit, clock)
    assert result.num_audited == 0
    assert dict(result.num_skipped) == {reason: 1}


@pytest.mark.parametrize("cached_tokens", [-1, 16, 17, 10**30])
@pytest.mark.parametrize("prompt", [PROMPT[:16], PROMPT[:3], []])
def test_an_engine_may_report_what_it_likes(router, audit, clock, prompt, cached_tokens):
    for _ in range(2):
        request_id = expect(router, prompt)
        router.finish(request_id)
        audit.answered(request_id, Usage(len(prompt), cached_tokens))
    assert ledger(audit, clock).num_audited == 2


def test_a_request_that_failed_is_not_audited(router, audit, clock):
    request_id = expect(router)
    audit.abandon(request_id, "failed")
    audit.answered(request_id, Usage(len(PROMPT), 0))
    assert ledger(audit, clock).num_audited == 0
    assert dict(ledger(audit, clock).num_skipped) == {"failed": 1}


def test_a_sample_is_a_share_of_all(router, clock):
    audit = Audit(router, sample=0.25, random_=random.Random(1))
    for _ in range(400):
        answer(audit, expect(router), 0)
    assert 70 < ledger(audit, clock).num_audited < 130
    with pytest.raises(ConfigError, match=r"in \[0, 1\], got 2"):
        Audit(router, sample=2)


def test_it_is_known_whether_prompts_turn_up_in_the_index(router, audit, clock):
    answer(audit, expect(router), 0)
    say(router, stored(PROMPT))
    other = [1000 + token for token in PROMPT]
    answer(audit, expect(router, other), 0)
    assert list(ledger(audit, clock).was_stored) == [True, False]


def test_who_never_answers_is_forgotten(router, clock):
    audit = Audit(router, max_expected=2)
    for _ in range(5):
        expect(router)
    assert dict(ledger(audit, clock).num_skipped) == {"never_answered": 3}


def run_of_messages(*batches):
    """Messages in the form in which a follower hands plain ones on."""
    payloads = [
        codec.encode(EventBatch(events=events, ts=ts, dp_rank=0)) for ts, *events in batches
    ]
    records = read_payloads(payloads)
    assert records.num_payloads == len(payloads)
    return records


def test_runs_of_plain_messages_are_looked_at_as_batches_are(router, audit, clock):
    router.apply_records(RANK, run_of_messages((1000.0, stored(PROMPT))))
    request_id = expect(router)
    clock.now_s = 0.5
    again = run_of_messages(
        (1000.1, removed(3), removed(2)), (1000.2, stored(PROMPT, start=2), removed(3))
    )
    applied = router.apply_records(RANK, again)
    assert (applied.num_removed, applied.num_stored) == (3, 2)
    answer(audit, request_id, 2)
    assert verdict(audit, clock) is Verdict.EVICTED
    router.index.check()


def test_a_clear_in_a_run_of_messages_is_no_mistake(router, audit, clock):
    router.apply_records(RANK, run_of_messages((0.0, stored(PROMPT))))
    request_id = expect(router)
    applied = router.apply_records(RANK, run_of_messages((0.0, AllBlocksCleared())))
    assert applied.was_cleared
    answer(audit, request_id, 0)
    assert verdict(audit, clock) is Verdict.EVICTED


def test_blocks_that_a_run_of_plain_messages_takes_in_several_slices_are_seen(
    router, audit, clock, monkeypatch
):
    monkeypatch.setattr(followed_fleet, "BLOCKS_PER_SLICE", 1)
    router.apply_records(RANK, run_of_messages((0.0, stored(PROMPT))))
    request_id = expect(router)
    router.apply_records(RANK, run_of_messages((0.0, removed(3)), (0.0, removed(2), removed(1))))
    answer(audit, request_id, 1)
    assert verdict(audit, clock) is Verdict.EVICTED


@pytest.mark.parametrize("way", ["one", "hashed", "many"])
def test_requests_are_expected_however_they_are_routed(router, audit, clock, way):
    say(router, stored(PROMPT[: 2 * BLOCK]))
    hashes = router.index.hasher.sequence_hashes(as_tokens(PROMPT))
    decisions = {
        "one": lambda: [router.route(PROMPT), router.route(PROMPT)],
        "hashed": lambda: [router.route_hashed(hashes, len(PROMPT)) for _ in range(2)],
        "many": lambda: router.route_many([PROMPT, PROMPT]),
    }[way]()
    expected = [audit._expected[decision.request_id] for decision in decisions]
    assert [(each.predicted, each.resident) for each in expected] == [(2, 2), (4, 2)]
    assert all(each.sequence_hashes.tolist() == hashes.tolist() for each in expected)
    assert all(each.num_tokens == len(PROMPT) for each in expected)


def test_the_hashes_are_those_of_the_decision(router, audit):
    request = router.load.request(expect(router))
    [expectation] = audit._expected.values()
    assert expectation.sequence_hashes is request.sequence_hashes


def test_a_request_that_is_excluded_is_counted_and_not_audited(router, clock):
    audit = Audit(router, sample=0.5, random_=random.Random(1))
    say(router, stored(PROMPT))
    for _ in range(20):
        decision = router.route(PROMPT)
        audit.exclude(decision, "by its kind")
        audit.answered(decision.request_id, Usage(len(PROMPT), 0))
    assert dict(ledger(audit, clock).num_skipped) == {"by its kind": 20}
    assert ledger(audit, clock).num_audited == 0
    assert not audit.watches(RANK)


def test_a_request_id_that_is_used_again_is_of_the_last_request(router, audit, clock):
    say(router, stored(PROMPT))
    for _ in range(2):
        router.route(PROMPT, request_id="mine")
        router.finish("mine")
    audit.answered("mine", Usage(len(PROMPT), 4 * BLOCK))
    assert dict(ledger(audit, clock).num_skipped) == {"never_answered": 1}
    assert ledger(audit, clock).num_by_verdict == {Verdict.AS_PREDICTED: 1}
    assert not audit.watches(RANK)


def test_requests_are_watched_until_their_verdict(router, audit, clock):
    assert not audit.watches(RANK)
    say(router, stored(PROMPT))
    request_id = expect(router)
    assert audit.watches(RANK)
    answer(audit, request_id, 2)
    assert audit.watches(RANK)
    ledger(audit, clock)
    assert not audit.watches(RANK)


def with_all_kinds_of_state(router, audit):
    """A rank of which a ledger, a clock, requests, answers and a surplus are known."""
    say(router, stored(PROMPT), ts=1000.0)
    answer(audit, expect(router), 1)
    answer(audit, expect(router, [7] * 9), 2, [7] * 9)
    expect(router)
    assert audit.ledgers()
    assert state_of(audit) != [{}] * len(state_of(audit))
    assert all(state_of(audit))


def state_of(audit):
    """All that is kept by rank or of requests."""
    times, surpluses = audit._times, audit._surpluses._surpluses
    by_rank = [audit._ledgers, audit._watched, times._offset_s, times._heard_until_s, surpluses]
    return [*by_rank, audit._expected, audit._answers]


def test_all_of_a_worker_is_forgotten_when_it_is_removed(router, audit):
    with_all_kinds_of_state(router, audit)
    router.remove_worker("a")
    assert not any(state_of(audit))
    assert audit.ledgers() == {}
    assert audit.accuracy(RANK) == 0.5


def test_what_is_known_of_other_workers_stays(router, audit):
    with_all_kinds_of_state(router, audit)
    before = [list(each) for each in state_of(audit)]
    router.add_worker("b")
    router.apply(Rank("b"), EventBatch(events=(stored(PROMPT),), ts=2000.0))
    for _ in range(2):
        router.route(PROMPT, workers=["b"])
    assert [list(each) for each in state_of(audit)] != before
    router.remove_worker("b")
    assert [list(each) for each in state_of(audit)] == before


def test_a_worker_that_returns_begins_with_an_empty_ledger(router, audit):
    with_all_kinds_of_state(router, audit)
    router.remove_worker("a")
    router.add_worker("a")
    assert audit.ledgers() == {}


@pytest.mark.parametrize("how", ["cleared", "removed and added"])
def test_an_engine_that_returns_may_have_another_clock(router, audit, clock, how):
    with_all_kinds_of_state(router, audit)
    if how == "cleared":
        router.clear(RANK)
    else:
        router.remove_worker("a")
        router.add_worker("a")
    clock.now_s = 10.0
    say(router, stored(PROMPT), ts=510.0)  # 500 s ahead instead of 1000, not 500 s late
    assert audit._times.heard_until(RANK) == 10.0


@pytest.mark.parametrize("what", ["batch", "records", "clear", "removed"])
def test_nothing_is_kept_of_ranks_that_are_not_in_the_fleet(router, audit, what):
    unknown, other = Rank("unknown"), Rank("a", 1)
    decision = router.route(PROMPT)
    router.remove_worker("a")
    for rank in (unknown, other, RANK):
        if what == "batch":
            router.apply(rank, EventBatch(events=(stored(PROMPT), removed(3)), ts=1000.0))
        elif what == "records":
            router.apply_records(rank, run_of_messages((1000.0, stored(PROMPT), removed(3))))
        elif what == "clear":
            assert router.clear(rank) == 0
        else:
            audit.exclude(decision, "by its kind")
            audit.answered(decision.request_id, Usage(len(PROMPT), 0))
            audit.abandon(decision.request_id, "failed")
            assert audit.accuracy(rank) == 0.5
    assert not any(state_of(audit))
    assert audit.ledgers() == {}


def test_a_request_that_migrates_is_audited_on_its_new_rank(router, audit, clock):
    router.add_worker("b")
    say(router, stored(PROMPT[: 2 * BLOCK]))
    request_id = router.route(PROMPT, worker="b").request_id
    assert router.migrate(request_id, PROMPT).decision.rank == RANK
    answer(audit, request_id, 1)
    assert verdict(audit, clock) is Verdict.WRONG_RESIDENT
    left = audit.ledgers()[Rank("b")]
    assert (dict(left.num_skipped), dict(left.num_by_verdict)) == ({"moved": 1}, {})
