"""Payloads of one publisher to a Router.

In:  payloads of consecutive messages, as bytes.   Out: the index changed, and an Effect: what of
them leaves blocks of the engine unknown.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from msgspec import structs

from kvplug import codec
from kvplug.errors import DecodeError
from kvplug.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, Rank
from kvplug.index.applied import Refusal
from kvplug.ingest.skips import Skips
from kvplug.router.core import Router


@dataclass(slots=True)
class Effect:
    """What payloads did to what is known of an engine.

    cleared: the engine dropped everything, so what was missed before no longer matters;
    defects: by reason, what came after that (or at all) and leaves blocks unknown.
    """

    cleared: bool = False
    defects: Counter[str] = field(default_factory=Counter)


class Applier:
    """apply, clear; counts in num_stored, num_removed and `skips`."""

    def __init__(self, router: Router, rank: Rank, skips: Skips) -> None:
        self.num_stored = self.num_removed = 0
        self._router, self._rank, self._skips = router, rank, skips
        self._ranks = {rank}
        self._full_groups: set[int] = set()

    def apply(self, payloads: list[bytes]) -> Effect:
        """Apply messages in order; never raises for what they hold."""
        effect = Effect()
        for payload in payloads:
            try:
                self._apply_batch(codec.decode(payload), effect)
            except DecodeError as error:
                self._skips.add("undecodable", 1, str(error))
                effect.defects["undecodable"] += 1
        return effect

    def clear(self) -> None:
        """Forget all that the publisher said: its blocks and what was learnt of its groups."""
        self._full_groups.clear()
        for rank in self._ranks:
            self._router.clear(rank)

    def _apply_batch(self, batch: EventBatch, effect: Effect) -> None:
        rank = Rank(
            self._rank.worker, self._rank.dp_rank if batch.dp_rank is None else batch.dp_rank
        )
        self._ranks.add(rank)
        if any(isinstance(e, AllBlocksCleared) and e.tier is None for e in batch.events):
            effect.cleared = True
            effect.defects.clear()
        for reason, count in batch.skipped.items():
            self._skips.add(reason, count)
            effect.defects[reason] += count
        for medium in batch.unknown_media:
            self._skips.add("unknown_medium", 1, f"{medium[:40]!r} is taken for a disk")
        self._apply_events(rank, self._of_full_attention(batch), effect)

    def _apply_events(self, rank: Rank, batch: EventBatch, effect: Effect) -> None:
        applied = self._router.apply(rank, batch)
        self.num_stored += applied.num_stored
        self.num_removed += applied.num_removed
        for reason, count in applied.refused.items():
            self._skips.add(reason, count)
        orphans = applied.refused[Refusal.UNKNOWN_PARENT.value]
        if orphans:
            effect.defects[Refusal.UNKNOWN_PARENT.value] += orphans

    def _of_full_attention(self, batch: EventBatch) -> EventBatch:
        """Drop removals of other groups of a hybrid model.

        vLLM gives a block the same hash in every group, and a removal names only the group; which
        groups have full attention is known from what they stored (the codec keeps out the rest).
        """
        stored = (event.group for event in batch.events if isinstance(event, BlockStored))
        self._full_groups.update(stored)
        kept = tuple(event for event in batch.events if self._concerns_prefixes(event))
        if len(kept) < len(batch.events):
            self._skips.add("removed_in_other_group", len(batch.events) - len(kept))
        return structs.replace(batch, events=kept)

    def _concerns_prefixes(self, event: Event) -> bool:
        if not isinstance(event, BlockRemoved) or not self._full_groups:
            return True
        return event.group in self._full_groups
