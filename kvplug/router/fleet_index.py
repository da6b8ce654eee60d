"""FleetIndex: the indexes of one fleet, one for each model and block size.

In:  workers with what is known of their model and block size, and their events.
Out: the indexes to query for a request.

Engines of one fleet may differ. Blocks of two sizes have no hashes in common, so each size has an
index of its own. So has each model, because no other model can use its prefixes, and each kind of
engine that keys blocks by pairs of tokens. A rank has one number in the whole fleet and another one
in its index; `IndexGroup` translates.

The model and block size of a worker may become known only with its first events. So:

* the block size of a worker is the one that it was added with, else the fleet's, else that of the
  first blocks that it stores while it holds none. Blocks of another size are rejected after that;
* a worker moves to another index only while it holds nothing. An index that serves two models gives
  right answers, because each rank's blocks are its own; it only takes longer to search.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError
from kvplug.events import MAX_DP_SIZE, BlockStored, EventBatch, Rank
from kvplug.hashing import Hashes
from kvplug.index.apply_result import ApplyResult
from kvplug.index.block_index import BlockIndex
from kvplug.index.bounds import Bounds
from kvplug.index.event_applier import Flag
from kvplug.index.event_values import is_sound
from kvplug.index.holder_numbers import HolderNumbers
from kvplug.index.packed_run import PackedRun
from kvplug.index.prefix_query import TierCredits
from kvplug.index.snapshot import IndexOptions
from kvplug.index.sweeping import Clearing
from kvplug.records import Records
from kvplug.router.index_group import Blocks, IndexGroup, Member, SavedGroup
from kvplug.setting import shown, whole

I64 = npt.NDArray[np.int64]

NOMINAL_BLOCK_SIZE = 16
"""Used to count the load of workers whose block size is not known yet."""


class FleetOptions(TypedDict):
    """What a FleetIndex is made with."""

    block_size: int | None
    speculative_ttl_s: float
    query_waiting: Flag
    bounds: Bounds
    tier_credits: TierCredits


class FleetIndex:
    """Following workers: add_worker, apply, apply_records, start_clear and end_clear,
    remove_worker. Queries: groups_with, group_of, workers_with, block_size_of.

    `block_size` is for workers that are added without one; None: taken from their events. `groups`
    is never empty. Not thread-safe; Router holds a lock.
    """

    def __init__(
        self,
        block_size: int | None,
        *,
        speculative_ttl_s: float,
        query_waiting: Flag | None = None,
        bounds: Bounds = Bounds(),  # noqa: B008 - immutable
        tier_credits: TierCredits = TierCredits(),  # noqa: B008 - immutable
    ) -> None:
        self.block_size = block_size
        self.numbers = HolderNumbers()
        self.groups: tuple[IndexGroup, ...] = ()
        self._speculative_ttl_s, self._query_waiting = speculative_ttl_s, query_waiting
        self._bounds, self._tier_credits = bounds, tier_credits
        self._members: dict[str, Member] = {}
        self._confidence: dict[Rank, float] = {}
        self._num_recomputed: dict[Rank, int] = {}
        self._group_of_number: list[int] = []
        self._num_joins = 0
        self._open("", Blocks(block_size or NOMINAL_BLOCK_SIZE))

    @property
    def only(self) -> IndexGroup | None:
        """The group of a fleet that needs only one, else None."""
        return self.groups[0] if len(self.groups) == 1 else None

    def add_worker(self, worker: str, dp_size: int, model: str, block_size: int | None) -> None:
        """Add a worker, or say more about it; "" and None leave what was known."""
        if not 1 <= whole(dp_size) <= MAX_DP_SIZE:
            expected = f"dp_size must be a whole number in [1, {MAX_DP_SIZE}]"
            raise ConfigError(f"worker {worker!r}: {expected}, got {shown(dp_size)}")
        if not isinstance(model, str):
            raise ConfigError(f"worker {worker!r}: model must be a name, got {shown(model)}")
        if block_size is not None and not whole(block_size) >= 1:
            raise ConfigError(
                f"worker {worker!r}: block_size must be at least 1, got {shown(block_size)}"
            )
        member = self._members.get(worker)
        if member is None:
            size = block_size or self.block_size
            group = self._group_for(model, None if size is None else Blocks(size))
            member = self._members[worker] = Member(model, block_size, group)
            self._note_joined(member)
        if block_size not in (None, member.group.block_size):
            self._clear_all(member)  # what it holds is of another size
        member.model, member.block_size = model or member.model, block_size or member.block_size
        for dp_rank in range(len(member.ranks), dp_size):
            self._add_rank(member, Rank(worker, dp_rank))
        self._place(member, None)
        self._renumber()

    def remove_worker(self, worker: str) -> None:
        """Forget a worker with all that it holds; its later events are rejected."""
        member = self._members.pop(worker, None)
        if member is not None:
            member.group.index.remove_worker(worker)
            for group in self.groups:
                group.index.numbers.set_pools_read_by(worker, ())
            for rank in member.ranks:
                self.numbers.remove(rank)
                self._confidence.pop(rank, None)
                self._num_recomputed.pop(rank, None)
            self._renumber()

    def apply(self, rank: Rank, batch: EventBatch) -> ApplyResult:
        """Apply a rank's events to its index."""
        member = self._members.get(rank.worker)
        if member is None:
            return self.groups[0].index.events.apply(rank, batch)  # which rejects it
        if not member.holding:
            self._place(member, _first_blocks(batch))
        applied = member.group.index.events.apply(rank, batch)
        if applied.num_stored or applied.num_moved:
            member.holding.add(rank)
        return applied

    def apply_packed(
        self, rank: Rank, run: PackedRun, end: int, max_blocks: int, applied: ApplyResult
    ) -> None:
        """As EventApplier.apply_packed_run, in the index that the rank is in."""
        member = self._members.get(rank.worker)
        group = self.groups[0] if member is None else member.group  # which rejects it
        group.index.events.apply_packed_run(rank, run, end, max_blocks, applied)
        if member is not None and (applied.num_stored or applied.num_moved):
            member.holding.add(rank)

    def set_blocks(self, rank: Rank, blocks: Blocks) -> bool:
        """Whether the rank's worker can have such blocks; it is in their index then."""
        member = self._members[rank.worker]
        told = member.block_size or self.block_size
        if told not in (None, blocks.size):
            return False
        if not member.holding:
            self._place(member, blocks)
        return member.group.blocks == blocks

    def apply_records(
        self, rank: Rank, records: Records, first: int, max_blocks: int, applied: ApplyResult
    ) -> int:
        """As EventApplier.apply_records, in the index that is right for the rank."""
        member = self._members.get(rank.worker)
        if member is None:
            events = self.groups[0].index.events
            return events.apply_records(rank, records, first, max_blocks, applied)
        if first == 0 and not member.holding:
            size = records.block_size
            self._place(member, None if size is None else Blocks(size))
        events = member.group.index.events
        at = events.apply_records(rank, records, first, max_blocks, applied)
        if applied.num_stored:
            member.holding.add(rank)
        return at

    @property
    def index_options(self) -> IndexOptions:
        """What the fleet's indexes are made with."""
        return {
            "bounds": self._bounds,
            "speculative_ttl_s": self._speculative_ttl_s,
            "query_waiting": self._query_waiting,
            "tier_credits": self._tier_credits,
        }

    @property
    def members(self) -> Mapping[str, Member]:
        """The workers, to be read."""
        return self._members

    def require_fitting(self, block_size: int) -> None:
        """ConfigError unless one index with such blocks can be all that the fleet has."""
        attempt = "cannot load an index"
        if self.only is None:
            raise ConfigError(f"{attempt}: expected a fleet with one index, this one has several")
        self.require_empty(attempt)
        for worker, member in self._members.items():
            size = member.block_size or self.block_size
            if size not in (None, block_size):
                raise ConfigError(
                    f"{attempt} with blocks of {block_size} tokens: those of {worker} have {size}"
                )

    def require_empty(self, attempt: str) -> None:
        """ConfigError for a fleet of which any worker has blocks."""
        num_blocks = sum(len(group.index) for group in self.groups)
        if num_blocks:
            raise ConfigError(
                f"{attempt}: expected a router without blocks, this one has {num_blocks}"
            )

    def take_over(self, saved: Sequence[SavedGroup]) -> list[Rank]:
        """Go on with these indexes instead of the empty ones. What they have of ranks that are not
        in the fleet, or of another model or block size now, is left out; returns those ranks.
        """
        left_out = [rank for each in reversed(saved) for rank in self._take(each)]
        first = next((group for group in self.groups if len(group.index)), None)
        for member in self._members.values():
            is_open = first is not None and not member.holding and self._is_guess(member.group)
            self._place(member, first.blocks if first is not None and is_open else None)
        self._renumber()
        return left_out

    def _take(self, saved: SavedGroup) -> list[Rank]:
        """Of the ranks of the index, those that are left out."""
        index, taken = saved.index, []
        for worker in saved.workers:
            member = self._members.get(worker)
            if member is not None and saved.fits(member, member.block_size or self.block_size):
                taken.append(member)
        ranks = {rank for member in taken for rank in member.ranks}
        left_out = [rank for rank in index.numbers.ranks if rank and rank not in ranks]
        for rank in left_out:
            index.remove_rank(rank)
        if taken:
            self._say_pools(index)
            group = IndexGroup(saved.model, index.block_size, index)
            self.groups = (group, *self.groups)
            for member in taken:
                self._move(member, group)
                member.holding.update(filter(index.holds_any, member.ranks))
        return left_out

    def forget_adapter(self, rank: Rank, lora_name: str) -> int:
        """As BlockIndex.forget_adapter."""
        return self._members[rank.worker].group.index.forget_adapter(rank, lora_name)

    def adapter_of(self, rank: Rank, sequence_hashes: Hashes) -> str:
        """The LoRA adapter that a prompt is for, by its first block; "" if nobody has that."""
        return self.group_of(rank).index.adapter_of(sequence_hashes)

    def refuse_lower_tiers(self, rank: Rank) -> None:
        """As BlockIndex.refuse_lower_tiers."""
        self.group_of(rank).index.refuse_lower_tiers(rank)

    def start_clear(self, rank: Rank) -> Clearing:
        """As EventApplier.start_clear; `end_clear` once it is done."""
        return self._members[rank.worker].group.index.events.start_clear(rank)

    def end_clear(self, rank: Rank) -> None:
        """The rank holds nothing: its worker may change its index now."""
        member = self._members[rank.worker]
        member.holding.discard(rank)
        self._place(member, None)

    def set_confidence(self, rank: Rank, confidence: float) -> None:
        """As BlockIndex.set_confidence; it stays with the rank when its worker changes the
        index.
        """
        if rank in self.numbers:
            self._confidence[rank] = confidence
            self.group_of(rank).index.set_confidence(rank, confidence)

    def confidence_of(self, rank: Rank) -> float:
        """What the rank's blocks count for, 0 to 1."""
        return self._confidence.get(rank, 1.0)

    def set_recomputed(self, rank: Rank, num_blocks: int) -> None:
        """As BlockIndex.set_recomputed; it stays with the rank, too."""
        if rank in self.numbers:
            self._num_recomputed[rank] = num_blocks
            self.group_of(rank).index.set_recomputed(rank, num_blocks)

    def num_recomputed(self, rank: Rank) -> int:
        """How many of the last blocks that match the rank's engine computes anew."""
        index = self.group_of(rank).index
        return index.cache_groups.num_recomputed(index.numbers.number_of(rank))

    def set_taints(self, worker: str, taints: frozenset[str]) -> None:
        """The worker has these taints, and no others."""
        self._members[worker].taints = taints

    def taints_of(self, worker: str) -> frozenset[str]:
        """The taints that the worker was added with."""
        return self._members[worker].taints

    def set_cxl_pools(self, worker: str, pool_ids: Collection[int]) -> None:
        """The worker can read these CXL pools: copies there that name no workers are its, too."""
        self._members[worker].cxl_pools = frozenset(pool_ids)
        for group in self.groups:
            group.index.numbers.set_pools_read_by(worker, pool_ids)

    def is_heard(self, rank: Rank) -> bool:
        """Whether events of the rank have stored blocks since it was last cleared, and count."""
        member = self._members.get(rank.worker)
        return member is not None and rank in member.holding and self.confidence_of(rank) > 0

    def model_of(self, worker: str) -> str:
        """What the worker serves; "" while that is not known, or for no member."""
        member = self._members.get(worker)
        return "" if member is None else member.model

    def workers_with(self, model: str, workers: Collection[str] | None) -> set[str]:
        """The workers that have this model; a worker without a model counts for any."""
        having = {name for name, each in self._members.items() if each.model in ("", model)}
        return having if workers is None else having.intersection(workers)

    def block_size_of(self, worker: str) -> int | None:
        """Tokens per block of the worker; None while that is not known."""
        member = self._members[worker]
        known = member.block_size or self.block_size
        return known or (member.group.block_size if member.holding else None)

    def groups_with(self, numbers: I64) -> tuple[IndexGroup, ...]:
        """The groups that these ranks are in."""
        if len(self.groups) == 1:
            return self.groups
        places = sorted({self._group_of_number[number] for number in numbers.tolist()})
        return tuple(self.groups[place] for place in places)

    def require_hashed(self, num_hashes: int, num_tokens: int) -> None:
        """ConfigError for hashes that cannot be those of a prompt of so many tokens."""
        self.require_one_block_size("look up hashes")
        self.groups[0].require_hashed(num_hashes, num_tokens)

    def require_one_block_size(self, attempt: str) -> None:
        """ConfigError for a fleet that has several."""
        sizes = sorted({group.block_size for group in self.groups})
        if len(sizes) > 1:
            raise ConfigError(
                f"cannot {attempt}: expected a fleet with one block size, this one has {sizes}"
            )

    def group_of(self, rank: Rank) -> IndexGroup:
        """The group that a rank is in; any group for a rank of a worker that was removed."""
        member = self._members.get(rank.worker)
        return self.groups[0] if member is None else member.group

    def joined_as(self, worker: str) -> int:
        """Another number each time that a worker comes, or gets another block size and loses its
        blocks; 0 while it is not in the fleet.
        """
        member = self._members.get(worker)
        return 0 if member is None else member.joined_as

    def _add_rank(self, member: Member, rank: Rank) -> None:
        member.ranks.append(rank)
        self.numbers.add(rank)
        self._join(rank, member.group)

    def _join(self, rank: Rank, group: IndexGroup) -> None:
        group.index.add_rank(rank)
        group.index.set_confidence(rank, self.confidence_of(rank))
        if rank in self._num_recomputed:
            group.index.set_recomputed(rank, self._num_recomputed[rank])

    def _clear_all(self, member: Member) -> None:
        for rank in member.ranks:
            member.group.index.clear(rank)
        member.holding.clear()
        self._note_joined(member)

    def _note_joined(self, member: Member) -> None:
        self._num_joins += 1
        member.joined_as = self._num_joins

    def _place(self, member: Member, stored: Blocks | None) -> None:
        """Move a worker that holds nothing to the group where it belongs now."""
        if member.holding:
            member.group.model = member.group.model or member.model
            return
        told, seen = member.block_size or self.block_size, stored or member.group.blocks
        wanted = Blocks(told or seen.size, seen.bigrams)
        exists = any(group.blocks == wanted for group in self._own_groups())
        if told is None and not exists and self._is_guess(member.group):
            self._remake(member.group, wanted)
        group = self._group_for(member.model, wanted)
        if group is not member.group:
            self._move(member, group)
            self._renumber()

    def _is_guess(self, group: IndexGroup) -> bool:
        """Whether no worker of the group has said its block size."""
        members = self._members_of(group)
        return not any(member.holding or member.block_size for member in members)

    def _remake(self, group: IndexGroup, blocks: Blocks) -> None:
        # The first worker that stores anything takes along those that have said nothing yet, which
        # are most likely of its kind: a uniform fleet never has two indexes.
        group.block_size, group.index = blocks.size, self._index(blocks)
        for rank in self.numbers.ranks:
            if rank is not None and self._members[rank.worker].group is group:
                self._join(rank, group)
        self._renumber()

    def _move(self, member: Member, group: IndexGroup) -> None:
        for rank in member.ranks:
            member.group.index.remove_worker(rank.worker)  # all ranks at once
            self._join(rank, group)
        member.group = group

    def _group_for(self, model: str, blocks: Blocks | None) -> IndexGroup:
        """The model's group, else one without a model; opened if there is none."""
        fitting = [
            group
            for group in self._own_groups()
            if blocks in (None, group.blocks) and (not model or group.model in ("", model))
        ]
        named = [group for group in fitting if group.model == model]
        if not fitting:
            return self._open(model, blocks or Blocks(NOMINAL_BLOCK_SIZE))
        group = (named or fitting)[0]
        group.model = group.model or model
        return group

    def _own_groups(self) -> tuple[IndexGroup, ...]:
        """Those whose ranks are told here, and not by another process (kvplug/shared)."""
        return self.groups

    def _open(self, model: str, blocks: Blocks) -> IndexGroup:
        group = IndexGroup(model, blocks.size, self._index(blocks))
        self.groups = (*self.groups, group)
        return group

    def _index(self, blocks: Blocks) -> BlockIndex:
        index = BlockIndex(blocks.size, bigrams=blocks.bigrams, **self.index_options)
        self._say_pools(index)
        return index

    def _say_pools(self, index: BlockIndex) -> None:
        for worker, member in self._members.items():
            if member.cxl_pools:
                index.numbers.set_pools_read_by(worker, member.cxl_pools)

    def _members_of(self, group: IndexGroup) -> list[Member]:
        return [member for member in self._members.values() if member.group is group]

    def _renumber(self) -> None:
        """Drop groups without workers; bring the numbers of ranks up to date."""
        in_use = tuple(group for group in self.groups if self._members_of(group))
        self.groups = in_use or self.groups[:1]
        if not in_use:
            self.groups[0].model = ""
        self._group_of_number = [0] * len(self.numbers.ranks)
        for place, group in enumerate(self.groups):
            self._renumber_group(place, group)

    def _numbers_of(self, ranks: list[Rank | None]) -> list[int]:
        return [-1 if rank is None else self.numbers.number_of(rank) for rank in ranks]

    def _renumber_group(self, place: int, group: IndexGroup) -> None:
        ranks = group.index.numbers.ranks
        numbers = self._numbers_of(ranks)
        for number in numbers:
            if number >= 0:
                self._group_of_number[number] = place
        is_same = ranks == self.numbers.ranks
        group.fleet_numbers = None if is_same else np.array(numbers, dtype=np.int64)


def _first_blocks(batch: EventBatch) -> Blocks | None:
    for event in batch.events:
        if isinstance(event, BlockStored) and is_sound(event):
            return Blocks(event.block_size, event.bigrams)
    return None
