"""The events of a rank applied to an index: typed, packed, or as records.

In:  events of one rank as objects, bytes or arrays.   Out: the block store, the rank's hash space,
the speculative blocks and annotations changed; counts.

Many plain events are applied in one call of a kernel. What a kernel cannot decide is applied one by
one (kvplug/index/single_events.py); kernels/applying.py says what that is. Annotations are not told
of what kernels apply.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvplug import packed
from kvplug.errors import DecodeError
from kvplug.events import AllBlocksCleared, EventBatch, Rank, Tier
from kvplug.index.apply_result import ApplyResult, RejectReason
from kvplug.index.evicting import Eviction
from kvplug.index.expiring import mark_of
from kvplug.index.hash_spaces import HashSpace
from kvplug.index.packed_run import PackedRun
from kvplug.index.single_events import IndexParts, SingleEvents
from kvplug.index.sweeping import Clearing
from kvplug.kernels import applying as kernels
from kvplug.kernels.applying import apply_packed
from kvplug.kernels.bundle import Bundle
from kvplug.records import Records

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Flag = npt.NDArray[np.uint8]

# A slot of a table is looked at in a fraction of the time that a block takes to store.
_STEPS_PER_BLOCK = 16
_ALL = 2**40  # more events, and more blocks, than a payload has


class EventApplier:
    """apply, apply_packed, apply_packed_run, apply_records; clear, start_clear. What is refused is
    counted.

    Plain events are applied many at a time in a kernel, all others one by one.
    """

    def __init__(self, parts: IndexParts, query_waiting: Flag) -> None:
        self._kernels = _KernelEvents(parts, query_waiting)
        self._single = SingleEvents(parts, self.clear)
        self.forget_adapter = self._single.forget_adapter
        self._hash_spaces, self._numbers = parts.hash_spaces, parts.hash_spaces.numbers
        self._capacity_guard = parts.capacity_guard
        self._has_bound = parts.capacity_guard.bounds.max_bytes is not None
        self._block_store = parts.capacity_guard.block_store
        self._speculative, self._annotations = parts.speculative, parts.annotations
        self._cache_groups, self._lower_tiers = parts.cache_groups, parts.lower_tiers
        self._is_bigrams = parts.hasher.window > parts.hasher.block_size
        self._clearing: tuple[Tier | None, Clearing] | None = None
        self._eviction: Eviction | None = None

    def clear(self, rank: Rank, tier: Tier | None = None) -> int:
        """The rank holds nothing any more (in this tier); returns how many copies it had."""
        clearing = self.start_clear(rank, tier)
        clearing.finish()
        return clearing.num_dropped

    def start_clear(self, rank: Rank, tier: Tier | None = None) -> Clearing:
        """A clear to be done in slices; nothing else may change the index before it is done."""
        number, hash_space = self._numbers.number_of(rank), self._hash_spaces.of(rank)
        self._speculative.forget(number)
        self._annotations.on_clear(number, tier)
        holders = self._numbers.holders(number, tier)
        return Clearing(self._block_store, self._hash_spaces.arrays_of(hash_space), holders)

    def apply(self, rank: Rank, batch: EventBatch) -> ApplyResult:
        """Remember what a rank said; what is refused is counted in the result."""
        applied = ApplyResult()
        if rank not in self._numbers:
            applied.reject(RejectReason.UNKNOWN_RANK, len(batch.events))
            return applied
        for event in batch.events:
            self._single.apply(rank, event, applied)
            self._capacity_guard.settle()
        return applied

    def apply_packed(self, rank: Rank, payload: bytes) -> ApplyResult:
        """Remember packed events (kvplug/packed.py); DecodeError, and nothing done, if they are
        none.
        """
        applied, run = ApplyResult(), None
        if self._lower_tiers.refused or self._annotations.need_all_events:
            run = PackedRun(payload)
        else:
            run = self._kernels.apply_payload(rank, payload, applied)
            if self._has_bound:
                self._capacity_guard.settle()
        while run is not None and not run.is_done:
            self.apply_packed_run(rank, run, run.num_events, _ALL, applied)
        return applied

    def apply_packed_run(
        self, rank: Rank, run: PackedRun, end: int, max_blocks: int, applied: ApplyResult
    ) -> None:
        """Apply packed events up to number `end`, counted in `applied`; as `apply_records`, with
        `run.next` for the next number. DecodeError, and nothing done, if they are none.
        """
        if rank not in self._numbers:
            applied.reject(RejectReason.UNKNOWN_RANK, end - run.next)
            run.pass_over(end)
        elif self._eviction is not None:
            self._go_on_evicting(_STEPS_PER_BLOCK * max_blocks)
        elif self._clearing is not None:
            run.advance(self._go_on_clearing(_STEPS_PER_BLOCK * max_blocks, applied))
        elif self._are_packed_single(rank) or not run.is_for_kernels:
            run.lose_position()
            self._apply_packed_event(rank, run, applied)
        else:
            self._kernels.apply_packed(rank, run, end, max_blocks, applied)
            self._capacity_guard.settle()
            if self._kernels.num_over:
                run.advance(self._start_evicting(self._kernels.num_over, applied))
            elif run.next < end and self._kernels.needs_decision:
                self._apply_packed_event(rank, run, applied)

    def _apply_packed_event(self, rank: Rank, run: PackedRun, applied: ApplyResult) -> None:
        event = run.event
        if isinstance(event, packed.PackedCleared):
            self._start_clearing(rank, event)
            return
        self._single.apply_packed(rank, event, applied)
        self._capacity_guard.settle()
        run.advance()

    def _start_clearing(self, rank: Rank, event: AllBlocksCleared | packed.PackedCleared) -> None:
        tier = self._single.tier_to_clear(rank, event)
        self._clearing = tier, self.start_clear(rank, tier)

    def apply_records(
        self, rank: Rank, records: Records, first: int, max_blocks: int, applied: ApplyResult
    ) -> int:
        """Apply records from number `first` on, counted in `applied`; returns the next number.

        Ends once about `max_blocks` blocks are done, or when somebody sets `query_waiting`, so that
        a caller with a lock can give way to queries; other changes have to wait until all records
        are applied.
        """
        if rank not in self._numbers:
            applied.reject(RejectReason.UNKNOWN_RANK, records.num_events - first)
            return records.num_events
        if self._eviction is not None:
            self._go_on_evicting(_STEPS_PER_BLOCK * max_blocks)
            return first
        if self._clearing is not None:
            return first + self._go_on_clearing(_STEPS_PER_BLOCK * max_blocks, applied)
        at = first
        if not self._are_single(rank):
            at = self._kernels.apply_records(rank, records, first, max_blocks, applied)
            self._capacity_guard.settle()
            if self._kernels.num_over:
                return at + self._start_evicting(self._kernels.num_over, applied)
            if at == records.num_events or not self._kernels.needs_decision:
                return at
        event = records.event(at)
        if isinstance(event, AllBlocksCleared):
            self._start_clearing(rank, event)
            return at
        self._single.apply(rank, event, applied)
        self._capacity_guard.settle()
        return at + 1

    def _are_single(self, rank: Rank) -> bool:
        """Whether kernels may apply none of the rank's records."""
        return self._is_bigrams or self._are_packed_single(rank)

    def _are_packed_single(self, rank: Rank) -> bool:
        """Whether kernels may apply none of the rank's packed events."""
        number = self._numbers.number_of(rank)
        of_rank = number in self._cache_groups or number in self._lower_tiers.refused
        return of_rank or self._annotations.need_all_events

    def _start_evicting(self, num_blocks: int, applied: ApplyResult) -> bool:
        """Whether the event is done with, as nothing that could go would make room for it."""
        if self._capacity_guard.can_ever_hold(num_blocks):
            if self._kernels.is_over_bytes and self._capacity_guard.shrink():
                return False
            self._eviction = self._capacity_guard.eviction(num_blocks)
            if self._eviction.num_blocks:
                return False
            self._eviction = None
        applied.reject(RejectReason.INDEX_FULL, num_blocks)
        return True

    def _go_on_evicting(self, max_steps: int) -> None:
        assert self._eviction is not None
        self._eviction.advance(max_steps)
        if self._eviction.is_done:
            self._eviction = None
            self._annotations.erase_gone()

    def _go_on_clearing(self, max_steps: int, applied: ApplyResult) -> bool:
        """Whether the clear that a run of records has come to is done."""
        assert self._clearing is not None
        tier, clearing = self._clearing
        clearing.advance(max_steps)
        if clearing.is_done:
            self._clearing = None
            applied.clear(clearing.num_dropped, everything=tier is None)
        return clearing.is_done


class _KernelEvents:
    """apply_records, apply_packed; `needs_decision` and `num_over` tell how the first ended."""

    def __init__(self, parts: IndexParts, query_waiting: Flag) -> None:
        self._block_size, self._speculative = parts.hasher.block_size, parts.speculative
        self._hash_spaces, self._numbers = parts.hash_spaces, parts.hash_spaces.numbers
        self._capacity_guard, self._cache_groups = parts.capacity_guard, parts.cache_groups
        self._block_store = parts.capacity_guard.block_store
        self._query_waiting = query_waiting
        self._version = self._block_store.version
        self._buffers, self._repeated_stores = parts.buffers, parts.repeated_stores
        self._counts: I64 = np.zeros(kernels.NUM_COUNTS, dtype=np.int64)
        # What stays the same between calls, until an array grows or a rank comes or goes.
        self._bundles: dict[Rank, Bundle] = {}
        self._plain_words: dict[Rank, U64] = {}
        self._seen_version = 0
        self._payload_of: PackedRun | None = None  # whose payload is in the buffer

    @property
    def needs_decision(self) -> bool:
        """Whether the event at which the last call ended is one for SingleEvents."""
        return bool(self._counts[kernels.WHY] == kernels.NEEDS_DECISION)

    @property
    def num_over(self) -> int:
        """How many blocks the event at which the last call ended has, if the bounds forbid them."""
        is_over = self.is_over_bytes or self._counts[kernels.WHY] == kernels.OVER_LIMIT
        return int(self._counts[kernels.NUM_WANTED]) if is_over else 0

    @property
    def is_over_bytes(self) -> bool:
        """Whether it is the bound by bytes that forbids them."""
        return bool(self._counts[kernels.WHY] == kernels.NEEDS_ROOM)

    def apply_records(
        self, rank: Rank, records: Records, first: int, max_blocks: int, applied: ApplyResult
    ) -> int:
        """Apply from record `first` on; returns the number of the first that was not applied."""
        at, again = first, True
        while again:
            at = int(kernels.apply_records(
                at, records.num_events, max_blocks, self._block_size, records.bundle.words,
                self.words_of(rank),
            ))  # fmt: skip
            again = self._count(rank, applied)
        return at

    def apply_payload(self, rank: Rank, payload: bytes, applied: ApplyResult) -> PackedRun | None:
        """Apply a payload in one call, as far as that goes; None if that is all of it."""
        words = self._words_of_plain(rank)
        if words is None:
            return PackedRun(payload)
        words = self._take_payload(rank, payload, words)
        result = apply_packed(0, 0, len(payload), _ALL, _ALL, words)
        if result >= 0:
            applied.num_stored = result & kernels.STORED_MASK
            applied.num_removed = result >> kernels.REMOVED_SHIFT
            return None
        run = self._payload_of = PackedRun(payload)
        if self._note(rank, run, result, applied):
            self.apply_packed(rank, run, _ALL, _ALL, applied)
        return run

    def _words_of_plain(self, rank: Rank) -> U64 | None:
        """As `words_of`; None for a rank that is not followed, or has several KV cache groups."""
        if self._seen_version == self._version.count:
            words = self._plain_words.get(rank)
            if words is not None:
                return words
        if rank not in self._numbers or self._numbers.number_of(rank) in self._cache_groups:
            return None
        words = self._plain_words[rank] = self.words_of(rank)
        return words

    def apply_packed(
        self, rank: Rank, run: PackedRun, last: int, max_blocks: int, applied: ApplyResult
    ) -> None:
        """Apply events up to number `last`, as far as that goes; DecodeError if they are none."""
        words = self.words_of(rank)
        if not run.is_begun or self._payload_of is not run:
            words = self._take_payload(rank, run.payload, words)
            self._payload_of = run
        again = True
        while again:
            end = len(run.payload)
            result = apply_packed(run.next, run.at, end, last, max_blocks, self.words_of(rank))
            again = self._note(rank, run, result, applied)

    def _note(self, rank: Rank, run: PackedRun, result: int, applied: ApplyResult) -> bool:
        """What a call has done; whether another one can go on at once."""
        if result >= 0:
            applied.num_stored += result & kernels.STORED_MASK
            applied.num_removed += result >> kernels.REMOVED_SHIFT
            run.finish()
            return False
        again = self._count(rank, applied)
        run.go_to(-1 - result, *self._counts[[kernels.POSITION, kernels.BEHIND]].tolist())
        if self._counts[kernels.WHY] == kernels.NEEDS_CHECK:
            run.check()
            return run.is_for_kernels
        return again

    def _take_payload(self, rank: Rank, payload: bytes, words: U64) -> U64:
        buffers = self._buffers
        try:
            end = len(payload)
            if end > buffers.max_payload:
                buffers.reserve_payload(end)
                words = self.words_of(rank)
            # Copied, as NumPy takes five times as long to look at bytes where they are.
            buffers.payload[:end] = payload
        except (TypeError, ValueError) as error:
            raise DecodeError(f"cannot read packed events: expected bytes: {error}") from error
        self._payload_of = None
        return words

    def words_of(self, rank: Rank) -> U64:
        """The words of the bundle that kernels take for a rank; UnknownRankError for another."""
        if self._seen_version == self._version.count:
            bundle = self._bundles.get(rank)
            if bundle is not None:
                return bundle.words
        return self._collect_anew(rank)

    def _collect_anew(self, rank: Rank) -> U64:
        # The rank may get its numbers only now, which changes the members of its hash space.
        holders = self._numbers.holder_of_tier(self._numbers.number_of(rank))
        if self._seen_version != self._version.count:
            self._bundles.clear()
            self._plain_words.clear()
            self._seen_version = self._version.count
        bundle = self._bundles[rank] = self._collect(rank, self._hash_spaces.of(rank), holders)
        return bundle.words

    def _collect(self, rank: Rank, hash_space: HashSpace, holders: I64) -> Bundle:
        number = self._numbers.number_of(rank)
        space_slots, expected = hash_space.table.slots, self._speculative.table.slots
        of_rank = np.concatenate([[mark_of(number)], holders.astype(np.uint64)])
        return Bundle(
            *self._block_store.arrays,
            space_slots,
            self._hash_spaces.members_of(hash_space),
            expected,
            of_rank,
            self._buffers.blocks,
            np.frombuffer(self._buffers.payload, dtype=np.uint8),
            self._counts,
            self._query_waiting,
            self._repeated_stores.flag_of(number),
        )

    def _count(self, rank: Rank, applied: ApplyResult) -> bool:
        """Add up what a call has done; whether arrays have grown, so that it can go on."""
        num_stored, num_removed, num_unknown, why, num_wanted, *_ = self._counts.tolist()
        applied.num_stored += num_stored
        applied.num_removed += num_removed
        if num_unknown:
            applied.reject(RejectReason.UNKNOWN_BLOCK, num_unknown)
        return why in (kernels.NEEDS_ROOM, kernels.NEEDS_RUNS) and self._make_room(
            rank, num_wanted, comes=why == kernels.NEEDS_ROOM
        )

    def _make_room(self, rank: Rank, num_blocks: int, comes: bool) -> bool:
        """Have arrays grow for so many blocks; False if the bounds forbid it.

        Blocks that leave (`comes` is false) need room for runs, which is always given.
        """
        hash_space = self._hash_spaces.of(rank)
        holder = int(self._numbers.holder_of_tier(self._numbers.number_of(rank)).max())
        if not comes:
            self._block_store.reserve_runs(holder, num_blocks)
        elif self._capacity_guard.is_over_bytes(hash_space, holder, num_blocks):
            return False
        else:
            hash_space.table.reserve(num_blocks)
            self._block_store.reserve(holder, num_blocks)
        self._buffers.reserve_blocks(num_blocks)
        self._version.count += 1
        return True
