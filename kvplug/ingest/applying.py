"""Payloads of one publisher to the blocks of its worker in a Router.

In:  payloads of a stock event stream, or packed events of ours, in order.
Out: an index kept up to date; counts of what was stored, removed and skipped, by reason.

Nothing that a payload holds raises.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from msgspec import structs

from kvplug import codec
from kvplug.errors import DecodeError
from kvplug.events import EventBatch, Rank
from kvplug.hidden_states import HiddenStates
from kvplug.index.apply_result import ApplyResult, RejectReason
from kvplug.ingest.introduction import HASH_SCHEME_REASON, OTHER_RANK, introduce
from kvplug.ingest.message_log import Effect
from kvplug.packed import num_claimed
from kvplug.protocol import MAX_EVENTS, WorkerHello
from kvplug.records import Records, read_payloads
from kvplug.router.core import Router

logger = logging.getLogger(__name__)

# Messages in one run. Between runs other threads get the interpreter: a query that waits for it
# waits for some 30 us of Python.
_MAX_RUN_LENGTH = 32

# Of these the index takes nothing, so that it lacks what the events said.
_UNUSABLE = {
    RejectReason.NO_TOKENS.value,
    RejectReason.BIGRAM_TOKENS.value,
    RejectReason.BLOCK_SIZE.value,
    RejectReason.UNKNOWN_RANK.value,
    RejectReason.GROUP_BLOCK_SIZE.value,
    RejectReason.REFUSED_TIER.value,
    RejectReason.CHUNKED_OFFLOAD.value,
    OTHER_RANK,
}

TOO_MANY_EVENTS: Final = "too_many_events"
"""A message has more events than any publisher of ours puts into one."""

_FIX = {
    RejectReason.BLOCK_SIZE.value: "start the router with the engine's --block-size",
    RejectReason.UNKNOWN_PARENT.value: "events were lost or began before the router; the engine's "
    "blocks become known again as it stores new prefixes, or at once when it restarts",
    RejectReason.CONFLICTING_HASH.value: "hashes of the engine and contents contradict each other",
    RejectReason.ADAPTER_RELOADED.value: "blocks that a LoRA adapter computed with other weights "
    "are forgotten; nothing is missing",
    RejectReason.BIGRAM_TOKENS.value: "speculative decoding with EAGLE keys blocks by pairs "
    "of tokens; route such engines by load",
    RejectReason.GROUP_BLOCK_SIZE.value: "the engine's KV cache groups have blocks of different "
    "sizes; start vLLM with --disable-hybrid-kv-cache-manager",
    RejectReason.CHUNKED_OFFLOAD.value: "blocks in host memory and on disk do not count; give the "
    "offloading connector the engine's block size",
    OTHER_RANK: "check that events= names the endpoint of the worker's own rank 0",
    HASH_SCHEME_REASON: "install the same release of kvplug in the engine and the router",
    "undecodable": "check that the endpoint is an event publisher and no other service",
}


class SkipCounter:
    """What of a stream could not be used. add; read `by_reason`."""

    def __init__(self, rank: Rank) -> None:
        self.by_reason: Counter[str] = Counter()
        self._rank = rank

    def add(self, reason: str, count: int = 1, detail: str = "") -> None:
        """Count, and log the first of each reason with its fix."""
        if not self.by_reason[reason]:
            fix = _FIX.get(reason, "")
            logger.warning("%s: events skipped: %s %s %s", self._rank, reason, detail, fix)
        self.by_reason[reason] += count


class Applier:
    """apply, apply_packed, introduce, clear; counts in num_stored and num_removed, and tells `skip`
    (reason, how many, more about it) what it cannot use.

    Runs of plain events go as arrays from bytes to the index (kvplug/records.py), everything else
    message by message through the codec.
    """

    def __init__(
        self,
        router: Router,
        rank: Rank,
        engine_rank: int | None,
        skip: Callable[[str, int, str], None],
    ) -> None:
        self.num_stored = self.num_removed = 0
        self._router, self._rank, self._skip = router, rank, skip
        self.engine_rank = engine_rank
        self.hidden: HiddenStates | None = None
        self.ranks = {rank}
        self._packed_rank = rank
        self._pooled_media: set[str] = set()
        self._run_length = 1

    def apply(self, payloads: list[bytes]) -> Effect:
        """Apply messages in order; never raises for what they hold."""
        effect, at = Effect(), 0
        while at < len(payloads):
            records = self._read_run(payloads, at)
            if records is None:
                self._apply_one(payloads[at], effect)
                at += 1
            else:
                self._apply_run(records, effect)
                at += records.num_payloads
        return effect

    def apply_packed(self, packed: bytes, sent_at: float) -> Effect | None:
        """Apply packed events of a publisher of ours, sent at this time, 0 if that is not known;
        None if there is nothing to say of it.
        """
        rank = self._packed_rank
        num_events = num_claimed(packed)
        if num_events > MAX_EVENTS:
            return self._refuse_packed(TOO_MANY_EVENTS, f"expected {MAX_EVENTS}, got {num_events};")
        if num_events < 0:
            return self._refuse_packed("undecodable", "expected packed events;")
        try:
            applied = self._router.apply_packed(rank, packed, ts=sent_at)
        except DecodeError as error:
            return self._refuse_packed("undecodable", str(error))
        if applied.is_plain and rank in self.ranks:
            self.num_stored += applied.num_stored
            self.num_removed += applied.num_removed
            return None
        effect = Effect()
        self._count(rank, applied, effect)
        return effect

    def _refuse_packed(self, reason: str, detail: str) -> Effect:
        self._skip(reason, 1, detail)
        return Effect(defects=Counter({reason: 1}))

    def introduce(self, about: WorkerHello) -> str | None:
        """Take what a publisher of ours says of its engine; returns why its events are of no use,
        if they are not.
        """
        if self.engine_rank is None:
            self._packed_rank = self._rank.named_by(about.dp_rank)
        return introduce(self._router, self._packed_rank, about, self.engine_rank)

    def clear(self) -> None:
        """Forget the blocks of the publisher."""
        for rank in self.ranks:
            self._router.clear(rank)
        if self.hidden is not None:
            self.hidden.forget()

    def _read_run(self, payloads: list[bytes], first: int) -> Records | None:
        if self.hidden is not None:
            return None
        records = read_payloads(payloads[first : first + self._run_length])
        # Short at first: after one message that is not plain, the next ones seldom are.
        self._run_length = 1 if records is None else min(2 * self._run_length, _MAX_RUN_LENGTH)
        return records

    def _apply_run(self, records: Records, effect: Effect) -> None:
        if self._is_of_another(records.dp_rank):
            self._refuse(records.num_events, records.dp_rank, effect)
            return
        if self.engine_rank is not None:
            records = replace(records, dp_rank=None)
        rank = self._rank.named_by(records.dp_rank)
        applied = self._router.apply_records(rank, records)
        self._count(rank, applied, effect)

    def _apply_one(self, payload: bytes, effect: Effect) -> None:
        try:
            batch = codec.decode(payload)
        except DecodeError as error:
            self._skip("undecodable", 1, str(error))
            effect.defects["undecodable"] += 1
            return
        self._apply_batch(batch, effect)

    def _apply_batch(self, batch: EventBatch, effect: Effect) -> None:
        if self._is_of_another(batch.dp_rank):
            self._refuse(len(batch.events), batch.dp_rank, effect)
            return
        if self.engine_rank is not None:
            batch = structs.replace(batch, dp_rank=None)
        if self.hidden is not None:
            batch = self.hidden.with_ends(batch)
        rank = self._rank.named_by(batch.dp_rank)
        applied = self._router.apply(rank, batch)
        self._count(rank, applied, effect)
        for reason, count in batch.skipped.items():
            self._skip(reason, count, "")
            effect.defects[reason] += count
        for medium in batch.unknown_media:
            self._skip("unknown_medium", 1, f"{medium[:40]!r} is taken for a disk")
        for medium in set(batch.pooled_media) - self._pooled_media:
            self._pooled_media.add(medium)
            logger.info("%s: blocks in %s count as in host memory", self._rank, medium)

    def _is_of_another(self, dp_rank: int | None) -> bool:
        return self.engine_rank is not None and dp_rank not in (None, self.engine_rank)

    def _refuse(self, num_events: int, dp_rank: int | None, effect: Effect) -> None:
        self._skip(OTHER_RANK, num_events, f"expected {self.engine_rank}, got {dp_rank};")
        effect.defects[OTHER_RANK] += num_events

    def _count(self, rank: Rank, applied: ApplyResult, effect: Effect) -> None:
        if not applied.rejected[RejectReason.UNKNOWN_RANK.value]:  # a rank that somebody made up
            self.ranks.add(rank)
        self.num_stored += applied.num_stored
        self.num_removed += applied.num_removed
        for reason, count in applied.rejected.items():
            self._skip(reason, count, "")
        if applied.was_cleared:
            effect.cleared = True
            effect.defects.clear()
        if applied.num_orphans:
            effect.defects[RejectReason.UNKNOWN_PARENT.value] += applied.num_orphans
        for reason in _UNUSABLE & applied.rejected.keys():
            effect.defects[reason] += applied.rejected[reason]
