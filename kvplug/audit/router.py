"""AuditedRouter: a Router whose decisions are compared with what the engines report.

In:  decisions with their prompts, the usage of answers.   Out: a ledger per rank.

    with router.deciding():
        decision = router.route(tokens)
        router.expect(decision)
    ...                                             # the engine answers
    router.answered(decision.request_id, Usage(prompt_tokens=.., cached_tokens=..))

A shortfall is judged a moment after the answer: the event that a block was evicted before the
request was scheduled travels by another way than the answer, and may arrive later.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import structs

from kvplug.audit.event_times import EventTimes
from kvplug.audit.expectation import TOLERANCE_S, Expectation, Verdict
from kvplug.audit.ledger import RankLedger
from kvplug.audit.overtaking import Surpluses
from kvplug.audit.residency import resident_blocks
from kvplug.errors import ConfigError
from kvplug.events import (
    AllBlocksCleared,
    BlockRemoved,
    CxlStateTransition,
    Event,
    EventBatch,
    Rank,
)
from kvplug.hashing import Hashes
from kvplug.index.apply_result import ApplyResult
from kvplug.index.sweeping import Clearing
from kvplug.kernels import wire
from kvplug.records import Records
from kvplug.router.config import RouterConfig
from kvplug.router.core import Router, slices_of
from kvplug.router.decider import Decision
from kvplug.router.query_first_lock import QueryFirstLock

# vLLM publishes with the step that scheduled the request, SGLang at latest when it is idle.
_GRACE_S = 1.0
# For what may explain a shortfall: late events, the answer of another request.
_MAX_WAIT_S = 15.0


class Usage(NamedTuple):
    """What an engine says about a request; `cached_tokens` is None where it does not say."""

    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int | None = None


class _Answer(NamedTuple):
    due_s: float
    request_id: str
    expectation: Expectation
    cached_tokens: int | None


class AuditedRouter(Router):
    """expect, answered, abandon, skip; ledgers, accuracy.

    `sample` is the share of requests that is audited; of those that are never answered, the
    oldest are forgotten beyond `max_expected`.
    """

    def __init__(
        self,
        config: RouterConfig | None = None,
        *,
        sample: float = 1.0,
        max_expected: int = 2**16,
        clock: Callable[[], float] = time.monotonic,
        random_: random.Random | None = None,
    ) -> None:
        if not 0 <= sample <= 1:
            raise ConfigError(f"audit sample must be in [0, 1], got {sample}")
        super().__init__(config, clock=clock, random_=random_)
        self._draw = random_ or random.Random()
        # Held, in this order: while deciding or applying, while the audit's own state is used.
        self._deciding, self._auditing = QueryFirstLock(), threading.Lock()
        self._sample, self._max_expected = sample, max_expected
        self._ledgers: defaultdict[Rank, RankLedger] = defaultdict(RankLedger)
        self._expected: dict[str, Expectation] = {}
        self._watched: defaultdict[Rank, dict[str, Expectation]] = defaultdict(dict)
        self._answers: deque[_Answer] = deque()
        self._surpluses, self._times = Surpluses(), EventTimes()
        self._audited: frozenset[Rank] = frozenset()

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Between `route` and `expect` no event is applied that the decision did not know.

        Only for these two: within it, whatever changes the fleet or its blocks waits for ever.
        """
        with self._deciding:
            yield

    def expect(self, decision: Decision) -> None:
        """Remember what a decision counts on; a share of all, drawn by chance.

        UnknownRequestError if the request is not in flight.
        """
        if self._draw.random() >= self._sample:
            return
        request = self.load.request(decision.request_id)
        hashes = request.sequence_hashes
        with self._auditing:
            [resident] = self._resident(decision.rank, [hashes[: decision.overlap_blocks]])
            expectation = Expectation(
                rank=decision.rank,
                decided_s=self._clock(),
                sequence_hashes=hashes,
                num_tokens=round(request.new_tokens + request.cached_tokens),
                block_size=decision.block_size,
                predicted=decision.overlap_blocks,
                resident=resident,
                lowest=decision.overlap_blocks,
                lowest_then=decision.overlap_blocks,
                held=resident,
            )
            self._remember(decision.request_id, expectation)

    def answered(self, request_id: str, usage: Usage | None) -> None:
        """The engine has answered to the end; None if the answer carries no usage."""
        with self._auditing:
            now_s = self._clock()
            self._settle(now_s)
            expectation = self._expected.pop(request_id, None)
            if expectation is None:
                return  # not sampled
            expectation.answered_s = now_s
            cached_tokens = self._readable(expectation, usage)
            if cached_tokens is None or expectation.error(cached_tokens) <= 0:
                self._watched[expectation.rank].pop(request_id, None)
            if cached_tokens is not None:
                self._surpluses.note(expectation, cached_tokens, now_s)
            answer = _Answer(now_s + _GRACE_S, request_id, expectation, cached_tokens)
            self._answers.append(answer)

    def abandon(self, request_id: str, reason: str) -> None:
        """The request will not be audited: it failed, ended early, or was sent elsewhere."""
        with self._auditing:
            self._forget(request_id, reason)

    def skip(self, rank: Rank, reason: str) -> None:
        """A request that says nothing about the prediction, by its kind."""
        with self._auditing:
            if rank in self._audited:
                self._ledgers[rank].skip(reason)

    def ledgers(self) -> dict[Rank, RankLedger]:
        """What is known now of each rank that was sent anything."""
        with self._auditing:
            self._settle(self._clock())
            return {rank: self._ledgers[rank] for rank in sorted(self._ledgers)}

    def accuracy(self, rank: Rank) -> float:
        """What the index's knowledge of the rank has been worth of late, in (0, 1)."""
        with self._auditing:
            return self._ledgers[rank].accuracy if rank in self._ledgers else RankLedger().accuracy

    def apply(self, rank: Rank, batch: EventBatch) -> ApplyResult:
        """As Router.apply, with an eye on what goes under requests in flight."""
        self.require_events(rank)
        sent_s, applied = self._times.sent(rank, batch.ts, self._clock()), ApplyResult()
        # A block may go and come back within one batch: look in between.
        for takes_away, part in _runs(batch):
            with (
                self._deciding.low_priority,
                self._watching(rank, sent_s) if takes_away else nullcontext(),
            ):
                applied.add(super().apply(rank, part))
        self._times.heard(rank, sent_s)
        return applied

    def apply_records(self, rank: Rank, records: Records) -> ApplyResult:
        """As Router.apply_records, in the same way."""
        self.require_events(rank)
        sent_s = self._times.sent(rank, records.ts, self._clock())
        applied, at = ApplyResult(), 0
        with self._deciding.low_priority as turn:
            while at < records.num_events:
                takes_away, end = False, records.num_events
                if self._watched.get(rank):
                    takes_away, end = _run_of(records, at)
                part = replace(records, num_events=end)
                with self._watching(rank, sent_s) if takes_away else nullcontext():
                    at = self._apply_slice(rank, part, at, applied)
                    while takes_away and at < end:
                        turn.yield_to_queries()
                        at = self._apply_slice(rank, part, at, applied)
                turn.yield_to_queries()
        self._times.heard(rank, sent_s)
        return applied

    def apply_packed(self, rank: Rank, payload: bytes) -> ApplyResult:
        """As Router.apply_packed; what goes under requests in flight is not looked at."""
        with self._deciding.low_priority:
            return super().apply_packed(rank, payload)

    def clear(self, rank: Rank) -> int:
        """As Router.clear."""
        self._times.forget(rank)
        with self._deciding.low_priority as turn, self._watching(rank, self._clock()):
            return self._clear_in_slices(rank, turn.yield_to_queries)

    def save_index(self, path: Path) -> None:
        """As Router.save_index."""
        with self._deciding.low_priority as turn, turn.released():
            super().save_index(path)

    @contextmanager
    def _changing_fleet(self) -> Iterator[None]:
        with self._deciding.low_priority:
            with super()._changing_fleet():
                yield
            self._fit_fleet(frozenset(self.ranks))

    def _fit_fleet(self, ranks: frozenset[Rank]) -> None:
        """Nothing is kept of any other rank."""
        with self._auditing:
            gone, new = self._audited - ranks, ranks - self._audited
            self._audited = ranks
            for rank in new:
                self._times.join(rank)
            if gone:
                self._forget_ranks(gone)

    def _forget_ranks(self, gone: frozenset[Rank]) -> None:
        for rank in gone:
            self._times.leave(rank)
            self._ledgers.pop(rank, None)
            self._watched.pop(rank, None)
        self._surpluses.forget(gone)
        self._expected = {i: e for i, e in self._expected.items() if e.rank not in gone}
        self._answers = deque(a for a in self._answers if a.expectation.rank not in gone)

    def _remember(self, request_id: str, expectation: Expectation) -> None:
        if expectation.rank not in self._audited:
            return  # removed since it was decided
        if len(self._expected) >= self._max_expected:
            self._forget(next(iter(self._expected)), "never_answered")
        self._expected[request_id] = expectation
        if expectation.predicted:
            self._watched[expectation.rank][request_id] = expectation

    def _forget(self, request_id: str, reason: str) -> None:
        expectation = self._expected.pop(request_id, None)
        if expectation is not None:
            self._watched[expectation.rank].pop(request_id, None)
            self._ledgers[expectation.rank].skip(reason)

    @contextmanager
    def _watching(self, rank: Rank, sent_s: float) -> Iterator[None]:
        """Note what requests in flight lose of what the index had for them."""
        with self._auditing:
            watched = self._watched_on(rank)
            # Of the others nothing can have come, and what went was seen.
            partial = [each for each in watched if each.held < each.lowest]
            for each, num_left in self._left_of(rank, partial):
                each.held = num_left
        yield
        with self._auditing:
            # With those that were decided meanwhile, between two slices.
            watched = self._watched_on(rank)
            for each, num_left in self._left_of(rank, watched):
                if num_left < each.held:
                    each.lost(num_left, sent_s)
                each.held = num_left

    def _watched_on(self, rank: Rank) -> list[Expectation]:
        return list(self._watched[rank].values()) if rank in self._watched else []

    def _apply_slice(self, rank: Rank, records: Records, first: int, applied: ApplyResult) -> int:
        with self._lock.low_priority:
            return super()._apply_slice(rank, records, first, applied)

    def _start_clear(self, rank: Rank) -> Clearing | None:
        with self._lock.low_priority:
            return super()._start_clear(rank)

    def _clear_slice(self, clearing: Clearing) -> None:
        with self._lock.low_priority:
            super()._clear_slice(clearing)

    def _end_clear(self, rank: Rank) -> None:
        with self._lock.low_priority:
            super()._end_clear(rank)

    def _left_of(
        self, rank: Rank, expectations: list[Expectation]
    ) -> Iterator[tuple[Expectation, int]]:
        prompts = [each.sequence_hashes[: each.lowest] for each in expectations]
        return zip(expectations, self._resident(rank, prompts), strict=True)

    def _resident(self, rank: Rank, prompts: list[Hashes]) -> list[int]:
        with self._lock:
            return resident_blocks(self.index_of(rank), rank, prompts)

    def _readable(self, expectation: Expectation, usage: Usage | None) -> int | None:
        """The cached tokens, if they can be compared with what was expected."""
        ledger = self._ledgers[expectation.rank]
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

    def _settle(self, now_s: float) -> None:
        while self._answers and self._answers[0].due_s <= now_s:
            answer = self._answers.popleft()
            if self._must_wait(answer, now_s):
                self._answers.append(answer._replace(due_s=now_s + _GRACE_S))
                continue
            expectation, ledger = answer.expectation, self._ledgers[answer.expectation.rank]
            self._watched[expectation.rank].pop(answer.request_id, None)
            if len(expectation.sequence_hashes):
                [num] = self._resident(expectation.rank, [expectation.sequence_hashes[:1]])
                ledger.was_stored.append(num > 0)
            if answer.cached_tokens is not None:
                verdict = self._judge(expectation, answer.cached_tokens)
                ledger.enter(expectation, answer.cached_tokens, verdict)

    def _judge(self, expectation: Expectation, cached_tokens: int) -> Verdict:
        verdict = expectation.judge(cached_tokens)
        is_speculative = verdict is Verdict.WRONG_SPECULATIVE
        if is_speculative and self._surpluses.take(expectation, cached_tokens):
            return Verdict.OVERTAKEN
        return verdict

    def _must_wait(self, answer: _Answer, now_s: float) -> bool:
        """Whether something that may explain a shortfall is still to come."""
        expectation, cached_tokens = answer.expectation, answer.cached_tokens
        if cached_tokens is None or now_s >= expectation.answered_s + _MAX_WAIT_S:
            return False
        verdict = expectation.judge(cached_tokens)
        if not verdict.is_wrong:
            return False
        heard_s = self._times.heard_until(expectation.rank)
        if self.config.use_kv_events and heard_s <= expectation.answered_s + TOLERANCE_S:
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


def _runs(batch: EventBatch) -> Iterator[tuple[bool, EventBatch]]:
    """The batch in small parts that only take away, or only add."""
    for takes_away, events in groupby(batch.events, key=_takes_away):
        for part in slices_of(structs.replace(batch, events=tuple(events))):
            yield takes_away, part


def _takes_away(event: Event) -> bool:
    return isinstance(event, BlockRemoved | AllBlocksCleared | CxlStateTransition)


def _run_of(records: Records, first: int) -> tuple[bool, int]:
    """Whether the records from `first` on take away, and up to which one they do alike."""
    kinds = records.records[wire.KIND :: wire.RECORD_WIDTH][first : records.num_events]
    takes_away = kinds != wire.STORED
    others = np.flatnonzero(takes_away != takes_away[0])
    return bool(takes_away[0]), first + int(others[0] if len(others) else len(kinds))
