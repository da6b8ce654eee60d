"""BlockIndex: which rank holds which block, exactly as the engines said.

In:  event batches per rank.   Out: per rank, how many leading blocks of a request it holds.

Four parts:

    block store   which holder (a rank with a tier) has which block     index/block_store.py
    hash spaces   engine hash -> sequence hash                          index/hash_spaces.py
    speculative   blocks that ranks are about to hold                   index/expiring.py
    annotations   whatever else is known of blocks; none is named here  index/annotations.py

Engines name parents and removals by their own hashes. Ranks of one hash space give equal blocks
equal engine hashes, so one table serves them all. A rank whose hashes disagree (another algorithm,
another seed) is moved into a hash space of its own, without loss.

What is not certain is refused and counted, never guessed (`RejectReason`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvplug import packed
from kvplug.events import (
    AllBlocksCleared,
    EventBatch,
    Rank,
    Tier,
)
from kvplug.hashing import BlockHasher, Ends, HashesLike, as_hashes, checked_ends
from kvplug.index.annotations import ANNOTATIONS, Annotations, Kind
from kvplug.index.apply_result import ApplyResult, RejectReason
from kvplug.index.arrays import ArrayVersion
from kvplug.index.block_annotation import BlockAnnotation
from kvplug.index.block_store import BlockStore, HashSpaceArrays
from kvplug.index.bounds import Bounds, CapacityGuard
from kvplug.index.event_applier import LEAST_NBYTES, EventApplier, Flag
from kvplug.index.evicting import Eviction
from kvplug.index.expiring import ExpiringBlocks
from kvplug.index.hash_spaces import HashSpace, HashSpaces
from kvplug.index.holder_numbers import HolderNumbers
from kvplug.index.prefix_query import Overlap, PrefixQuery, credits_of
from kvplug.index.single_events import SingleEvents
from kvplug.index.sweeping import Clearing
from kvplug.records import Records

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]

TIER_CREDIT = {Tier.DEVICE: 1.0, Tier.HOST: 0.75, Tier.DISK: 0.25}
"""What a block is worth by its nearest copy; Dynamo 1.6.1 has the same defaults."""

_CREDITS = [TIER_CREDIT[tier] for tier in Tier] + [0.9]  # a block in a pool

# A slot of a table is looked at in a fraction of the time that a block takes to store.
_STEPS_PER_BLOCK = 16


class BlockIndex:
    """Following workers: add_rank, apply, clear, remove_worker. Asking: overlap, annotation.

    Looking inside: len, engine_hashes_of, nbytes, check. Not thread-safe; Router holds a lock.
    """

    def __init__(
        self,
        block_size: int,
        *,
        bigrams: bool = False,
        speculative_ttl_s: float = 2.0,
        query_waiting: Flag | None = None,
        bounds: Bounds = Bounds(),  # noqa: B008 - immutable
        annotations: Sequence[type[BlockAnnotation]] = ANNOTATIONS,
    ) -> None:
        """`bigrams`: of engines that key a block by its pairs of tokens (SGLang with EAGLE).

        `query_waiting`, uint8[1]: another thread sets it to have `apply_records` return early.
        `annotations`: what is to be known of blocks besides, one of each kind.
        """
        self.hasher = BlockHasher(block_size, bigrams=bigrams)
        self._version = ArrayVersion(is_tight=bounds.max_bytes is not None)
        self.numbers = HolderNumbers(self._version)
        self.block_store = BlockStore(self._version)
        self.speculative = ExpiringBlocks(speculative_ttl_s, version=self._version)
        self.annotations = Annotations(annotations, self.numbers, self.block_store)
        self._confidence: F64 = np.ones(0)
        self._prefix_query: PrefixQuery | None = None
        self.hash_spaces = HashSpaces(self.numbers, self.block_store)
        self._clearing: tuple[Tier | None, Clearing] | None = None
        self._eviction: Eviction | None = None
        self.capacity_guard = CapacityGuard(
            bounds,
            self.block_store,
            self._others_nbytes,
            self._hash_space_arrays,
            self.annotations.erase_gone,
        )
        flag = np.zeros(1, dtype=np.uint8) if query_waiting is None else query_waiting
        self._applier = EventApplier(
            self.block_size, self.hash_spaces, self.capacity_guard, self.speculative, flag
        )
        self._single = SingleEvents(
            self.hasher,
            self.hash_spaces,
            self.capacity_guard,
            self.speculative,
            self.annotations,
            self.clear,
        )

    def __len__(self) -> int:
        """Number of distinct blocks that any rank holds."""
        return len(self.block_store)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.hasher.block_size

    @property
    def bigrams(self) -> bool:
        """Whether a block is a window of one token more."""
        return self.hasher.window > self.hasher.block_size

    @property
    def confidence(self) -> F64:
        """float64[ranks], what a block of each rank is worth."""
        return self._confidence[: len(self.numbers.ranks)]

    @confidence.setter
    def confidence(self, by_number: F64) -> None:
        self._confidence = by_number
        self._version.count += 1

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all tables and arrays."""
        tables = self.block_store.nbytes + self.capacity_guard.nbytes + self._others_nbytes(None, 0)
        return tables + self._applier.extra_nbytes

    def _others_nbytes(self, growing: HashSpace | None, num_more: int) -> int:
        more = 0
        if growing is not None:
            more = growing.table.grown_nbytes(num_more) - growing.table.nbytes
        besides = self.speculative.nbytes + self.annotations.nbytes
        return besides + self.hash_spaces.nbytes + LEAST_NBYTES + more

    def _hash_space_arrays(self) -> list[HashSpaceArrays]:
        return [self.hash_spaces.arrays_of(hash_space) for hash_space in self.hash_spaces.in_use]

    def add_rank(self, rank: Rank) -> int:
        """Follow a rank from now on; returns its number."""
        if rank not in self.numbers:
            self.hash_spaces.add(rank)
            self.set_confidence(rank, 1.0)
        return self.numbers.add(rank)

    def set_confidence(self, rank: Rank, confidence: float) -> None:
        """What a block that the rank holds is worth from now on: 1.0 if its events are trusted."""
        number = self.numbers.number_of(rank)
        missing = max(0, number + 1 - len(self._confidence))
        self._confidence = np.concatenate([self._confidence, np.ones(missing)])
        self._confidence[number] = confidence
        self._version.count += 1

    def remove_worker(self, worker: str) -> None:
        """Forget all ranks of a worker; later events of theirs are refused."""
        for rank in self.hash_spaces.ranks_of(worker):
            self.clear(rank)
            self.annotations.on_rank_removed(self.numbers.number_of(rank))
            self.hash_spaces.remove(rank)

    def clear(self, rank: Rank, tier: Tier | None = None) -> int:
        """The rank holds nothing any more (in this tier); returns how many copies it had."""
        clearing = self.start_clear(rank, tier)
        clearing.finish()
        return clearing.num_dropped

    def start_clear(self, rank: Rank, tier: Tier | None = None) -> Clearing:
        """A clear to be done in slices; nothing else may change the index before it is done."""
        number, hash_space = self.numbers.number_of(rank), self.hash_spaces.of(rank)
        self.speculative.forget(number)
        self.annotations.on_clear(number, tier)
        holders = self.numbers.holders(number, tier)
        return Clearing(self.block_store, self.hash_spaces.arrays_of(hash_space), holders)

    def apply(self, rank: Rank, batch: EventBatch) -> ApplyResult:
        """Remember what a rank said; what is refused is counted in the result."""
        applied = ApplyResult()
        if rank not in self.numbers:
            applied.reject(RejectReason.UNKNOWN_RANK, len(batch.events))
            return applied
        for event in batch.events:
            self._single.apply(rank, event, applied)
        return applied

    def apply_packed(self, rank: Rank, payload: bytes) -> ApplyResult:
        """Remember packed events (kvplug/packed.py); DecodeError, and nothing done, if they are
        none.
        """
        hash_space, first = self.hash_spaces.get(rank), 0
        if hash_space is None:
            applied = ApplyResult()
            applied.reject(RejectReason.UNKNOWN_RANK, packed.num_events(payload))
            return applied
        if self.annotations.need_all_events:
            applied = ApplyResult()
        else:
            applied, first = self._applier.apply_packed(rank, hash_space, payload)
        if first >= 0:
            # Behind an event that needs a decision the rest of a payload goes one by one.
            for event in packed.decode(payload)[first:]:
                self._single.apply_packed(rank, event, applied)
        return applied

    def apply_records(
        self, rank: Rank, records: Records, first: int, max_blocks: int, applied: ApplyResult
    ) -> int:
        """Apply records from number `first` on, counted in `applied`; returns the next number.

        Ends once about `max_blocks` blocks are done, or when somebody sets `query_waiting`, so that
        a caller with a lock can give way to queries; other changes have to wait until all records
        are applied.
        """
        if rank not in self.numbers:
            applied.reject(RejectReason.UNKNOWN_RANK, records.num_events - first)
            return records.num_events
        if self._eviction is not None:
            self._go_on_evicting(_STEPS_PER_BLOCK * max_blocks)
            return first
        if self._clearing is not None:
            return first + self._go_on_clearing(_STEPS_PER_BLOCK * max_blocks, applied)
        at = first
        if not self.annotations.need_all_events and not self.bigrams:
            at = self._applier.apply_records(
                rank, self.hash_spaces.of(rank), records, first, max_blocks, applied
            )
            if self._applier.num_over:
                return at + self._start_evicting(self._applier.num_over, applied)
            if at == records.num_events or not self._applier.needs_decision:
                return at
        event = records.event(at)
        if isinstance(event, AllBlocksCleared):
            self._clearing = event.tier, self.start_clear(rank, event.tier)
            return at
        self._single.apply(rank, event, applied)
        return at + 1

    def _start_evicting(self, num_blocks: int, applied: ApplyResult) -> bool:
        """Whether the event is done with, as there is nothing that could go for it."""
        self._eviction = self.capacity_guard.eviction(num_blocks)
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
            self.annotations.erase_gone()

    def _go_on_clearing(self, max_steps: int, applied: ApplyResult) -> bool:
        """Whether the clear that a run of records has come to is done."""
        assert self._clearing is not None
        tier, clearing = self._clearing
        clearing.advance(max_steps)
        if clearing.is_done:
            self._clearing = None
            applied.clear(clearing.num_dropped, everything=tier is None)
        return clearing.is_done

    def overlap(self, sequence_hashes: HashesLike, now_s: float = 0.0) -> Overlap:
        """What each rank holds of a request; what is expected counts until `now_s` is beyond it."""
        return self.prefix_query.overlap(as_hashes(sequence_hashes), now_s)

    def overlap_many(
        self, sequence_hashes: HashesLike, ends: Ends | Sequence[int], now_s: float = 0.0
    ) -> list[Overlap]:
        """What each rank holds of many requests.

        Their hashes one after the other; request i has those before hashes[ends[i]]. Raises
        HashingError for other hashes, and for ends that do not rise to their number.
        """
        hashes = as_hashes(sequence_hashes)
        return self.prefix_query.overlap_many(
            hashes, checked_ends(ends, len(hashes), "hashes"), now_s
        )

    @property
    def prefix_query(self) -> PrefixQuery:
        """The index as it is now, for a kernel that asks more than that."""
        if self._prefix_query is None or self._prefix_query.seen_version != self._version.count:
            self._prefix_query = self._ask()
        return self._prefix_query

    def _ask(self) -> PrefixQuery:
        credits = credits_of(_CREDITS, self._confidence[: len(self.numbers.ranks)])
        expected = self.speculative.query_arrays
        numbers = self.numbers
        return PrefixQuery(self.block_store, numbers.owner, numbers.readers, credits, expected)

    def annotation(self, kind: type[Kind]) -> Kind:
        """The annotation of a kind, for what only it can answer; KeyError if there is none."""
        return self.annotations[kind]

    def engine_hashes_of(self, rank: Rank, tier: Tier | None = None) -> U64:
        """uint64[n], the engine's own hashes of the blocks that the rank holds: in a tier, or in
        any and in pools.
        """
        number = self.numbers.number_of(rank)
        engine_hashes, hashes = self.hash_spaces.of(rank).table.items()
        return engine_hashes[
            self.block_store.which_held(hashes, self.numbers.holders(number, tier))
        ]

    def num_resident(self, rank: Rank) -> int:
        """Number of distinct blocks that the rank has on its device."""
        [holder] = self.numbers.holders(self.numbers.number_of(rank), Tier.DEVICE) or [-1]
        return 0 if holder < 0 else self.block_store.num_held(holder)

    def check(self) -> None:
        """Every invariant of every part; raises IndexCorruptError with the broken one."""
        self.numbers.check()
        self.block_store.check()
        self.speculative.check()
        self.annotations.check()
        self.hash_spaces.check()
