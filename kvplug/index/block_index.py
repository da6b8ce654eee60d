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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.events import EventBatch, Namespace, Rank, Tier
from kvplug.hashing import (
    BlockHasher,
    Ends,
    Hashes,
    HashesLike,
    TokensLike,
    as_hashes,
    checked_ends,
)
from kvplug.index.adapters import AdapterSeeds
from kvplug.index.annotations import ANNOTATIONS, Annotations, Kind
from kvplug.index.apply_result import ApplyResult
from kvplug.index.arrays import ArrayVersion
from kvplug.index.block_annotation import BlockAnnotation
from kvplug.index.block_copies import BlockCopies, copies_of
from kvplug.index.block_store import BlockStore
from kvplug.index.bounds import Bounds, CapacityGuard
from kvplug.index.cache_groups import CacheGroups
from kvplug.index.event_applier import EventApplier, Flag
from kvplug.index.event_buffers import EventBuffers
from kvplug.index.expiring import ExpiringBlocks
from kvplug.index.hash_spaces import HashSpaces
from kvplug.index.holder_numbers import HolderNumbers
from kvplug.index.lower_tiers import LowerTiers
from kvplug.index.prefix_query import (
    OWN,
    Overlap,
    PrefixQuery,
    SharedReads,
    TierCredits,
    credits_of,
)
from kvplug.index.repeated_stores import RepeatedStores
from kvplug.index.single_events import IndexParts
from kvplug.records import Records

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]


class BlockIndex:
    """Following workers: add_rank, apply, clear, remove_worker. Queries: overlap,
    overlap_of_tokens, annotation.

    `events` applies what engines say (kvplug/index/event_applier.py). Looking inside: len,
    engine_hashes_of, holders_of, nbytes, check. Events and clears of a rank that was not added are
    refused; to ask or to set something of it raises UnknownRankError. Not thread-safe; Router holds
    a lock.
    """

    def __init__(  # noqa: PLR0913 - all but the size by name
        self,
        block_size: int,
        *,
        bigrams: bool = False,
        speculative_ttl_s: float = 2.0,
        query_waiting: Flag | None = None,
        bounds: Bounds = Bounds(),  # noqa: B008 - immutable
        tier_credits: TierCredits = TierCredits(),  # noqa: B008 - immutable
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
        self.speculative = _speculative(speculative_ttl_s, bounds, self._version)
        self.annotations = Annotations(annotations, self.numbers, self.block_store)
        self.cache_groups = CacheGroups(self.numbers, self.block_store, block_size)
        self._repeated_stores = RepeatedStores()
        self.adapters, self.lower_tiers = AdapterSeeds(self.block_store), LowerTiers()
        self._tier_credits, self._confidence = tier_credits, np.ones(0)
        self._prefix_query: PrefixQuery | None = None
        self._shared = OWN
        self.hash_spaces = HashSpaces(self.numbers, self.block_store)
        buffers = EventBuffers(self._version)
        others = _Others(self.speculative, self.annotations, self.adapters, buffers)
        self.capacity_guard = CapacityGuard(bounds, self.hash_spaces, others)
        flag = np.zeros(1, dtype=np.uint8) if query_waiting is None else query_waiting
        parts = IndexParts(
            self.hasher,
            self.hash_spaces,
            self.capacity_guard,
            self.speculative,
            self.annotations,
            self.cache_groups,
            self._repeated_stores,
            self.adapters,
            self.lower_tiers,
            buffers,
        )
        self.events = EventApplier(parts, flag)

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
        return self.capacity_guard.nbytes

    def add_rank(self, rank: Rank) -> int:
        """Follow a rank from now on; returns its number."""
        if rank not in self.numbers:
            self.hash_spaces.add(rank)
            self.set_confidence(rank, 1.0)
            self.speculative.reserve(self.numbers.number_of(rank), 0)
            self.capacity_guard.settle()
        return self.numbers.add(rank)

    def set_confidence(self, rank: Rank, confidence: float) -> None:
        """What a block that the rank holds is worth from now on: 1.0 if its events are trusted."""
        number = self.numbers.number_of(rank)
        missing = number + 1 - len(self._confidence)
        if missing > 0:
            self._confidence = np.concatenate([self._confidence, np.ones(missing)])
            self._version.count += 1
        self._confidence[number] = confidence
        # In place: to collect all arrays anew would hold the next query up for 0.2 ms.
        if self._prefix_query is not None:
            self._prefix_query.set_confidence(number, confidence)

    def set_recomputed(self, rank: Rank, num_blocks: int) -> None:
        """The rank's engine computes so many of the last blocks that match anew (0, or 1 with a
        draft model).
        """
        self.cache_groups.set_recomputed(self.numbers.number_of(rank), num_blocks)

    def remove_worker(self, worker: str) -> None:
        """Forget all ranks of a worker; later events of theirs are refused."""
        for rank in self.hash_spaces.ranks_of(worker):
            self.remove_rank(rank)

    def remove_rank(self, rank: Rank) -> None:
        """Forget one rank of a worker."""
        number = self.numbers.number_of(rank)
        self.clear(rank)
        self.annotations.on_rank_removed(number)
        self.cache_groups.forget(number)
        self.lower_tiers.forget(number)
        self._repeated_stores.forget(number)
        self.hash_spaces.remove(rank)

    def clear(self, rank: Rank, tier: Tier | None = None) -> int:
        """The rank holds nothing any more (in this tier); returns how many copies it had, 0 if it
        is not followed.
        """
        return self.events.clear(rank, tier) if rank in self.numbers else 0

    def adapter_of(self, sequence_hashes: Hashes) -> str:
        """The LoRA adapter that a prompt is for, by its first block; "" if nobody has that."""
        first = sequence_hashes[:1]
        if not len(first) or not self.adapters.nbytes or not self.block_store.table.find(first)[0]:
            return ""
        return self.adapters.adapter_of(self.block_store.seed_of(int(first[0])))

    def refuse_lower_tiers(self, rank: Rank) -> None:
        """Forget what the rank has in host memory and on disk, and refuse what it stores there: it
        does not reuse what it says it has there.
        """
        self.lower_tiers.refuse(self.numbers.number_of(rank))
        for tier in (Tier.HOST, Tier.DISK):
            self.clear(rank, tier)

    def forget_adapter(self, rank: Rank, lora_name: str) -> int:
        """The LoRA adapter has other weights now, so the rank's blocks of it are of no use any
        more; returns how many copies it had. An event that shows it has the same effect.
        """
        return self.events.forget_adapter(rank, lora_name)

    def apply(self, rank: Rank, batch: EventBatch) -> ApplyResult:
        """As EventApplier.apply."""
        return self.events.apply(rank, batch)

    def apply_packed(self, rank: Rank, payload: bytes) -> ApplyResult:
        """As EventApplier.apply_packed."""
        return self.events.apply_packed(rank, payload)

    def apply_records(
        self, rank: Rank, records: Records, first: int, max_blocks: int, applied: ApplyResult
    ) -> int:
        """As EventApplier.apply_records."""
        return self.events.apply_records(rank, records, first, max_blocks, applied)

    def overlap(self, sequence_hashes: HashesLike, now_s: float = 0.0) -> Overlap:
        """What each rank holds of a request; what is expected counts until `now_s` is beyond it.

        `sequence_hashes` are those of its full blocks (`hasher`), not its tokens, of which nobody
        would hold anything: `overlap_of_tokens` takes these.
        """
        return self.prefix_query.overlap(as_hashes(sequence_hashes), now_s)

    def overlap_of_tokens(
        self,
        token_ids: TokensLike,
        namespace: Namespace = Namespace(),  # noqa: B008 - immutable
        now_s: float = 0.0,
    ) -> Overlap:
        """As `overlap`, of a prompt; HashingError for what are no token ids."""
        hashes = self.hasher.sequence_hashes(token_ids, namespace)
        return self.prefix_query.overlap(hashes, now_s)

    def expect(self, rank: Rank, sequence_hashes: HashesLike, now_s: float) -> None:
        """The rank will hold these blocks in a moment: they count until `now_s` is beyond their
        time to live, or its events say more.
        """
        number = self.numbers.number_of(rank)
        self.speculative.insert(number, as_hashes(sequence_hashes), now_s)

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
        credits = credits_of(
            (1.0, *self._tier_credits), self._confidence[: len(self.numbers.ranks)]
        )
        expected = self.speculative.query_arrays
        return PrefixQuery(
            self.block_store,
            self.numbers.owner,
            self.numbers.readers,
            credits,
            expected,
            self.cache_groups.arrays,
            self.numbers.ranks,
            self._shared,
        )

    def read_shared(self, shared: SharedReads) -> None:
        """Another process writes the arrays of the block store from now on: queries allow for it,
        and nothing else may be asked to change them.
        """
        self._shared = shared
        self._version.count += 1

    def annotation(self, kind: type[Kind]) -> Kind:
        """The annotation of a kind, for what only it can answer; KeyError if there is none."""
        return self.annotations[kind]

    def engine_hashes_of(
        self, rank: Rank, tier: Tier | None = None, *, group: int | None = None
    ) -> U64:
        """uint64[n], the engine's own hashes of the blocks that the rank holds: in a tier, or in
        any and in pools; of a KV cache group (on the device unless a tier is named), or of all.
        """
        number = self.numbers.number_of(rank)
        engine_hashes, hashes = self.hash_spaces.of(rank).table.items()
        holders = self.numbers.holders(number, tier)
        if group is not None:
            holder = self.cache_groups.holder_of(number, group, tier or Tier.DEVICE)
            holders = [] if holder is None else [holder]
        return engine_hashes[self.block_store.which_held(hashes, holders)]

    def holders_of(self, sequence_hashes: HashesLike) -> list[dict[Rank, BlockCopies]]:
        """For each of these blocks, which ranks have it, and where; {} for one that nobody has.

        By what events said: blocks that are only expected somewhere are held by nobody.
        """
        return copies_of(as_hashes(sequence_hashes), self.block_store, self.numbers)

    def holds_any(self, rank: Rank) -> bool:
        """Whether the rank has a block in any memory."""
        holders = self.numbers.holders(self.numbers.number_of(rank))
        return any(self.block_store.num_held(holder) for holder in holders)

    def num_resident(self, rank: Rank) -> int:
        """Number of distinct blocks that the rank has on its device; of a hybrid model in the KV
        cache group that has most.
        """
        return self.cache_groups.num_held(self.numbers.number_of(rank))

    def check(self) -> None:
        """Every invariant of every part; raises IndexCorruptError with the broken one."""
        self.numbers.check()
        self.block_store.check()
        self.speculative.check()
        self.annotations.check()
        self.hash_spaces.check()


def _speculative(ttl_s: float, bounds: Bounds, version: ArrayVersion) -> ExpiringBlocks:
    if bounds.max_speculative is None:
        return ExpiringBlocks(ttl_s, version=version)
    blocks = ExpiringBlocks(ttl_s, bounds.max_speculative, version=version)
    blocks.reserve(0, bounds.max_speculative)
    return blocks


class _Others(NamedTuple):
    """What is neither in the block store nor in a hash space (kvplug/index/bounds.py)."""

    speculative: ExpiringBlocks
    annotations: Annotations
    adapters: AdapterSeeds
    buffers: EventBuffers

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self)

    def shrink(self) -> bool:
        return self.buffers.shrink() or self.annotations.shrink() or self.adapters.shrink()

    def erase_gone(self) -> None:
        self.annotations.erase_gone()
