"""BlockIndex: which rank holds which block, exactly as the engines said.

In:  event batches per rank.   Out: per rank, how many leading blocks of a request it holds.

Three parts:

    holdings   sequence hash x holder (a rank with a tier)      index/holdings.py
    domains    engine hash -> row of the block, one table per engine hash space
    speculative blocks of requests that were routed but not reported yet

Engines name parents and removals by their own hashes. Ranks of one domain give equal blocks equal
engine hashes, so one table serves them all. A rank whose hashes disagree (another algorithm,
another seed) is moved into a domain of its own, without loss.

What is not certain is refused and counted, never guessed (`Refusal`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.errors import IndexCorruptError
from kvplug.events import (
    AllBlocksCleared,
    BlockCopied,
    BlockRemoved,
    BlockStored,
    CxlStateTransition,
    Event,
    EventBatch,
    Rank,
    SequenceHash,
    Tier,
)
from kvplug.hashing import BASE_SEED, BlockHasher, Hashes, as_tokens, seed_of
from kvplug.index.applied import Applied, Refusal
from kvplug.index.clearing import Clearing
from kvplug.index.domain import Domain
from kvplug.index.expiring import ExpiringBlocks
from kvplug.index.holder_numbers import HolderNumbers
from kvplug.index.holdings import Holdings, Segments
from kvplug.index.record_applier import Flag, RecordApplier
from kvplug.kernels import costing
from kvplug.records import Records

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]

TIER_CREDIT = {Tier.DEVICE: 1.0, Tier.HOST: 0.75, Tier.DISK: 0.25}
"""What a block is worth by its nearest copy; Dynamo 1.6.1 has the same defaults."""

# A slot of a table is looked at in a fraction of the time that a block takes to store.
_SLOTS_PER_BLOCK = 8


class Overlap(NamedTuple):
    """What each rank holds of a request, by rank number.

    depth: int64[ranks], leading blocks held in any tier, speculative ones included;
    credit: float64[ranks], what they are worth in blocks: at most `depth`, less on lower tiers and
    on ranks of which not everything is known.
    """

    depth: I64
    credit: F64


class BlockIndex:
    """Following workers: add_rank, apply, clear, remove_worker. Asking: match, overlap.

    Looking inside: len, engine_hashes_of, nbytes, check. Not thread-safe; Router holds a lock.
    """

    def __init__(
        self,
        block_size: int,
        *,
        speculative_ttl_s: float = 2.0,
        is_wanted: Flag | None = None,
    ) -> None:
        """`is_wanted`, uint8[1]: another thread sets it to have `apply_records` return early."""
        self.hasher = BlockHasher(block_size)
        self.numbers = HolderNumbers()
        self.holdings = Holdings()
        self.speculative = ExpiringBlocks(speculative_ttl_s)
        self._worth: F64 = np.ones(0)
        self._domain_of: dict[Rank, Domain] = {}
        self._common_domain = Domain()
        self._clearing: tuple[Tier | None, Clearing] | None = None
        self._recorded = RecordApplier(
            block_size,
            self.numbers,
            self.holdings,
            self.speculative,
            np.zeros(1, dtype=np.uint8) if is_wanted is None else is_wanted,
        )

    def __len__(self) -> int:
        """Number of distinct blocks that any rank holds."""
        return len(self.holdings)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.hasher.block_size

    @property
    def domains(self) -> set[Domain]:
        """The engine hash spaces in use."""
        return set(self._domain_of.values())

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all tables and arrays."""
        domains = sum(domain.table.nbytes for domain in self.domains)
        return self.holdings.nbytes + self.speculative.nbytes + domains

    def add_rank(self, rank: Rank) -> int:
        """Follow a rank from now on; returns its number."""
        if rank not in self.numbers:
            self._join(rank, self._common_domain)
            self.set_worth(rank, 1.0)
        return self.numbers.add(rank)

    def set_worth(self, rank: Rank, worth: float) -> None:
        """What a block that the rank holds is worth from now on: 1.0 if all of them are known."""
        number = self.numbers.number_of(rank)
        missing = max(0, number + 1 - len(self._worth))
        self._worth = np.concatenate([self._worth, np.ones(missing)])
        self._worth[number] = worth

    def remove_worker(self, worker: str) -> None:
        """Forget all ranks of a worker; later events of theirs are refused."""
        for rank in [r for r in self._domain_of if r.worker == worker]:
            self.clear(rank)
            self._domain_of.pop(rank).ranks.discard(rank)
            self.numbers.remove(rank)

    def clear(self, rank: Rank, tier: Tier | None = None) -> int:
        """The rank holds nothing any more (in this tier); returns how many copies it had."""
        clearing = self.start_clear(rank, tier)
        while not clearing.is_done:
            clearing.advance(clearing.num_slots)
        return clearing.num_dropped

    def start_clear(self, rank: Rank, tier: Tier | None = None) -> Clearing:
        """A clear to be done in stretches; nothing else may change the index before it is done."""
        number, domain = self.numbers.number_of(rank), self._domain_of[rank]
        self.speculative.forget(number)
        holders, members = self.numbers.holders(number, tier), self._recorded.members_of(domain)
        return Clearing(self.holdings, domain, holders, members)

    def apply(self, rank: Rank, batch: EventBatch) -> Applied:
        """Remember what a rank said; what is refused is counted in the result."""
        applied = Applied()
        if rank not in self.numbers:
            applied.refuse(Refusal.UNKNOWN_RANK, len(batch.events))
            return applied
        for event in batch.events:
            self._apply_event(rank, event, applied)
        return applied

    def apply_records(
        self, rank: Rank, records: Records, first: int, max_blocks: int, applied: Applied
    ) -> int:
        """Apply records from number `first` on, counted in `applied`; returns the next number.

        Ends once about `max_blocks` blocks are done, or when somebody sets `is_wanted`, so that a
        caller with a lock can give way to queries; other changes have to wait until all records
        are applied.
        """
        if rank not in self.numbers:
            applied.refuse(Refusal.UNKNOWN_RANK, records.num_events - first)
            return records.num_events
        if self._clearing is not None:
            return first + self._go_on_clearing(_SLOTS_PER_BLOCK * max_blocks, applied)
        at = self._recorded.apply(rank, self._domain_of[rank], records, first, max_blocks, applied)
        if at == records.num_events or not self._recorded.needs_decision:
            return at
        event = records.event(at)
        if isinstance(event, AllBlocksCleared):
            self._clearing = event.tier, self.start_clear(rank, event.tier)
            return at
        self._apply_event(rank, event, applied)
        return at + 1

    def _go_on_clearing(self, max_slots: int, applied: Applied) -> bool:
        """Whether the clear that a run of records has come to is done."""
        assert self._clearing is not None
        tier, clearing = self._clearing
        clearing.advance(max_slots)
        if clearing.is_done:
            self._clearing = None
            applied.clear(clearing.num_dropped, everything=tier is None)
        return clearing.is_done

    def match(self, sequence_hashes: Hashes) -> Segments:
        """Segments of the leading blocks that any rank holds."""
        return self.holdings.match(sequence_hashes)

    def overlap(self, sequence_hashes: Hashes, now_s: float) -> Overlap:
        """What each rank holds of a request; `now_s` lets speculative blocks expire."""
        num_ranks = len(self.numbers.ranks)
        depth, credit = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks)
        segments = self.match(sequence_hashes)
        if len(segments.ends):
            sets, holders = self.holdings.sets, self.numbers
            costing.overlap(
                segments.ends,
                segments.sets,
                sets.bits,
                sets.words,
                holders.rank_of_holder,
                self._credit_of_holder(),
                depth,
                credit,
            )
        reached = self.speculative.extend(sequence_hashes, depth, now_s)
        return Overlap(reached, credit * self._worth[:num_ranks] + (reached - depth))

    def engine_hashes_of(self, rank: Rank, tier: Tier | None = None) -> U64:
        """uint64[n], the engine's own hashes of the blocks that the rank holds."""
        number = self.numbers.number_of(rank)
        names, rows = self._domain_of[rank].table.items()
        holders = self.numbers.holders(number, tier)
        held = self.holdings.sets.any_of(holders)[self.holdings.set_of_row[rows]]
        return names[held]

    def check(self) -> None:
        """Every invariant of every part; raises IndexCorruptError with the broken one."""
        self.holdings.check()
        self.speculative.check()
        for rank, domain in self._domain_of.items():
            if rank not in domain.ranks or rank not in self.numbers:
                raise IndexCorruptError(f"index: {rank} is in no domain or has no number")
        for domain in self.domains:
            self._check_domain(domain)

    def _check_domain(self, domain: Domain) -> None:
        domain.table.check()
        _, rows = domain.table.items()
        held = np.flatnonzero(self._is_held_in(domain, np.arange(len(self.holdings.set_of_row))))
        if not np.array_equal(np.sort(rows), held.astype(np.uint64)):
            raise IndexCorruptError("domain: engine hashes and held blocks do not pair up")

    def _apply_event(self, rank: Rank, event: Event, applied: Applied) -> None:
        match event:
            case BlockStored(bigrams=False):
                self._store(rank, event, applied)
            case BlockCopied():
                self._copy(rank, event, applied)
            case BlockRemoved():
                self._remove(rank, event, applied)
            case AllBlocksCleared():
                applied.clear(self.clear(rank, event.tier), everything=event.tier is None)
            case BlockStored():
                applied.refuse(Refusal.BIGRAM_TOKENS, len(event.block_hashes))
            case CxlStateTransition():
                applied.refuse(Refusal.CXL_TRANSITION, len(event.block_hashes))

    def _store(self, rank: Rank, event: BlockStored, applied: Applied) -> None:
        num_blocks = len(event.block_hashes)
        if event.block_size != self.block_size:
            return applied.refuse(Refusal.BLOCK_SIZE, num_blocks)
        if len(set(event.block_hashes)) != num_blocks:
            return applied.refuse(Refusal.CONFLICTING_HASH, num_blocks)
        parent_row = self._row_of(rank, event.parent)
        if event.parent is not None and not parent_row:
            return applied.refuse(Refusal.UNKNOWN_PARENT, num_blocks)
        seed = self._namespace_seed(event, parent_row)
        hashes = self.hasher.sequence_hashes(
            as_tokens(event.token_ids),
            seed,
            parent=self._hash_of_row(parent_row),
            extra_keys=event.extra_keys,
        )
        if len(hashes) != num_blocks:
            return applied.refuse(Refusal.MISALIGNED, num_blocks)
        names = _as_u64(event.block_hashes)
        if not self._agree_on_names(rank, names, hashes):
            return applied.refuse(Refusal.CONFLICTING_HASH, num_blocks)
        self._hold(rank, event.tier, names, hashes, seed)
        applied.num_stored += num_blocks
        return None

    def _hold(self, rank: Rank, tier: Tier, names: U64, hashes: Hashes, seed: int) -> None:
        number = self.numbers.number_of(rank)
        rows, _ = self.holdings.store(self.numbers.holder(number, tier), hashes)
        self.holdings.seed_of_row[rows] = seed
        self._domain_of[rank].table.put(names, rows)
        self.speculative.confirm(number, hashes)

    def _copy(self, rank: Rank, event: BlockCopied, applied: Applied) -> None:
        """The engine hash stands for a content, which is known if a rank here holds the block."""
        rows = self._domain_of[rank].table.find(_as_u64(event.block_hashes))
        known = rows[rows != 0]
        number = self.numbers.number_of(rank)
        self.holdings.store_rows(self.numbers.holder(number, event.tier), known)
        applied.num_stored += len(known)
        applied.refuse(Refusal.NO_TOKENS, len(rows) - len(known))

    def _remove(self, rank: Rank, event: BlockRemoved, applied: Applied) -> None:
        domain, number = self._domain_of[rank], self.numbers.number_of(rank)
        names = _as_u64(event.block_hashes)
        rows = domain.table.find(names)
        names, rows = names[rows != 0], rows[rows != 0]
        had, gone = self.holdings.drop(self.numbers.holder(number, event.tier), rows)
        still_named = self._is_held_in(domain, rows[gone])
        domain.table.erase(names[gone][~still_named])
        applied.num_removed += int(had.sum())
        applied.refuse(Refusal.UNKNOWN_BLOCK, len(event.block_hashes) - int(had.sum()))

    def _row_of(self, rank: Rank, name: int | None) -> int:
        if name is None:
            return 0
        return int(self._domain_of[rank].table.find(_as_u64((name,)))[0])

    def _hash_of_row(self, row: int) -> SequenceHash | None:
        return SequenceHash(int(self.holdings.hash_of_row[row])) if row else None

    def _namespace_seed(self, event: BlockStored, parent_row: int) -> int:
        # Real vLLM (0.32) names the salt of a prompt with its first chunk only.
        if event.namespace is not None:
            return seed_of(event.namespace)
        return int(self.holdings.seed_of_row[parent_row]) if parent_row else BASE_SEED

    def _agree_on_names(self, rank: Rank, names: U64, hashes: Hashes) -> bool:
        """Whether the rank's engine hashes fit its domain, if need be one of its own."""
        if not self._conflicts(self._domain_of[rank], names, hashes):
            return True
        if len(self._domain_of[rank].ranks) == 1:
            return False
        self._move_to_own_domain(rank)
        return not self._conflicts(self._domain_of[rank], names, hashes)

    def _conflicts(self, domain: Domain, names: U64, hashes: Hashes) -> bool:
        """One name for two contents, or two names for one content."""
        named, held = domain.table.find(names), self.holdings.find(hashes)
        other_content = (named != 0) & (named != held)
        other_name = (named == 0) & self._is_held_in(domain, held)
        return bool((other_content | other_name).any())

    def _is_held_in(self, domain: Domain, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """bool[rows], whether any rank of the domain holds the block."""
        sets = self.holdings.set_of_row[rows]
        if len(domain.ranks) == len(self._domain_of):
            return np.asarray(sets != 0)
        holders = self.numbers.holders_of(domain.ranks)
        return np.asarray(self.holdings.sets.any_of(holders)[sets])

    def _move_to_own_domain(self, rank: Rank) -> None:
        """Take the names of the rank's blocks along; the others forget what only it held."""
        common, own = self._domain_of[rank], Domain()
        names, rows = common.table.items()
        common.ranks.discard(rank)
        self._join(rank, own)
        mine = self._is_held_in(own, rows)
        own.table.put(names[mine], rows[mine])
        self._forget_dead_names(common)

    def _join(self, rank: Rank, domain: Domain) -> None:
        self._domain_of[rank] = domain
        domain.ranks.add(rank)
        self.numbers.add(rank)

    def _forget_dead_names(self, domain: Domain) -> None:
        names, rows = domain.table.items()
        domain.table.erase(names[~self._is_held_in(domain, rows)])

    def _credit_of_holder(self) -> F64:
        credits = np.array([TIER_CREDIT[tier] for tier in Tier])
        return np.asarray(credits[self.numbers.tier_of_holder])


def _as_u64(numbers: Sequence[int]) -> U64:
    return np.frombuffer(array("Q", numbers), dtype=np.uint64)
