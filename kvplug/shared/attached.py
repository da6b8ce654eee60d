"""AttachedFleet: the indexes of a fleet whose arrays another process writes.

In:  workers, as for FleetIndex; pages of the writer.   Out: the indexes to query for a request.

Which workers there are, and their numbers in the fleet, is this process's own matter. The ranks of
a worker that a page has are in the index that the page puts them in; a worker that no page has yet
is in an empty index of this process, and is chosen by its load.
"""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from kvplug.events import Rank
from kvplug.index.block_index import BlockIndex
from kvplug.index.prefix_query import SharedReads
from kvplug.kernels import matching
from kvplug.kernels.peer_load import CONFIDENCE, FACT_WIDTH
from kvplug.kernels.versioned import FACTS, GENERATION
from kvplug.router.fleet_index import FleetIndex, FleetOptions
from kvplug.router.index_group import Blocks, IndexGroup, Member
from kvplug.shared import layout, pages
from kvplug.shared.folder import SharedFolder
from kvplug.shared.pages import SHARED_ARRAYS, PageIndex

U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_MAX_TRIES = 16  # a writer that grows all the time may have moved on each time


class Attached:
    """One index of the writer: the group that queries use, and facts of its ranks, by number."""

    def __init__(self, group: IndexGroup, facts: F64) -> None:
        self.group, self.facts = group, facts
        self._own_numbers = np.arange(len(group.index.numbers.ranks))

    @property
    def fleet_numbers(self) -> I64:
        """int64[ranks of the index]: the number of each in the fleet, -1 for none."""
        known = self.group.fleet_numbers
        return self._own_numbers if known is None else known

    def apply_confidence(self) -> None:
        """What the blocks of its ranks are worth now."""
        said = self.facts[CONFIDENCE::FACT_WIDTH]
        for number in np.flatnonzero(said != self.group.index.confidence).tolist():
            rank = self.group.index.numbers.ranks[number]
            if rank is not None:
                self.group.index.set_confidence(rank, float(said[number]))


class AttachedFleet(FleetIndex):
    """attach; the queries of FleetIndex. Nothing else changes what is attached.

    `reads`: uint64[matching.READS_WIDTH], what came of reading; `attached`: the writer's indexes.
    """

    def __init__(self, folder: SharedFolder, **options: Unpack[FleetOptions]) -> None:
        self.attached: list[Attached] = []
        self.reads: U64 = np.zeros(matching.READS_WIDTH, dtype=np.uint64)
        self._folder, self._control = folder, folder.open(layout.CONTROL)
        # Single words are read in a third of the time by a memoryview.
        self._control_words, self._reads_words = self._control.data, self.reads.data
        self._seen_facts = -1
        super().__init__(**options)

    @property
    def is_behind(self) -> bool:
        """Whether the writer has published arrays that are not attached."""
        return self._control_words[GENERATION] != self._reads_words[matching.SEEN]

    def have_facts_changed(self) -> bool:
        """Whether the writer has changed facts, since it was asked last."""
        num_changes = self._control_words[FACTS]
        if num_changes == self._seen_facts:
            return False
        self._seen_facts = num_changes
        return True

    def forget_facts(self) -> None:
        """Ranks have come, or have other numbers: all facts are new to them."""
        self._seen_facts = -1

    def attach(self) -> bool:
        """Use the arrays that the writer has published last; False if they cannot be had now."""
        for _ in range(_MAX_TRIES):
            generation = int(self._control[GENERATION])
            try:
                page = pages.decode(self._folder.read(layout.page_name(generation)))
                attached = [self._attached(each) for each in page.indexes]
            except FileNotFoundError:
                if generation == int(self._control[GENERATION]):
                    return False  # the writer has died
                continue
            self.reads[matching.SEEN] = generation
            self.attached = attached
            self._assign()
            return True
        return False

    def _attached(self, page: PageIndex) -> Attached:
        group = self._group_of_page(page)
        arrays: dict[str, Any] = {
            name: self._folder.open(page.arrays[name]) for name in SHARED_ARRAYS
        }
        arrays["header"] = arrays["header"].view(np.int64)
        facts = self._folder.open(page.facts).view(np.float64) if page.facts else np.zeros(0)
        group.index = self._index_of_page(page, group.index)
        group.index.block_store.read(*arrays.values())
        group.index.confidence = facts[CONFIDENCE::FACT_WIDTH].copy()
        return Attached(group, facts)

    def _group_of_page(self, page: PageIndex) -> IndexGroup:
        """The same one for the same index: what is known of its traffic is kept."""
        blocks = Blocks(page.block_size, page.bigrams)
        for each in self.attached:
            if (each.group.model, each.group.blocks) == (page.model, blocks):
                return each.group
        return IndexGroup(page.model, page.block_size, self._index(blocks))

    def _index_of_page(self, page: PageIndex, before: BlockIndex) -> BlockIndex:
        """An index whose numbers are those of the page; the one before, with what is expected
        there, unless a number stands for another rank now.
        """
        index = before
        if not _goes_on(before.numbers.ranks, page.ranks):
            index = self._index(Blocks(page.block_size, page.bigrams))
        pages.fill_numbers(index, page)
        index.read_shared(SharedReads(self._control, self.reads))
        return index

    def add_worker(self, worker: str, dp_size: int, model: str, block_size: int | None) -> None:
        """As FleetIndex."""
        super().add_worker(worker, dp_size, model, block_size)
        self._assign()

    def remove_worker(self, worker: str) -> None:
        """As FleetIndex; the writer does the same with its arrays."""
        member = self._members.get(worker)
        if member is not None and self._is_attached(member.group):
            member.group = self._open("", member.group.blocks)
        super().remove_worker(worker)

    def _clear_all(self, member: Member) -> None:
        if self._is_attached(member.group):
            member.group = self._open("", member.group.blocks)
        super()._clear_all(member)

    def set_confidence(self, rank: Rank, confidence: float) -> None:
        """Nothing: the writer knows."""

    def set_recomputed(self, rank: Rank, num_blocks: int) -> None:
        """Nothing: the writer knows."""

    def block_size_of(self, worker: str) -> int | None:
        """As FleetIndex, or as the writer knows it."""
        group = self._members[worker].group
        if self._is_attached(group) and len(group.index):
            return group.block_size
        return super().block_size_of(worker)

    def _is_attached(self, group: IndexGroup) -> bool:
        return any(each.group is group for each in self.attached)

    def _own_groups(self) -> tuple[IndexGroup, ...]:
        return tuple(group for group in self.groups if not self._is_attached(group))

    def _place(self, member: Member, stored: Blocks | None) -> None:
        if not self._is_attached(member.group):
            super()._place(member, stored)

    def _assign(self) -> None:
        """Each worker into the index that the writer has it in, if it has all of its ranks."""
        known = {
            rank: each.group for each in self.attached for rank in each.group.index.numbers.ranks
        }
        for member in self._members.values():
            groups = {known.get(rank) for rank in member.ranks}
            [group] = groups if len(groups) == 1 else [None]
            if group is not None:
                member.group = group
            elif not self._still_has(member):
                member.group = self._open("", Blocks(self.block_size or member.group.block_size))
                for rank in member.ranks:
                    self._join(rank, member.group)
        self.groups = (*(each.group for each in self.attached), *self._own_groups())
        self._renumber()

    def _still_has(self, member: Member) -> bool:
        """Whether its group is one of this process, with all of its ranks."""
        numbers = member.group.index.numbers
        is_own = any(member.group is group for group in self._own_groups())
        return is_own and all(rank in numbers for rank in member.ranks)

    def _renumber(self) -> None:
        """Before the first worker is added, no group has any; they keep their models."""
        models = [group.model for group in self.groups]
        super()._renumber()
        for group, model in zip(self.groups, models, strict=False):
            if not self._members:
                group.model = model

    def _numbers_of(self, ranks: list[Rank | None]) -> list[int]:
        """A rank of the writer may have no number in this fleet yet."""
        known = [rank is not None and rank in self.numbers for rank in ranks]
        return super()._numbers_of(
            [rank if is_known else None for rank, is_known in zip(ranks, known, strict=True)]
        )


def _goes_on(before: list[Rank | None], now: list[Rank | None]) -> bool:
    """Whether each number still stands for the rank that it stood for."""
    pairs = zip(before, now, strict=False)
    return len(now) >= len(before) and all(old in (None, new) for old, new in pairs)
