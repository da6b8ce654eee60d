"""BlockIndex: which rank holds which block, exactly as the engines said.

In:  event batches per rank.   Out: per rank, how many leading blocks of a request it holds.

Five parts:

    holdings   sequence hash x holder (a rank with a tier)      index/holdings.py
    domains    engine hash -> sequence hash, one table per engine hash space
    speculative blocks of requests that were routed but not reported yet
    cxl        which blocks are or were in a CXL pool                  index/cxl.py
    labels     which expert a copy belongs to                          index/moe_labels.py

Engines name parents and removals by their own hashes. Ranks of one domain give equal blocks equal
engine hashes, so one table serves them all. A rank whose hashes disagree (another algorithm,
another seed) is moved into a domain of its own, without loss.

What is not certain is refused and counted, never guessed (`Refusal`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvplug import packed
from kvplug.errors import IndexCorruptError
from kvplug.events import (
    AllBlocksCleared,
    BlockCopied,
    BlockRemoved,
    BlockStored,
    CxlMetadata,
    CxlStateTransition,
    EngineHash,
    Event,
    EventBatch,
    MoeLabel,
    Rank,
    SequenceHash,
    Tier,
)
from kvplug.hashing import BASE_SEED, BlockHasher, Hashes, HashesLike, as_hashes, as_tokens, seed_of
from kvplug.index.applied import Applied, Refusal
from kvplug.index.asking import Asking, credits_of
from kvplug.index.bounds import Bounds
from kvplug.index.changes import Changes
from kvplug.index.cxl import CxlBlocks, Named
from kvplug.index.domain import Domain
from kvplug.index.event_applier import EventApplier, Flag
from kvplug.index.evicting import Eviction
from kvplug.index.expiring import ExpiringBlocks
from kvplug.index.holder_numbers import HolderNumbers
from kvplug.index.holdings import Holdings, Stretch
from kvplug.index.moe_labels import MoeLabels
from kvplug.index.overlap import Overlap
from kvplug.index.room import Room
from kvplug.index.sweeping import Clearing
from kvplug.kernels import checking
from kvplug.packed import PackedCleared, PackedEvent, PackedRemoved, PackedStored, U64Like
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
    """Following workers: add_rank, apply, clear, remove_worker. Asking: match, overlap.

    Looking inside: len, engine_hashes_of, nbytes, check. Not thread-safe; Router holds a lock.
    """

    def __init__(
        self,
        block_size: int,
        *,
        speculative_ttl_s: float = 2.0,
        is_wanted: Flag | None = None,
        bounds: Bounds = Bounds(),  # noqa: B008 - immutable
    ) -> None:
        """`is_wanted`, uint8[1]: another thread sets it to have `apply_records` return early."""
        self.hasher = BlockHasher(block_size)
        self._changes = Changes()
        self.numbers = HolderNumbers(self._changes)
        self.holdings = Holdings(self._changes)
        self.speculative = ExpiringBlocks(speculative_ttl_s, changes=self._changes)
        self.cxl = CxlBlocks(self.numbers, self.holdings)
        self.labels = MoeLabels(self.numbers, self.holdings)
        self._worth: F64 = np.ones(0)
        self._asking: Asking | None = None
        self._domain_of: dict[Rank, Domain] = {}
        self._common_domain = Domain(self._changes)
        self._clearing: tuple[Tier | None, Clearing] | None = None
        self._eviction: Eviction | None = None
        self.room = Room(
            bounds, self.holdings, self._others_nbytes, self._all_named, self._forget_gone
        )
        flag = np.zeros(1, dtype=np.uint8) if is_wanted is None else is_wanted
        self._applier = EventApplier(block_size, self.numbers, self.room, self.speculative, flag)

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
    def common_domain(self) -> Domain:
        """The engine hash space that new ranks are taken to have."""
        return self._common_domain

    @property
    def all_domains(self) -> list[Domain]:
        """Those in use, and the common one."""
        return [self._common_domain, *(self.domains - {self._common_domain})]

    def load_domains(self, ranks: list[list[Rank]], names: list[U64], common: int) -> None:
        """Be in the domains that another index was in; its numbers and holdings are loaded."""
        domains = [Domain(self._changes, slots) for slots in names]
        self._common_domain = domains[common]
        for members, domain in zip(ranks, domains, strict=True):
            domain.ranks.update(members)
            self._domain_of.update(dict.fromkeys(members, domain))
        self._changes.count += 1

    @property
    def worth(self) -> F64:
        """float64[ranks], what a block of each rank is worth."""
        return self._worth[: len(self.numbers.ranks)]

    @worth.setter
    def worth(self, by_number: F64) -> None:
        self._worth = by_number
        self._changes.count += 1

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all tables and arrays."""
        return self.holdings.nbytes + self.room.nbytes + self._others_nbytes(None, 0)

    def _others_nbytes(self, growing: Domain | None, num_more: int) -> int:
        domains = sum(domain.table.nbytes for domain in self.domains)
        if growing is not None:
            domains += growing.table.grown_nbytes(num_more) - growing.table.nbytes
        besides = self.speculative.nbytes + self.cxl.states.nbytes + self.labels.nbytes
        return besides + domains

    def _all_named(self) -> list[tuple[U64, U64]]:
        return [self._named(domain) for domain in self.domains]

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
        self._changes.count += 1

    def remove_worker(self, worker: str) -> None:
        """Forget all ranks of a worker; later events of theirs are refused."""
        for rank in [r for r in self._domain_of if r.worker == worker]:
            self.clear(rank)
            self.cxl.remove(self.numbers.number_of(rank))
            self._domain_of.pop(rank).ranks.discard(rank)
            self.numbers.remove(rank)
        self._changes.count += 1

    def clear(self, rank: Rank, tier: Tier | None = None) -> int:
        """The rank holds nothing any more (in this tier); returns how many copies it had."""
        clearing = self.start_clear(rank, tier)
        clearing.finish()
        return clearing.num_dropped

    def start_clear(self, rank: Rank, tier: Tier | None = None) -> Clearing:
        """A clear to be done in stretches; nothing else may change the index before it is done."""
        number, domain = self.numbers.number_of(rank), self._domain_of[rank]
        self.speculative.forget(number)
        holders = self.numbers.holders(number, tier)
        self.labels.forget(number, but=list(set(self.numbers.holders(number)) - set(holders)))
        if tier is None:
            self.cxl.forget(number)
        return Clearing(self.holdings, self._named(domain), holders)

    def apply(self, rank: Rank, batch: EventBatch) -> Applied:
        """Remember what a rank said; what is refused is counted in the result."""
        applied = Applied()
        if rank not in self.numbers:
            applied.refuse(Refusal.UNKNOWN_RANK, len(batch.events))
            return applied
        for event in batch.events:
            self._apply_event(rank, event, applied)
        return applied

    def apply_packed(self, rank: Rank, payload: bytes) -> Applied:
        """Remember packed events (kvplug/packed.py); DecodeError, and nothing done, if they are
        none.
        """
        applied, domain = Applied(), self._domain_of.get(rank)
        if domain is None:
            applied.refuse(Refusal.UNKNOWN_RANK, packed.header(payload)[0])
        elif len(self.labels):  # they go with the last copy, which the kernels do not look for
            for event in packed.decode(payload):
                self._apply_packed_event(rank, event, applied)
        elif len(self.labels):
            self._apply_packed_from(0, rank, payload, applied)
        elif not self._applier.apply_packed(rank, domain, payload, applied):
            # Behind an event that needs a decision the rest of a payload goes one by one.
            self._apply_packed_from(self._applier.num_applied, rank, payload, applied)
        return applied

    def _apply_packed_from(self, first: int, rank: Rank, payload: bytes, applied: Applied) -> None:
        for event in packed.decode(payload)[first:]:
            self._apply_packed_event(rank, event, applied)

    def _apply_packed_event(self, rank: Rank, event: PackedEvent, applied: Applied) -> None:
        match event:
            case PackedRemoved():
                removed = BlockRemoved(block_hashes=_names(event.names), tier=event.tier)
                return self._remove(rank, removed, applied)
            case PackedCleared():
                number = self.clear(rank, event.tier)
                return applied.clear(number, everything=event.tier is None)
            case PackedStored():
                parent = self._hash_of(rank, event.parent)
                if event.parent is not None and parent is None:
                    return applied.refuse(self._why_unknown(event.parent), len(event.names))
                if len(event.names) != len(event.hashes):
                    return applied.refuse(Refusal.MISALIGNED, len(event.names))
                seed = event.seed if parent is None else self.holdings.seed_of(parent)
                names, hashes = as_hashes(event.names), as_hashes(event.hashes)
                return self._hold(
                    rank, event.tier, Stretch(hashes, parent or 0, seed, names), applied
                )

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
        if self._eviction is not None:
            self._go_on_evicting(_STEPS_PER_BLOCK * max_blocks)
            return first
        if self._clearing is not None:
            return first + self._go_on_clearing(_STEPS_PER_BLOCK * max_blocks, applied)
        at = first
        if not len(self.labels):
            at = self._applier.apply_records(
                rank, self._domain_of[rank], records, first, max_blocks, applied
            )
            if self._applier.num_over:
                return at + self._start_evicting(self._applier.num_over, applied)
            if at == records.num_events or not self._applier.needs_decision:
                return at
        event = records.event(at)
        if isinstance(event, AllBlocksCleared):
            self._clearing = event.tier, self.start_clear(rank, event.tier)
            return at
        self._apply_event(rank, event, applied)
        return at + 1

    def _start_evicting(self, num_blocks: int, applied: Applied) -> bool:
        """Whether the event is done with, as there is nothing that could go for it."""
        self._eviction = self.room.eviction(num_blocks)
        if self._eviction.num_blocks:
            return False
        self._eviction = None
        applied.refuse(Refusal.INDEX_FULL, num_blocks)
        return True

    def _forget_gone(self) -> None:
        """Blocks have left the index by themselves: what is known of them besides goes, too."""
        self.cxl.erase_gone()
        for rank in self._domain_of:
            self.labels.erase_gone(self.numbers.number_of(rank))

    def _go_on_evicting(self, max_steps: int) -> None:
        assert self._eviction is not None
        self._eviction.advance(max_steps)
        if self._eviction.is_done:
            self._eviction = None
            self._forget_gone()

    def _go_on_clearing(self, max_steps: int, applied: Applied) -> bool:
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
        return self.asking.overlap(as_hashes(sequence_hashes), now_s)

    def overlap_many(self, sequence_hashes: Hashes, ends: I64, now_s: float = 0.0) -> list[Overlap]:
        """What each rank holds of many requests.

        Their hashes one after the other; request i has those up to ends[i].
        """
        return self.asking.overlap_many(sequence_hashes, ends, now_s)

    @property
    def asking(self) -> Asking:
        """The index as it is now, for a kernel that asks more than that."""
        if self._asking is None or self._asking.num_changes != self._changes.count:
            self._asking = self._ask()
        return self._asking

    def _ask(self) -> Asking:
        credits = credits_of(_CREDITS, self._worth[: len(self.numbers.ranks)])
        expected = self.speculative.query_arrays
        numbers = self.numbers
        return Asking(self.holdings, numbers.owner, numbers.readers, credits, expected)

    def moe_hits(
        self, sequence_hashes: HashesLike, label: MoeLabel, overlap: Overlap | None = None
    ) -> I64:
        """int64[ranks]: how many of the leading blocks that a rank holds carry the label there.

        `overlap` of the same hashes, if it was asked for already.
        """
        overlap = self.overlap(sequence_hashes) if overlap is None else overlap
        return self.labels.num_aligned(as_hashes(sequence_hashes), label, overlap.held)

    def cxl_metadata(self, rank: Rank, sequence_hash: SequenceHash | int) -> CxlMetadata | None:
        """The last CXL state of a block, and where it is or was; None if nothing is known."""
        return self.cxl.metadata(self.numbers.number_of(rank), sequence_hash)

    def engine_hashes_of(self, rank: Rank, tier: Tier | None = None) -> U64:
        """uint64[n], the engine's own hashes of the blocks that the rank holds: in a tier, or in
        any and in pools.
        """
        number = self.numbers.number_of(rank)
        names, hashes = self._domain_of[rank].table.items()
        return names[self.holdings.which_held(hashes, self.numbers.holders(number, tier))]

    def check(self) -> None:
        """Every invariant of every part; raises IndexCorruptError with the broken one."""
        self.numbers.check()
        self.holdings.check()
        self.speculative.check()
        self.cxl.check()
        self.labels.check()
        for rank, domain in self._domain_of.items():
            if rank not in domain.ranks or rank not in self.numbers:
                raise IndexCorruptError(f"index: {rank} is in no domain or has no number")
        for domain in self.domains:
            self._check_domain(domain)

    def _check_domain(self, domain: Domain) -> None:
        domain.table.check()
        names, members = self._named(domain)
        held, words = self.holdings, self.holdings.sets.words
        seen = np.zeros(held.table.capacity // 8 + 1, dtype=np.uint8)
        arrays = held.table.slots, held.runs.words, held.sets.bits, words, members
        num_named = checking.count_named(names, *arrays, seen)
        if not len(domain.table) == num_named == checking.count_held(*arrays):
            raise IndexCorruptError("domain: engine hashes and held blocks do not pair up")

    def _named(self, domain: Domain) -> tuple[U64, U64]:
        """Slots and members of a domain, as kernels/residency.py wants them."""
        return domain.table.slots, self._applier.members_of(domain)

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
                self._move(rank, event, applied)

    def _store(self, rank: Rank, event: BlockStored, applied: Applied) -> None:
        num_blocks = len(event.block_hashes)
        if event.block_size != self.block_size:
            return applied.refuse(Refusal.BLOCK_SIZE, num_blocks)
        parent = self._hash_of(rank, event.parent)
        if event.parent is not None and parent is None:
            return applied.refuse(self._why_unknown(event.parent), num_blocks)
        seed = self._namespace_seed(event, parent)
        hashes = self.hasher.sequence_hashes(
            as_tokens(event.token_ids), seed, parent=parent, extra_keys=event.extra_keys
        )
        if len(hashes) != num_blocks:
            return applied.refuse(Refusal.MISALIGNED, num_blocks)
        names, num_stored = _as_u64(event.block_hashes), applied.num_stored
        self._hold(rank, event.tier, Stretch(hashes, parent or 0, seed, names), applied)
        if applied.num_stored > num_stored and (event.cxl is not None or event.moe is not None):
            self._annotate(self._blocks(rank, names, hashes), event, applied)
        return None

    def _annotate(self, blocks: Named, event: BlockStored, applied: Applied) -> None:
        if event.cxl is not None:
            self.cxl.store(blocks, event.tier, event.cxl, applied)
        if event.moe is not None:
            self.labels.put(blocks.rank_number, blocks.hashes, event.moe)

    def _hold(self, rank: Rank, tier: Tier, stretch: Stretch, applied: Applied) -> None:
        number, num_blocks = self.numbers.number_of(rank), len(stretch.hashes)
        holder, domain = self.numbers.holder(number, tier), self._domain_of[rank]
        if not self.room.make(domain, holder, stretch.hashes):
            return applied.refuse(Refusal.INDEX_FULL, num_blocks)
        if stretch.parent and not self.holdings.table.find(_as_u64((stretch.parent,)))[0]:
            return applied.refuse(Refusal.PARENT_EVICTED, num_blocks)
        domain.table.reserve(num_blocks)
        if self.holdings.store(holder, stretch, self._named(domain)) is not None:
            self.speculative.confirm(number, stretch.hashes)
            applied.num_stored += num_blocks
        elif len(domain.ranks) > 1 and len(np.unique(stretch.names)) == num_blocks:
            # Its engine hashes are not the others': another algorithm, another seed.
            self._move_to_own_domain(rank)
            self._hold(rank, tier, stretch, applied)
        else:
            applied.refuse(Refusal.CONFLICTING_HASH, num_blocks)
        return None

    def _copy(self, rank: Rank, event: BlockCopied, applied: Applied) -> None:
        """The engine hash stands for a content, which is known if a rank here holds the block."""
        hashes = self._domain_of[rank].table.find(_as_u64(event.block_hashes))
        known = hashes[hashes != 0]
        number = self.numbers.number_of(rank)
        self.holdings.copy(self.numbers.holder(number, event.tier), known)
        applied.num_stored += len(known)
        applied.refuse(Refusal.NO_TOKENS, len(hashes) - len(known))

    def _remove(self, rank: Rank, event: BlockRemoved, applied: Applied) -> None:
        number, domain = self.numbers.number_of(rank), self._domain_of[rank]
        names, holder = _as_u64(event.block_hashes), self.numbers.holder(number, event.tier)
        hashes = domain.table.find(names) if len(self.labels) else names[:0]
        num_had = self.holdings.drop_named(holder, names, self._named(domain))
        self.labels.erase_gone(number, hashes)
        applied.num_removed += num_had
        applied.refuse(Refusal.UNKNOWN_BLOCK, len(names) - num_had)

    def _why_unknown(self, parent: int) -> Refusal:
        # A parent that the index gave up itself is no sign of a lost event.
        is_lost = parent in self.room.lost_names
        return Refusal.PARENT_EVICTED if is_lost else Refusal.UNKNOWN_PARENT

    def _move(self, rank: Rank, event: CxlStateTransition, applied: Applied) -> None:
        names = _as_u64(tuple(dict.fromkeys(event.block_hashes)))
        hashes = self._domain_of[rank].table.find(names)
        applied.refuse(Refusal.UNKNOWN_BLOCK, int((hashes == 0).sum()))
        blocks = self._blocks(rank, names, hashes).only(hashes != 0)
        said = CxlMetadata(event.new_state, event.pool_id, event.accessible_workers)
        self.speculative.confirm(blocks.rank_number, blocks.hashes)
        self.cxl.move(blocks, said, applied)
        self.labels.erase_gone(blocks.rank_number, blocks.hashes)

    def _blocks(self, rank: Rank, names: U64, hashes: U64) -> Named:
        domain = partial(self._named, self._domain_of[rank])
        return Named(self.numbers.number_of(rank), names, hashes, domain)

    def _hash_of(self, rank: Rank, name: int | None) -> SequenceHash | None:
        if name is None:
            return None
        hash_ = int(self._domain_of[rank].table.find(_as_u64((name,)))[0])
        return SequenceHash(hash_) if hash_ else None

    def _namespace_seed(self, event: BlockStored, parent: SequenceHash | None) -> int:
        # Real vLLM (0.32) names the salt of a prompt with its first chunk only.
        if event.namespace is not None:
            return seed_of(event.namespace)
        return BASE_SEED if parent is None else self.holdings.seed_of(parent)

    def _move_to_own_domain(self, rank: Rank) -> None:
        """Take the names of the rank's blocks along; the others forget what only it held."""
        common, own = self._domain_of[rank], Domain(self._changes)
        names, hashes = common.table.items()
        common.ranks.discard(rank)
        self._join(rank, own)
        mine = self.holdings.which_held(hashes, self.numbers.holders_of(own.ranks))
        own.table.put(names[mine], hashes[mine])
        theirs = self.holdings.which_held(hashes, self.numbers.holders_of(common.ranks))
        common.table.erase(names[~theirs])
        self._changes.count += 1

    def _join(self, rank: Rank, domain: Domain) -> None:
        self._domain_of[rank] = domain
        domain.ranks.add(rank)
        self.numbers.add(rank)
        self._changes.count += 1


def _names(numbers: U64Like) -> tuple[EngineHash, ...]:
    return tuple(map(EngineHash, np.asarray(numbers).tolist()))


def _as_u64(numbers: Sequence[int]) -> U64:
    return np.frombuffer(array("Q", numbers), dtype=np.uint64)
