"""FleetIndex: the indexes of one fleet, one for each model and block size.

In:  workers, with their model and block size as far as they are known; their events.
Out: the indexes that a request has to ask, with what each rank of theirs holds.

Engines of one fleet may differ. Blocks of two sizes have no hashes in common, so each size has an
index of its own; and so has each model, as its prefixes are of no use to another one, and the kind
of engine that keys blocks by pairs of tokens. Ranks have numbers that hold in the whole fleet; an
index has its own, and `Section` translates.

Where a worker belongs may become known after its first events. Two rules follow from that:

* its block size is what it was added with, else the fleet's, else that of the first blocks that it
  stores while it holds none; blocks of another size are refused after that;
* it changes its index only while it holds nothing. Until then it stays where it is: an index that
  serves two models is right, as each rank's blocks are its own, and only longer to walk.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError
from kvplug.events import BlockStored, EventBatch, Rank
from kvplug.index.applied import Applied
from kvplug.index.block_index import BlockIndex
from kvplug.index.bounds import Bounds
from kvplug.index.event_applier import Flag
from kvplug.index.holder_numbers import HolderNumbers
from kvplug.index.sweeping import Clearing
from kvplug.records import Records

I64 = npt.NDArray[np.int64]

NOMINAL_BLOCK_SIZE = 16
"""Counts the load of workers whose block size is not known yet."""


class Blocks(NamedTuple):
    """Tokens per block, and whether an engine keys blocks by pairs of tokens (SGLang, EAGLE)."""

    size: int
    bigrams: bool = False


@dataclass(slots=True, eq=False)
class Section:
    """The index of one model, block size and kind of block (plain, or by pairs of tokens).

    model: "" while no worker in it has named one. fleet_numbers[n] is the fleet's number of the
    index's rank n, -1 if there is none; None where the two are the same.
    """

    model: str
    block_size: int
    index: BlockIndex
    fleet_numbers: I64 | None = None

    @property
    def blocks(self) -> Blocks:
        """What its blocks are."""
        return Blocks(self.block_size, self.index.bigrams)

    @property
    def numbers(self) -> I64:
        """The fleet's numbers of its ranks."""
        if self.fleet_numbers is None:
            return np.arange(len(self.index.numbers.ranks))
        return self.fleet_numbers[self.fleet_numbers >= 0]

    def index_ranks(self, num_ranks: int) -> I64:
        """int64[num_ranks]: the index's number of each rank of the fleet, 0 for those elsewhere."""
        numbers: I64 = np.zeros(num_ranks, dtype=np.int64)
        if self.fleet_numbers is None:
            numbers[:] = np.arange(num_ranks)
        else:
            here = np.flatnonzero(self.fleet_numbers >= 0)
            numbers[self.fleet_numbers[here]] = here
        return numbers


@dataclass(slots=True, eq=False)
class _Member:
    """A worker: what is known of it, the section that its ranks are in, and who holds blocks."""

    model: str
    block_size: int | None
    section: Section
    ranks: list[Rank] = field(default_factory=list)
    holding: set[Rank] = field(default_factory=set)  # stored something since it was last cleared


class FleetIndex:
    """Following workers: add_worker, apply, apply_records, start_clear and end_clear,
    remove_worker. Asking: asked, section_of, workers_with, block_size_of.

    `block_size` holds for workers that are added without one; None: it is learnt. `sections` is
    never empty. Not thread-safe; Router holds a lock.
    """

    def __init__(
        self,
        block_size: int | None,
        *,
        speculative_ttl_s: float,
        is_wanted: Flag | None = None,
        bounds: Bounds = Bounds(),  # noqa: B008 - immutable
    ) -> None:
        self.block_size = block_size
        self.numbers = HolderNumbers()
        self.sections: tuple[Section, ...] = ()
        self._speculative_ttl_s, self._is_wanted = speculative_ttl_s, is_wanted
        self._bounds = bounds
        self._members: dict[str, _Member] = {}
        self._worth: dict[Rank, float] = {}
        self._section_of_number: list[int] = []
        self._open("", Blocks(block_size or NOMINAL_BLOCK_SIZE))

    @property
    def only(self) -> Section | None:
        """The section of a fleet that needs no more than one."""
        return self.sections[0] if len(self.sections) == 1 else None

    def add_worker(self, worker: str, dp_size: int, model: str, block_size: int | None) -> None:
        """Add a worker, or say more about it; "" and None leave what was known."""
        if dp_size < 1:
            raise ConfigError(f"worker {worker!r}: dp_size must be at least 1, got {dp_size}")
        member = self._members.get(worker)
        if member is None:
            size = block_size or self.block_size
            section = self._section_for(model, None if size is None else Blocks(size))
            member = self._members[worker] = _Member(model, block_size, section)
        if block_size not in (None, member.section.block_size):
            self._clear_all(member)  # what it holds is of another size
        member.model, member.block_size = model or member.model, block_size or member.block_size
        for dp_rank in range(len(member.ranks), dp_size):
            self._add_rank(member, Rank(worker, dp_rank))
        self._place(member, None)
        self._renumber()

    def remove_worker(self, worker: str) -> None:
        """Forget a worker with all that it holds; later events of it are refused."""
        member = self._members.pop(worker, None)
        if member is not None:
            member.section.index.remove_worker(worker)
            for rank in member.ranks:
                self.numbers.remove(rank)
                self._worth.pop(rank, None)
            self._renumber()

    def apply(self, rank: Rank, batch: EventBatch) -> Applied:
        """Remember what a rank's engine said, in the index that is right for it."""
        member = self._members.get(rank.worker)
        if member is None:
            return self.sections[0].index.apply(rank, batch)  # which refuses it
        if not member.holding:
            self._place(member, _first_blocks(batch))
        applied = member.section.index.apply(rank, batch)
        if applied.num_stored or applied.num_moved:
            member.holding.add(rank)
        return applied

    def apply_packed(self, rank: Rank, payload: bytes) -> Applied:
        """As BlockIndex.apply_packed, in the index that the rank is in."""
        member = self._members.get(rank.worker)
        if member is None:
            return self.sections[0].index.apply_packed(rank, payload)  # which refuses it
        applied = member.section.index.apply_packed(rank, payload)
        if applied.num_stored:
            member.holding.add(rank)
        return applied

    def apply_records(
        self, rank: Rank, records: Records, first: int, max_blocks: int, applied: Applied
    ) -> int:
        """As BlockIndex.apply_records, in the index that is right for the rank."""
        member = self._members.get(rank.worker)
        if member is None:
            index = self.sections[0].index
            return index.apply_records(rank, records, first, max_blocks, applied)
        if first == 0 and not member.holding:
            size = records.block_size
            self._place(member, None if size is None else Blocks(size))
        index = member.section.index
        at = index.apply_records(rank, records, first, max_blocks, applied)
        if applied.num_stored:
            member.holding.add(rank)
        return at

    def start_clear(self, rank: Rank) -> Clearing:
        """As BlockIndex.start_clear; `end_clear` once it is done."""
        return self._members[rank.worker].section.index.start_clear(rank)

    def end_clear(self, rank: Rank) -> None:
        """The rank holds nothing: its worker may change its index now."""
        member = self._members[rank.worker]
        member.holding.discard(rank)
        self._place(member, None)

    def set_worth(self, rank: Rank, worth: float) -> None:
        """As BlockIndex.set_worth; it stays with the rank when its worker changes the index."""
        if rank in self.numbers:
            self._worth[rank] = worth
            self.section_of(rank).index.set_worth(rank, worth)

    def worth_of(self, rank: Rank) -> float:
        """What the rank's blocks count for, 0 to 1."""
        return self._worth.get(rank, 1.0)

    def workers_with(self, model: str, workers: Collection[str] | None) -> set[str]:
        """Those of the workers that have this model; one that named none may have any."""
        having = {name for name, each in self._members.items() if each.model in ("", model)}
        return having if workers is None else having.intersection(workers)

    def block_size_of(self, worker: str) -> int | None:
        """Tokens per block of the worker; None while that is not known."""
        member = self._members[worker]
        known = member.block_size or self.block_size
        return known or (member.section.block_size if member.holding else None)

    def asked(self, numbers: I64) -> tuple[Section, ...]:
        """The sections that these ranks are in."""
        if len(self.sections) == 1:
            return self.sections
        places = sorted({self._section_of_number[number] for number in numbers.tolist()})
        return tuple(self.sections[place] for place in places)

    def require_hashed(self, num_hashes: int, num_tokens: int) -> None:
        """ConfigError for hashes that cannot be those of a prompt of so many tokens."""
        if len({section.block_size for section in self.sections}) > 1:
            raise ConfigError("hashes are of one block size, the fleet has several")
        hasher, size = self.sections[0].index.hasher, f"{self.sections[0].block_size} tokens"
        num_full = hasher.num_blocks(num_tokens)
        if not len(self.sections[0].index):  # before the first block, its size may be a guess
            num_full, size = num_tokens, "a token or more"
        if num_hashes > num_full:
            raise ConfigError(
                f"cannot look up {num_hashes} hashes: expected at most {num_full}, the full blocks "
                f"of {size} in {num_tokens} tokens"
            )

    def section_of(self, rank: Rank) -> Section:
        """The section that a rank is in; any for a rank of a worker that was removed."""
        member = self._members.get(rank.worker)
        return self.sections[0] if member is None else member.section

    def _add_rank(self, member: _Member, rank: Rank) -> None:
        member.ranks.append(rank)
        self.numbers.add(rank)
        self._join(rank, member.section)

    def _join(self, rank: Rank, section: Section) -> None:
        section.index.add_rank(rank)
        section.index.set_worth(rank, self.worth_of(rank))

    def _clear_all(self, member: _Member) -> None:
        for rank in member.ranks:
            member.section.index.clear(rank)
        member.holding.clear()

    def _place(self, member: _Member, stored: Blocks | None) -> None:
        """Move a worker that holds nothing to where it belongs by what is known now."""
        if member.holding:
            member.section.model = member.section.model or member.model
            return
        told, seen = member.block_size or self.block_size, stored or member.section.blocks
        wanted = Blocks(told or seen.size, seen.bigrams)
        exists = any(section.blocks == wanted for section in self.sections)
        if told is None and not exists and self._is_guess(member.section):
            self._remake(member.section, wanted)
        section = self._section_for(member.model, wanted)
        if section is not member.section:
            self._move(member, section)
            self._renumber()

    def _is_guess(self, section: Section) -> bool:
        """Whether nobody in the section has said which block size it has."""
        members = self._members_of(section)
        return not any(member.holding or member.block_size for member in members)

    def _remake(self, section: Section, blocks: Blocks) -> None:
        # The first to store anything takes along those that have said nothing yet, its equals in
        # all likelihood: a fleet of one kind never has two indexes.
        section.block_size, section.index = blocks.size, self._index(blocks)
        for rank in self.numbers.ranks:
            if rank is not None and self._members[rank.worker].section is section:
                self._join(rank, section)
        self._renumber()

    def _move(self, member: _Member, section: Section) -> None:
        for rank in member.ranks:
            member.section.index.remove_worker(rank.worker)  # all ranks at once
            self._join(rank, section)
        member.section = section

    def _section_for(self, model: str, blocks: Blocks | None) -> Section:
        """The model's section, else one that no model has named; opened if there is none."""
        fitting = [
            section
            for section in self.sections
            if blocks in (None, section.blocks) and (not model or section.model in ("", model))
        ]
        named = [section for section in fitting if section.model == model]
        if not fitting:
            return self._open(model, blocks or Blocks(NOMINAL_BLOCK_SIZE))
        section = (named or fitting)[0]
        section.model = section.model or model
        return section

    def _open(self, model: str, blocks: Blocks) -> Section:
        section = Section(model, blocks.size, self._index(blocks))
        self.sections = (*self.sections, section)
        return section

    def _index(self, blocks: Blocks) -> BlockIndex:
        return BlockIndex(
            blocks.size,
            bigrams=blocks.bigrams,
            speculative_ttl_s=self._speculative_ttl_s,
            is_wanted=self._is_wanted,
            bounds=self._bounds,
        )

    def _members_of(self, section: Section) -> list[_Member]:
        return [member for member in self._members.values() if member.section is section]

    def _renumber(self) -> None:
        """Drop sections that nobody is in; bring the numbers of ranks up to date."""
        in_use = tuple(section for section in self.sections if self._members_of(section))
        self.sections = in_use or self.sections[:1]
        if not in_use:
            self.sections[0].model = ""
        self._section_of_number = [0] * len(self.numbers.ranks)
        for place, section in enumerate(self.sections):
            self._renumber_section(place, section)

    def _renumber_section(self, place: int, section: Section) -> None:
        ranks = section.index.numbers.ranks
        numbers = [-1 if rank is None else self.numbers.number_of(rank) for rank in ranks]
        for number in numbers:
            if number >= 0:
                self._section_of_number[number] = place
        is_same = ranks == self.numbers.ranks
        section.fleet_numbers = None if is_same else np.array(numbers, dtype=np.int64)


def _first_blocks(batch: EventBatch) -> Blocks | None:
    for event in batch.events:
        if isinstance(event, BlockStored):
            return Blocks(event.block_size, event.bigrams)
    return None
