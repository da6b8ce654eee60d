"""Payloads of one publisher to a Router.

In:  payloads of consecutive messages, as bytes.   Out: the index changed, and an Effect: what of
them leaves blocks of the engine unknown.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import structs

from kvplug import codec
from kvplug.errors import DecodeError
from kvplug.events import BlockCopied, BlockRemoved, BlockStored, Event, EventBatch, Rank
from kvplug.index.apply_result import ApplyResult, RejectReason
from kvplug.records import Records, read_payloads
from kvplug.router.core import Router

# Messages in one run. Between runs other threads get the interpreter: a query that waits for it
# waits for some 30 us of Python.
_MAX_RUN_LENGTH = 32


logger = logging.getLogger(__name__)

_REPAIRABLE = {RejectReason.UNKNOWN_PARENT.value, "undecodable"}

# Of these the index takes nothing, so that it lacks what the events said.
_UNUSABLE = {
    RejectReason.NO_TOKENS.value,
    RejectReason.BIGRAM_TOKENS.value,
    RejectReason.BLOCK_SIZE.value,
    RejectReason.UNKNOWN_RANK.value,
}


@dataclass(slots=True)
class Effect:
    """What payloads did to what is known of an engine.

    cleared: the engine dropped everything, so what was missed before no longer matters;
    defects: by reason, what came after that (or at all) and leaves blocks unknown.
    """

    cleared: bool = False
    defects: Counter[str] = field(default_factory=Counter)

    @property
    def is_repairable(self) -> bool:
        """Whether a replay may help: what came before was lost or damaged on the way."""
        return bool(self.defects.keys() & _REPAIRABLE)


class Sink(Protocol):
    """Where payloads go: an Applier, but for tests."""

    def apply(self, payloads: list[bytes]) -> Effect:
        """Apply them in order."""

    def clear(self) -> None:
        """Forget all that the publisher said."""


class Applier:
    """apply, clear; counts in num_stored and num_removed, and tells `skip` (reason, how many, more
    about it) what it cannot use.

    Runs of plain events go as arrays from bytes to the index (kvplug/records.py), everything else
    message by message through the codec.
    """

    def __init__(self, router: Router, rank: Rank, skip: Callable[[str, int, str], None]) -> None:
        self.num_stored = self.num_removed = 0
        self._router, self._rank, self._skip = router, rank, skip
        self.ranks = {rank}
        self._full_groups: set[int] = set()
        self._pooled_media: set[str] = set()
        self._is_hybrid = False
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

    def clear(self) -> None:
        """Forget all that the publisher said: its blocks and what was learnt of its groups."""
        self._full_groups.clear()
        self._is_hybrid = False
        for rank in self.ranks:
            self._router.clear(rank)

    def _read_run(self, payloads: list[bytes], first: int) -> Records | None:
        if self._is_hybrid:
            return None
        records = read_payloads(payloads[first : first + self._run_length])
        # Short at first: after one message that is not plain, the next ones seldom are.
        self._run_length = 1 if records is None else min(2 * self._run_length, _MAX_RUN_LENGTH)
        return records

    def _apply_run(self, records: Records, effect: Effect) -> None:
        rank = self._rank_of(records.dp_rank)
        applied = self._router.apply_records(rank, records)
        if applied.num_stored:
            self._full_groups.add(0)
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
        rank = self._rank_of(batch.dp_rank)
        applied = self._router.apply(rank, self._of_full_attention(batch))
        self._count(rank, applied, effect)
        for reason, count in batch.skipped.items():
            self._is_hybrid |= reason.startswith("not_full_attention")
            self._skip(reason, count, "")
            effect.defects[reason] += count
        for medium in batch.unknown_media:
            self._skip("unknown_medium", 1, f"{medium[:40]!r} is taken for a disk")
        for medium in set(batch.pooled_media) - self._pooled_media:
            self._pooled_media.add(medium)
            logger.info("%s: blocks in %s count as in host memory", self._rank, medium)

    def _rank_of(self, dp_rank: int | None) -> Rank:
        if dp_rank is None or dp_rank == self._rank.dp_rank:
            return self._rank
        return Rank(self._rank.worker, dp_rank)

    def _count(self, rank: Rank, applied: ApplyResult, effect: Effect) -> None:
        if (
            applied.rejected[RejectReason.UNKNOWN_RANK.value] == 0
        ):  # or any number would be remembered
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

    def _of_full_attention(self, batch: EventBatch) -> EventBatch:
        """Drop removals of other groups of a hybrid model.

        vLLM gives a block the same hash in every group, and a removal names only the group; which
        groups have full attention is known from what they stored (the codec keeps out the rest).
        """
        stored = (event.group for event in batch.events if isinstance(event, BlockStored))
        self._full_groups.update(stored)
        self._is_hybrid |= bool(self._full_groups - {0})
        kept = tuple(event for event in batch.events if self._concerns_prefixes(event))
        if len(kept) < len(batch.events):
            self._skip("removed_in_other_group", len(batch.events) - len(kept), "")
        return structs.replace(batch, events=kept)

    def _concerns_prefixes(self, event: Event) -> bool:
        if not isinstance(event, BlockRemoved | BlockCopied) or not self._full_groups:
            return True
        return event.group in self._full_groups
