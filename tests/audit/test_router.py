"""The audit of an in-process router: what the engine reports against what was predicted."""

import random

import pytest

from kvplug import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Rank,
    RouterConfig,
    codec,
)
from kvplug.audit.expectation import Verdict
from kvplug.audit.router import AuditedRouter, Usage
from kvplug.errors import ConfigError
from kvplug.records import read_payloads

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
    router = AuditedRouter(RouterConfig(block_size=BLOCK), clock=clock)
    router.add_worker("a")
    return router


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
    decision = router.route(tokens)
    router.expect(decision)
    return decision.request_id


def answer(router, request_id, cached_blocks, prompt=PROMPT):
    router.finish(request_id)
    cached_tokens = None if cached_blocks is None else cached_blocks * BLOCK
    router.answered(request_id, Usage(len(prompt), cached_tokens))


def ledger(router, clock):
    """What is known when the events have had their time."""
    clock.now_s += LATER_S
    return router.ledgers()[RANK]


def verdict(router, clock):
    [(verdict, count)] = ledger(router, clock).num_by_verdict.items()
    assert count == 1
    return verdict


@pytest.mark.parametrize("cached_blocks", [2, 3, 4])
def test_a_rank_that_has_what_was_predicted_or_more_is_right(router, clock, cached_blocks):
    say(router, stored(PROMPT[: 2 * BLOCK]))
    answer(router, expect(router), cached_blocks)
    assert verdict(router, clock) is Verdict.AS_PREDICTED


def test_a_rank_that_has_less_than_its_events_said_is_wrong(router, clock):
    say(router, stored(PROMPT))
    answer(router, expect(router), 1)
    assert verdict(router, clock) is Verdict.WRONG_RESIDENT


def test_blocks_that_an_earlier_request_was_to_create_are_told_apart(router, clock):
    say(router, stored(PROMPT[: 2 * BLOCK]))
    router.abandon(expect(router), "failed")
    answer(router, expect(router), 2)
    assert ledger(router, clock).num_by_verdict == {Verdict.WRONG_SPECULATIVE: 1}


def test_a_prompt_that_is_cached_as_a_whole_is_reported_a_block_short(router, clock):
    prompt = PROMPT[: 4 * BLOCK]
    say(router, stored(prompt))
    answer(router, expect(router, prompt), 3, prompt)
    assert verdict(router, clock) is Verdict.AS_PREDICTED
    assert ledger(router, clock).incorrect_rate == 0


def test_an_eviction_before_the_request_was_scheduled_is_no_mistake(router, clock):
    say(router, stored(PROMPT))
    request_id = expect(router)
    say(router, removed(3), removed(2))
    answer(router, request_id, 2)
    assert verdict(router, clock) is Verdict.EVICTED


def test_an_eviction_is_seen_though_the_same_batch_stores_the_block_again(router, clock):
    say(router, stored(PROMPT))
    request_id = expect(router)
    applied = say(router, removed(3), removed(2), stored(PROMPT, start=2))
    assert (applied.num_removed, applied.num_stored, applied.rejected.total()) == (2, 2, 0)
    answer(router, request_id, 2)
    assert verdict(router, clock) is Verdict.EVICTED


def test_a_speculative_block_that_came_and_went_was_evicted(router, clock):
    expect(router)
    request_id = expect(router)  # counts on the blocks of the first
    say(router, stored(PROMPT), removed(3))
    answer(router, request_id, 3)
    assert verdict(router, clock) is Verdict.EVICTED


def test_a_request_that_overtook_the_one_that_it_counts_on_is_told_apart(router, clock):
    first, second = expect(router), expect(router)
    answer(router, second, 0)
    clock.now_s += SOON_S
    assert router.ledgers()[RANK].num_audited == 0  # the first may still explain it
    answer(router, first, 4)
    clock.now_s += LATER_S
    assert ledger(router, clock).num_by_verdict == {
        Verdict.OVERTAKEN: 1,
        Verdict.AS_PREDICTED: 1,
    }


def test_nobody_is_waited_for_for_ever(router, clock):
    expect(router)
    answer(router, expect(router), 0)
    clock.now_s += 60.0
    assert verdict(router, clock) is Verdict.WRONG_SPECULATIVE


def test_one_surplus_excuses_one_shortfall(router, clock):
    first, second, third = expect(router), expect(router), expect(router)
    answer(router, second, 0)
    answer(router, third, 0)
    answer(router, first, 4)
    clock.now_s += LATER_S
    assert ledger(router, clock).num_by_verdict == {
        Verdict.OVERTAKEN: 1,
        Verdict.WRONG_SPECULATIVE: 1,
        Verdict.AS_PREDICTED: 1,
    }


def test_a_surplus_of_a_request_that_was_over_excuses_nothing(router, clock):
    first = expect(router)
    answer(router, first, 4)
    clock.now_s += 0.1
    answer(router, expect(router), 0)
    assert ledger(router, clock).num_by_verdict[Verdict.WRONG_SPECULATIVE] == 1


def test_an_eviction_may_become_known_after_the_answer(router, clock):
    say(router, stored(PROMPT))
    answer(router, expect(router), 2)
    say(router, removed(3), removed(2), stored(PROMPT, start=2))
    assert verdict(router, clock) is Verdict.EVICTED


@pytest.mark.parametrize(
    ("sent_s", "expected"),
    [
        (1009.5, Verdict.LATE_EVENT),
        (1010.5, Verdict.EVICTED),
        (1011.5, Verdict.WRONG_RESIDENT),
    ],
)
def test_an_event_counts_from_when_it_was_sent(router, clock, sent_s, expected):
    say(router, stored(PROMPT), ts=1000.0)  # the engine's clock is 1000 s ahead
    clock.now_s = 10.0
    request_id = expect(router)
    clock.now_s = 11.0
    answer(router, request_id, 2)
    clock.now_s = 13.0
    say(router, removed(3), removed(2), ts=sent_s)
    assert verdict(router, clock) is expected


def test_a_shortfall_is_judged_when_the_events_of_its_time_have_come(router, clock):
    say(router, stored(PROMPT), ts=1000.0)
    answer(router, expect(router), 2)
    clock.now_s = SOON_S
    assert router.ledgers()[RANK].num_audited == 0
    say(router, stored([7] * BLOCK), ts=1000.0 + SOON_S)
    clock.now_s += SOON_S
    assert dict(router.ledgers()[RANK].num_by_verdict) == {Verdict.WRONG_RESIDENT: 1}


def test_an_eviction_long_after_the_answer_excuses_nothing(router, clock):
    say(router, stored(PROMPT))
    answer(router, expect(router), 2)
    clock.now_s += LATER_S
    router.ledgers()
    say(router, removed(3), removed(2))
    assert verdict(router, clock) is Verdict.WRONG_RESIDENT


def test_an_eviction_of_less_than_what_is_missing_excuses_nothing(router, clock):
    say(router, stored(PROMPT))
    request_id = expect(router)
    say(router, removed(3))
    answer(router, request_id, 1)
    assert verdict(router, clock) is Verdict.WRONG_RESIDENT


@pytest.mark.parametrize("forget", ["event", "disconnection"])
def test_a_cache_that_was_cleared_meanwhile_is_no_mistake(router, clock, forget):
    say(router, stored(PROMPT))
    request_id = expect(router)
    if forget == "event":
        say(router, AllBlocksCleared())
    else:
        router.clear(RANK)
    answer(router, request_id, 0)
    assert verdict(router, clock) is Verdict.EVICTED


def test_errors_are_counted_in_blocks_of_the_prediction(router, clock):
    say(router, stored(PROMPT[: 2 * BLOCK]))
    for cached_blocks in (0, 2, 4):
        answer(router, expect(router, PROMPT), cached_blocks)
        router.index.speculative.forget(0)
    by_bound = dict(ledger(router, clock).error_histogram)
    assert {bound: by_bound[bound] for bound in ("-4", "-1", "0", "1", "4", "+Inf")} == {
        "-4": 0,
        "-1": 1,
        "0": 2,
        "1": 2,
        "4": 3,
        "+Inf": 3,
    }


def test_accuracy_starts_at_one_half_and_follows_what_is_found(router, clock):
    assert router.accuracy(RANK) == 0.5
    say(router, stored(PROMPT))
    for _ in range(300):
        answer(router, expect(router), 1)
    assert 0.24 < ledger(router, clock).accuracy < 0.31
    for _ in range(300):
        answer(router, expect(router), 4)
    ledger(router, clock)
    assert router.accuracy(RANK) > 0.95


@pytest.mark.parametrize(
    ("usage", "reason"),
    [
        (None, "no_usage"),
        (Usage(len(PROMPT), None), "no_cached_tokens"),
        (Usage(len(PROMPT) + 1, 4), "other_prompt_tokens"),
    ],
)
def test_an_answer_that_says_nothing_is_not_audited(router, clock, usage, reason):
    router.answered(expect(router), usage)
    result = ledger(router, clock)
    assert result.num_audited == 0
    assert dict(result.num_skipped) == {reason: 1}


@pytest.mark.parametrize("cached_tokens", [-1, 16, 17, 10**30])
@pytest.mark.parametrize("prompt", [PROMPT[:16], PROMPT[:3], []])
def test_an_engine_may_report_what_it_likes(router, clock, prompt, cached_tokens):
    for _ in range(2):
        request_id = expect(router, prompt)
        router.finish(request_id)
        router.answered(request_id, Usage(len(prompt), cached_tokens))
    assert ledger(router, clock).num_audited == 2


def test_a_request_that_failed_is_not_audited(router, clock):
    request_id = expect(router)
    router.abandon(request_id, "failed")
    router.answered(request_id, Usage(len(PROMPT), 0))
    assert ledger(router, clock).num_audited == 0
    assert dict(ledger(router, clock).num_skipped) == {"failed": 1}


def test_a_sample_is_a_share_of_all(clock):
    router = AuditedRouter(
        RouterConfig(block_size=BLOCK), sample=0.25, clock=clock, random_=random.Random(1)
    )
    router.add_worker("a")
    for _ in range(400):
        answer(router, expect(router), 0)
    assert 70 < ledger(router, clock).num_audited < 130
    with pytest.raises(ConfigError, match=r"in \[0, 1\], got 2"):
        AuditedRouter(sample=2)


def test_it_is_known_whether_prompts_turn_up_in_the_index(router, clock):
    answer(router, expect(router), 0)
    say(router, stored(PROMPT))
    other = [1000 + token for token in PROMPT]
    answer(router, expect(router, other), 0)
    assert list(ledger(router, clock).was_stored) == [True, False]


def test_who_never_answers_is_forgotten(clock):
    router = AuditedRouter(RouterConfig(block_size=BLOCK), max_expected=2, clock=clock)
    router.add_worker("a")
    for _ in range(5):
        expect(router)
    assert dict(ledger(router, clock).num_skipped) == {"never_answered": 3}


def run_of_messages(*batches):
    """Messages in the form in which a follower hands plain ones on."""
    payloads = [
        codec.encode(EventBatch(events=events, ts=ts, dp_rank=0)) for ts, *events in batches
    ]
    records = read_payloads(payloads)
    assert records.num_payloads == len(payloads)
    return records


def test_runs_of_plain_messages_are_looked_at_as_batches_are(router, clock):
    router.apply_records(RANK, run_of_messages((1000.0, stored(PROMPT))))
    request_id = expect(router)
    clock.now_s = 0.5
    again = run_of_messages(
        (1000.1, removed(3), removed(2)), (1000.2, stored(PROMPT, start=2), removed(3))
    )
    applied = router.apply_records(RANK, again)
    assert (applied.num_removed, applied.num_stored) == (3, 2)
    answer(router, request_id, 2)
    assert verdict(router, clock) is Verdict.EVICTED
    router.index.check()


def test_a_clear_in_a_run_of_messages_is_no_mistake(router, clock):
    router.apply_records(RANK, run_of_messages((0.0, stored(PROMPT))))
    request_id = expect(router)
    applied = router.apply_records(RANK, run_of_messages((0.0, AllBlocksCleared())))
    assert applied.was_cleared
    answer(router, request_id, 0)
    assert verdict(router, clock) is Verdict.EVICTED


def state_of(router):
    """All that the audit keeps of ranks."""
    ranks = {*router._ledgers, *router._watched, *router._times._clocks}
    ranks |= {rank for rank, _ in router._surpluses._surpluses}
    ranks |= {each.rank for each in router._expected.values()}
    return ranks | {answer.expectation.rank for answer in router._answers}


def test_a_worker_that_is_removed_is_forgotten(router, clock):
    for number in range(20):
        worker = f"b{number}"
        router.add_worker(worker)
        for rank in (Rank(worker), RANK):
            router.apply(rank, EventBatch(events=(stored(PROMPT[:BLOCK]),), ts=1.0))
        running, answered, richer = [router.route(PROMPT, workers=[worker]) for _ in range(3)]
        for decision in (running, answered, richer):
            router.expect(decision)
        answer(router, answered.request_id, 1)
        answer(router, richer.request_id, 4)
        router.remove_worker(worker)
        router.answered(running.request_id, None)  # it comes late
        router.skip(running.rank, "no_token_ids")
        router.apply(running.rank, EventBatch(events=(), ts=2.0))
        router.clear(running.rank)
    assert state_of(router) <= {RANK}
    clock.now_s += LATER_S
    assert set(router.ledgers()) <= {RANK}
    assert state_of(router) <= {RANK}


def test_a_worker_that_comes_back_is_audited_anew(router, clock):
    say(router, stored(PROMPT), ts=1000.0)
    answer(router, expect(router), 1)
    assert ledger(router, clock).num_wrong == 1
    router.remove_worker("a")
    assert router.ledgers() == {}
    router.add_worker("a")
    assert router.accuracy(RANK) == 0.5
    say(router, stored(PROMPT), ts=5000.0)
    answer(router, expect(router), 4)
    assert verdict(router, clock) is Verdict.AS_PREDICTED


def test_nothing_is_kept_of_ranks_that_are_not_members(router):
    for number in range(1, 20):
        rank = Rank("a", number)
        batch = EventBatch(events=(stored(PROMPT), removed(0)), ts=1.0)
        assert router.apply(rank, batch).rejected
        router.apply_records(rank, run_of_messages((1.0, stored(PROMPT))))
        router.clear(rank)
        router.skip(rank, "no_token_ids")
        router.accuracy(rank)
    assert state_of(router) <= {RANK}
