"""One publisher's messages to one worker's blocks in a Router.

In:  multipart messages of a stock event stream.   Out: an index kept up to date, and counters.

Nothing that arrives raises: what cannot be used is counted by reason and named once in the log.
"""

from __future__ import annotations

import logging
from collections import Counter

from msgspec import structs

from kvplug import codec
from kvplug.errors import DecodeError
from kvplug.events import (
    AllBlocksCleared,
    BlockCopied,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Rank,
)
from kvplug.index.applied import Applied, Refusal
from kvplug.ingest.sequence import Arrival, SequenceTracker
from kvplug.router.core import Router

logger = logging.getLogger(__name__)

_CURE = {
    Refusal.BLOCK_SIZE.value: "start the router with the engine's --block-size",
    Refusal.UNKNOWN_PARENT.value: "events were lost or began before the router; the engine's "
    "blocks become known again as it stores new prefixes, or at once when it restarts",
    Refusal.CONFLICTING_HASH.value: "the engine gives one id to two contents",
    Refusal.BIGRAM_TOKENS.value: "speculative decoding with EAGLE keys blocks by pairs of tokens; "
    "route such engines by load",
    "undecodable": "check that the endpoint is an event publisher and no other service",
}
# Of these the index takes nothing, so that it lacks what the events said.
_UNUSABLE = {Refusal.NO_TOKENS.value, Refusal.BIGRAM_TOKENS.value}


class Follower:
    """Feed it with `receive`; tell it about `connected` and `disconnected`.

    Read: connected, incomplete (why the index may not hold all of the worker's blocks, or None),
    sequence, and the counters `messages`, `stored`, `removed` and `skipped` by reason.
    """

    def __init__(self, router: Router, rank: Rank) -> None:
        self.rank = rank
        self.connected = False
        self.incomplete: str | None = None
        self.sequence = SequenceTracker()
        self.num_messages = self.num_stored = self.num_removed = 0
        self.skipped: Counter[str] = Counter()
        self._router = router
        self._ranks = {rank}
        self._full_groups: set[int] = set()
        self._pooled_media: set[str] = set()

    def on_connected(self) -> None:
        """The publisher is there (again)."""
        self.connected = True
        logger.info("%s: event stream connected", self.rank)

    def on_disconnected(self) -> None:
        """The publisher is gone: nothing that it said is known to hold any more."""
        if self.connected:
            logger.warning("%s: event stream lost, its blocks are forgotten", self.rank)
        self.connected = False
        self._start_over()

    def receive(self, frames: list[bytes]) -> None:
        """Apply one message."""
        self.num_messages += 1
        try:
            frame = codec.parse_frames(frames)
            batch = codec.decode(frame.payload)
        except DecodeError as error:
            self._skip("undecodable", 1, str(error))
            return
        arrival = self.sequence.observe(frame.seq)
        if arrival is Arrival.DUPLICATE:
            self._skip("duplicate", 1)
            return
        self._note(arrival)
        if _clears_everything(batch):
            self.incomplete = None  # whatever was missed is gone from the engine, too
        self._apply(batch)

    def _note(self, arrival: Arrival) -> None:
        if arrival is Arrival.RESTART:
            logger.warning("%s: engine restarted, its blocks are forgotten", self.rank)
            self._start_over()
        elif arrival is Arrival.GAP:
            self._mark_incomplete(f"{self.sequence.num_missed} event messages were lost")
        elif arrival is Arrival.LATE_JOIN:
            self._mark_incomplete("the router joined after the engine's first events")

    def _start_over(self) -> None:
        last = self.sequence.last
        self.sequence.reset()
        self.incomplete = None
        self._full_groups.clear()
        for rank in self._ranks:
            self._router.clear(rank)
        logger.debug("%s: starting over after sequence number %s", self.rank, last)

    def _apply(self, batch: EventBatch) -> None:
        rank = Rank(self.rank.worker, self.rank.dp_rank if batch.dp_rank is None else batch.dp_rank)
        for reason, count in batch.skipped.items():
            self._skip(reason, count)
            self._mark_incomplete(f"events could not be used: {reason}")
        for medium in batch.unknown_media:
            self._skip("unknown_medium", 1, f"{medium[:40]!r} is taken for a disk")
        for medium in set(batch.pooled_media) - self._pooled_media:
            self._pooled_media.add(medium)
            logger.info("%s: blocks in %s count as in host memory", self.rank, medium)
        applied = self._router.apply(rank, self._of_full_attention(batch))
        if Refusal.UNKNOWN_RANK.value not in applied.refused:  # or any number would be remembered
            self._ranks.add(rank)
        self._count(applied)

    def _of_full_attention(self, batch: EventBatch) -> EventBatch:
        """Drop removals of other groups of a hybrid model.

        vLLM gives a block the same hash in every group, and a removal names only the group; which
        groups have full attention is known from what they stored (the codec keeps out the rest).
        """
        stored = (event.group for event in batch.events if isinstance(event, BlockStored))
        self._full_groups.update(stored)
        kept = tuple(event for event in batch.events if self._concerns_prefixes(event))
        if len(kept) < len(batch.events):
            self._skip("removed_in_other_group", len(batch.events) - len(kept))
        return structs.replace(batch, events=kept)

    def _concerns_prefixes(self, event: Event) -> bool:
        if not isinstance(event, BlockRemoved | BlockCopied) or not self._full_groups:
            return True
        return event.group in self._full_groups

    def _count(self, applied: Applied) -> None:
        self.num_stored += applied.num_stored
        self.num_removed += applied.num_removed
        for reason, count in applied.refused.items():
            self._skip(reason, count)
        if applied.refused[Refusal.UNKNOWN_PARENT.value]:
            self._mark_incomplete("blocks came whose parents are unknown")
        for reason in _UNUSABLE & applied.refused.keys():
            self._mark_incomplete(f"events could not be used: {reason}")

    def _mark_incomplete(self, reason: str) -> None:
        if self.incomplete is None:
            logger.warning("%s: not all of its blocks are known: %s", self.rank, reason)
        self.incomplete = reason

    def _skip(self, reason: str, count: int, detail: str = "") -> None:
        if not self.skipped[reason]:
            cure = _CURE.get(reason, "")
            logger.warning("%s: events skipped: %s %s %s", self.rank, reason, detail, cure)
        self.skipped[reason] += count


def _clears_everything(batch: EventBatch) -> bool:
    return any(isinstance(e, AllBlocksCleared) and e.tier is None for e in batch.events)
