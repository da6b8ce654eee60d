"""Audit: the decisions of a Router, compared with what the engines report.

In:  decisions and events as the router reports them, the usage of answers.   Out: a ledger per
rank.

    audit = Audit(router)
    decision = router.route(tokens)
    ...                                             # the engine answers
    audit.answered(decision.request_id, Usage(prompt_tokens=.., cached_tokens=..))

A shortfall is judged a moment after the answer: the event that a block was evicted before the
request was scheduled travels by another way than the answer, and may arrive later.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from kvplug.audit import contradictions
from kvplug.audit.contradictions import Blocks, Scope
from kvplug.audit.evidence import EventTimes, Surpluses
from kvplug.audit.expectation import TOLERANCE_S, Expectation, Verdict
from kvplug.audit.ledger import RankLedger
from kvplug.errors import ConfigError
from kvplug.events import Rank
from kvplug.hashing import Hashes
from kvplug.kernels.prefix_lengths import ANY
from kvplug.router.core import Router
from kvplug.router.decider import Decision
from kvplug.router.load import ActiveRequest
from kvplug.router.observer import Arrival, RouterObserver

logger = logging.getLogger(__name__)

# vLLM publishes with the step that scheduled the request, SGLang at latest when it is idle.
_GRACE_S = 1.0
# For what may explain a shortfall: late events, the answer of another request. It is looked for
# after 1, 2, 4 and 8 s, as an engine without events leaves every shortfall unexplained.
_MAX_WAIT_S = 15.0
_NUM_WAITS: Final = 4
# Judged in one piece. A request or event that comes meanwhile waits for so many.
_ANSWERS_PER_SLICE = 16


class Usage(NamedTuple):
    """What an engine says about a request; `cached_tokens` is None where it does not say."""

    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int | None = None


class _Answer(NamedTuple):
    due_s: float
    expectation: Expectation
    cached_tokens: int | None


class _Answers:
    """Answers without a verdict: add one for a wait, take one that is due.

    All of a queue wait equally long, so that the first one is due first.
    """

    def __init__(self) -> None:
        self._queues = [deque[_Answer]() for _ in range(_NUM_WAITS)]

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[_Answer]:
        return chain.from_iterable(self._queues)

    def add(
        self, expectation: Expectation, cached_tokens: int | None, now_s: float, wait: int
    ) -> None:
        """It is due after the wait of that number."""
        answer = _Answer(now_s + _GRACE_S * 2**wait, expectation, cached_tokens)
        self._queues[wait].append(answer)

    def take(self, now_s: float) -> tuple[_Answer, int] | None:
        """One that is due, with the number of its wait; None if there is none."""
        for wait, queue in enumerate(self._queues):
            if queue and queue[0].due_s <= now_s:
                return queue.popleft(), wait
        return None

    def forget(self, rank: Rank) -> None:
        """Those of a rank that left."""
        for wait, queue in enumerate(self._queues):
            kept = (each for each in queue if each.expectation.rank != rank)
            self._queues[wait] = deque(kept)


class Audit(RouterObserver):
    """Of requests: answered, abandon, exclude. What was found: ledgers, accuracy.

    It observes `router` from the beginning to the end. `sample` is the share of requests that is
    audited; of those that are never answered, the oldest are forgotten beyond `max_expected`. All
    of its state is guarded by the router's lock, and about members of the fleet only.
    """

    def __init__(
        self,
        router: Router,
        *,
        sample: float = 1.0,
        max_expected: int = 2**16,
        random_: random.Random | None = None,
    ) -> None:
        """ConfigError for a sample outside [0, 1]."""
        if not 0 <= sample <= 1:
            raise ConfigError(f"audit sample must be in [0, 1], got {sample}")
        self.router = router
        self._random = random_ or random.Random()
        self._sample, self._max_expected = sample, max_expected
        self._ledgers: dict[Rank, RankLedger] = {}
        self._expected: dict[str, Expectation] = {}
        # Of those, and of answers without a verdict, what may still lose blocks.
        self._watched: dict[Rank, set[Expectation]] = {}
        self._answers = _Answers()
        self._surpluses, self._times = Surpluses(), EventTimes()
        router.set_observer(self)

    def answered(self, request_id: str, usage: Usage | None) -> None:
        """The engine has answered to the end; None if the answer carries no usage."""
        self._settle()
        with self.router.locked():
            expectation = self._expected.pop(request_id, None)
            if expectation is None:
                return  # not sampled
            now_s = expectation.answered_s = self.router.clock()
            cached_tokens = self._readable(expectation, usage)
            if cached_tokens is None or expectation.error(cached_tokens) <= 0:
                self._unwatch(expectation)
            if cached_tokens is not None:
                self._surpluses.note(expectation, cached_tokens, now_s)
            self._answers.add(expectation, cached_tokens, now_s, 0)

    def abandon(self, request_id: str, reason: str) -> None:
        """The request will not be audited: it failed, ended early, or was sent elsewhere."""
        with self.router.locked():
            self._drop(request_id, reason)

    def exclude(self, decision: Decision, reason: str) -> None:
        """By its kind the request says nothing about the prediction; counted, sampled or not."""
        with self.router.locked():
            expectation = self._expected.pop(decision.request_id, None)
            if expectation is not None:
                self._unwatch(expectation)
            if decision.rank in self.router.fleet_index.numbers:
                self._ledger(decision.rank).skip(reason)

    def ledgers(self) -> dict[Rank, RankLedger]:
        """What is known now of each rank that was sent anything."""
        self._settle()
        with self.router.locked():
            return {rank: self._ledgers[rank] for rank in sorted(self._ledgers)}

    def event_lag_s(self, rank: Rank) -> float | None:
        """How old the rank's last events were when they were applied, estimated (of batches with
        timestamps, what the fastest one took is left out); None before one.
        """
        return self._times.lag_s(rank)

    def accuracy(self, rank: Rank) -> float:
        """What the index's knowledge of the rank has been worth of late, in (0, 1)."""
        with self.router.locked():
            ledger = self._ledgers.get(rank)
            return RankLedger().accuracy if ledger is None else ledger.accuracy

    def evidence_of(self, rank: Rank) -> RankEvidence:
        """What its answers tell of a rank's events."""
        return RankEvidence(self, rank)

    def confidence(self, rank: Rank) -> float:
        """What blocks of the rank are worth if not all of its events are known: its accuracy, or 0
        if its engine contradicts them.
        """
        is_contradicted = self.contradicted(rank) is not None
        return 0.0 if is_contradicted else self.accuracy(rank)

    def contradicted(self, rank: Rank) -> tuple[int, int] | None:
        """If the engine reuses again and again less than it says its device has: how many of the
        last requests that counted on it had less, and how many there were.
        """
        with self.router.locked():
            ledger = self._ledgers.get(rank)
            if ledger is None or contradictions.DEVICE not in ledger.contradictions:
                return None
            return ledger.contradictions.counts(contradictions.DEVICE)

    def on_decision(self, decision: Decision, request: ActiveRequest) -> None:
        """Remember what a decision counts on; a share of all, drawn by chance."""
        if self._random.random() >= self._sample:
            return
        resident = min(int(request.resident_blocks), decision.overlap_blocks)
        expectation = Expectation(
            rank=decision.rank,
            decided_s=request.routed_s,
            sequence_hashes=request.sequence_hashes,
            num_tokens=round(request.new_tokens + request.cached_tokens),
            block_size=decision.block_size,
            predicted=decision.overlap_blocks,
            resident=resident,
            num_lower=round(request.lower_tokens / decision.block_size),
            lowest=decision.overlap_blocks,
            lowest_then=decision.overlap_blocks,
            held=resident,
        )
        self._remember(decision.request_id, expectation)

    def on_moved(self, request_id: str) -> None:
        """Nothing was predicted for the rank that answers it."""
        self._drop(request_id, "moved")

    def watches(self, rank: Rank) -> bool:
        """Whether any request that counts on blocks of the rank has no verdict yet."""
        return rank in self._watched

    def before_removal(self, rank: Rank) -> None:
        """Note what the index has for requests in flight by now."""
        watched = self._watched.get(rank, ())
        # Of the others nothing can have come, and what went was seen.
        partial = [each for each in watched if each.held < each.lowest]
        for each, num_left in self._left_of(rank, partial):
            each.held = num_left

    def after_removal(self, arrival: Arrival) -> None:
        """Note what they have lost of that, those too that were routed meanwhile."""
        watched, sent_s = self._watched.get(arrival.rank, ()), self._times.sent_s(arrival)
        for each, num_left in self._left_of(arrival.rank, list(watched)):
            if num_left < each.held:
                each.lost(num_left, sent_s)
            each.held = num_left

    def on_applied(self, arrival: Arrival) -> None:
        """The rank's news have come so far."""
        self._times.heard(arrival, self.router.clock())

    def on_clear(self, rank: Rank) -> None:
        """The engine's clock may be another one from now on."""
        self._times.restart(rank)

    def on_rank_left(self, rank: Rank) -> None:
        """Forget the rank, and its requests with it."""
        self._ledgers.pop(rank, None)
        self._watched.pop(rank, None)
        self._times.forget(rank)
        self._surpluses.forget(rank)
        self._expected = {i: each for i, each in self._expected.items() if each.rank != rank}
        self._answers.forget(rank)

    def _ledger(self, rank: Rank) -> RankLedger:
        ledger = self._ledgers.get(rank)
        if ledger is None:
            ledger = self._ledgers[rank] = RankLedger()
        return ledger

    def _remember(self, request_id: str, expectation: Expectation) -> None:
        if request_id in self._expected:  # a caller's id, for another request by now
            self._drop(request_id, "never_answered")
        if len(self._expected) >= self._max_expected:
            self._drop(next(iter(self._expected)), "never_answered")
        self._expected[request_id] = expectation
        if expectation.predicted:
            self._watched.setdefault(expectation.rank, set()).add(expectation)

    def _drop(self, request_id: str, reason: str) -> None:
        expectation = self._expected.pop(request_id, None)
        if expectation is not None:
            self._unwatch(expectation)
            self._ledger(expectation.rank).skip(reason)

    def _unwatch(self, expectation: Expectation) -> None:
        watched = self._watched.get(expectation.rank, set())
        watched.discard(expectation)
        if not watched:
            self._watched.pop(expectation.rank, None)

    def _left_of(
        self, rank: Rank, expectations: list[Expectation]
    ) -> Iterator[tuple[Expectation, int]]:
        num_recomputed = self._num_recomputed(rank)
        prompts = [each.sequence_hashes[: each.lowest + num_recomputed] for each in expectations]
        return zip(expectations, self._resident(rank, prompts), strict=True)

    def _resident(self, rank: Rank, prompts: Sequence[Hashes]) -> list[int]:
        """For each prompt, the leading blocks that the rank's engine said it has, in any tier:
        expected ones do not count.
        """
        if not prompts:
            return []
        index, ends = self.router.index_of(rank), np.cumsum([len(hashes) for hashes in prompts])
        overlaps = index.overlap_many(np.concatenate(prompts), ends)
        number = index.numbers.number_of(rank)
        return [int(overlap.prefix_lengths[ANY, number]) for overlap in overlaps]

    def _readable(self, expectation: Expectation, usage: Usage | None) -> int | None:
        """The cached tokens, if they can be compared with what was expected."""
        ledger = self._ledger(expectation.rank)
        if usage is None:
            ledger.skip("no_usage")
            return None
        if not ledger.compare_counts(expectation.num_tokens, usage.prompt_tokens):
            ledger.skip("other_prompt_tokens")
            return None
        if usage.cached_tokens is None:
            ledger.skip("no_cached_tokens")
            ledger.num_silent += expectation.predicted > 0
            return None
        ledger.num_silent = 0
        return usage.cached_tokens

    def _settle(self) -> None:
        """Judge what is due, in slices: requests and events go in between."""
        now_s, is_more = self.router.clock(), True
        while is_more:
            with self.router.locked():
                is_more = self._settle_slice(now_s)

    def _settle_slice(self, now_s: float) -> bool:
        """Whether it may have left some."""
        for _ in range(_ANSWERS_PER_SLICE):
            taken = self._answers.take(now_s)
            if taken is None:
                return False
            (_, expectation, cached_tokens), wait = taken
            if self._must_wait(expectation, cached_tokens, now_s):
                following = min(wait + 1, _NUM_WAITS - 1)
                self._answers.add(expectation, cached_tokens, now_s, following)
            else:
                self._enter(expectation, cached_tokens)
        return True

    def _enter(self, expectation: Expectation, cached_tokens: int | None) -> None:
        ledger = self._ledger(expectation.rank)
        self._unwatch(expectation)
        if len(expectation.sequence_hashes):
            first = expectation.sequence_hashes[: 1 + self._num_recomputed(expectation.rank)]
            [num] = self._resident(expectation.rank, [first])
            ledger.was_stored.append(num > 0)
        if cached_tokens is not None:
            verdict = self._judge(expectation, cached_tokens)
            ledger.enter(expectation, cached_tokens, verdict)
            self._look_for_contradictions(ledger, expectation, verdict, cached_tokens)
            self._learn_recomputed(ledger, expectation, cached_tokens)

    def _num_recomputed(self, rank: Rank) -> int:
        return self.router.fleet_index.num_recomputed(rank)

    def _learn_recomputed(
        self, ledger: RankLedger, expectation: Expectation, cached_tokens: int
    ) -> None:
        """Whether the engine computes the last block that matches anew: every reuse is then one
        block shorter than what it holds.
        """
        if not 0 < expectation.predicted == expectation.resident:
            return
        rank, num_before = expectation.rank, self._num_recomputed(expectation.rank)
        num_now = num_before + ledger.note_error(expectation.error(cached_tokens))
        if num_now not in (num_before, -1, 2):
            ledger.contradictions.forget(contradictions.DEVICE)
            self.router.fleet_index.set_recomputed(rank, num_now)
        if self._num_recomputed(rank) > num_before:
            logger.info(
                "%s: the engine computes the last block of a prefix anew (EAGLE, MTP)", rank
            )
        elif self._num_recomputed(rank) < num_before:
            logger.info("%s: reuses the last block of a prefix again", rank)

    def _look_for_contradictions(
        self, ledger: RankLedger, expectation: Expectation, verdict: Verdict, cached_tokens: int
    ) -> None:
        resident = min(expectation.resident, expectation.limit)
        if not resident or verdict not in (Verdict.WRONG_RESIDENT, Verdict.AS_PREDICTED):
            return
        scope = self._scope_of(expectation)
        num_missing = max(0, resident - expectation.reported(cached_tokens))
        if ledger.contradictions.note(scope, num_missing):
            num_wrong, num_all = ledger.contradictions.counts(scope)
            text = "%s: in %d of the last %d requests that counted on %s it had less than it says"
            logger.warning(text, expectation.rank, num_wrong, num_all, scope)
            self._give_up(ledger, expectation.rank, scope)

    def _scope_of(self, expectation: Expectation) -> Scope:
        adapter = self.router.fleet_index.adapter_of(expectation.rank, expectation.sequence_hashes)
        if adapter:
            return Scope(Blocks.ADAPTER, adapter)
        return contradictions.TIER if expectation.num_lower else contradictions.DEVICE

    def _give_up(self, ledger: RankLedger, rank: Rank, scope: Scope) -> None:
        """Drop what cannot be relied on; of the device nothing counts, and all goes on."""
        if scope.blocks is Blocks.ADAPTER:
            self.router.fleet_index.forget_adapter(rank, scope.adapter)
            ledger.contradictions.forget(scope)
        elif scope.blocks is Blocks.TIER:
            self.router.fleet_index.refuse_lower_tiers(rank)

    def _judge(self, expectation: Expectation, cached_tokens: int) -> Verdict:
        verdict = expectation.judge(cached_tokens)
        is_speculative = verdict is Verdict.WRONG_SPECULATIVE
        if is_speculative and self._surpluses.take(expectation, cached_tokens):
            return Verdict.OVERTAKEN
        return verdict

    def _must_wait(self, expectation: Expectation, cached_tokens: int | None, now_s: float) -> bool:
        """Whether something that may explain a shortfall is still to come."""
        if cached_tokens is None or now_s >= expectation.answered_s + _MAX_WAIT_S:
            return False
        verdict = expectation.judge(cached_tokens)
        if not verdict.is_wrong:
            return False
        heard_s = self._times.heard_until(expectation.rank)
        uses_events = self.router.config.follows_events
        if uses_events and heard_s <= expectation.answered_s + TOLERANCE_S:
            return True  # its events of that time are still under way, or it has none
        is_speculative = verdict is Verdict.WRONG_SPECULATIVE
        return is_speculative and self._awaits_creator(expectation, cached_tokens)

    def _awaits_creator(self, expectation: Expectation, cached_tokens: int) -> bool:
        """Whether the request that was to create the missing block has no answer yet."""
        place = expectation.reported(cached_tokens)
        missing = expectation.sequence_hashes[place]
        return any(
            other.rank == expectation.rank
            and other.decided_s <= expectation.decided_s
            and len(other.sequence_hashes) > place
            and other.sequence_hashes[place] == missing
            for other in self._expected.values()
        )


class RankEvidence(NamedTuple):
    """For whoever follows the events of a rank (kvplug/ingest/follower.py)."""

    audit: Audit
    rank: Rank

    def confidence(self) -> float:
        """As Audit.confidence."""
        return self.audit.confidence(self.rank)

    def contradicted(self) -> tuple[int, int] | None:
        """As Audit.contradicted."""
        return self.audit.contradicted(self.rank)
