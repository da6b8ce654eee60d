"""Which expert a rank's copies of a block belong to: one label per rank and block.

In:  stored events with MoE labels.   Out: how many of the leading blocks of a request carry a
label, per rank.

    table   hash xor mark of the rank -> number of the label << 32 | rank number

A label goes with the last copy that the rank has of the block, which kernels do not look for:
while any block has a label, events are applied one by one. A later store without a label leaves
it. Labels are numbered on first use; numbers that no block has any more are given up when there
are many.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvplug.errors import IndexCorruptError
from kvplug.events import BlockCopied, MoeLabel, Rank, Tier
from kvplug.index.apply_result import ApplyResult
from kvplug.index.arrays import ArrayVersion
from kvplug.index.block_annotation import (
    AnnotationState,
    BlockAnnotation,
    EventBlocks,
    Stored,
)
from kvplug.index.block_store import BlockStore
from kvplug.index.expiring import mark_of
from kvplug.index.hash_table import HashTable, require_sound
from kvplug.index.holder_numbers import HolderNumbers

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_LABEL_SHIFT, _RANK = np.uint64(32), np.uint64(2**32 - 1)
_MIN_LABELS = 1024


class MoeLabels(BlockAnnotation):
    """num_aligned counts, label looks up; put and erase_gone change."""

    name = "moe"
    array_names: ClassVar[tuple[str, ...]] = ("table",)

    def __init__(self, numbers: HolderNumbers, block_store: BlockStore) -> None:
        super().__init__(numbers, block_store)
        self._number_of: dict[MoeLabel, int] = {}
        self._next, self._max_labels = 1, _MIN_LABELS
        self.table = HashTable(ArrayVersion(is_tight=True))

    def __len__(self) -> int:
        """Number of labelled blocks, counted for each rank."""
        return len(self.table)

    @property
    def needs_all_events(self) -> bool:
        """While any block has a label: it goes with the last copy."""
        return len(self.table) > 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the table."""
        return self.table.nbytes

    def shrink(self) -> bool:
        """Make the table as small as its labels."""
        return self.table.shrink()

    @property
    def num_labels(self) -> int:
        """How many labels have numbers."""
        return len(self._number_of)

    def concerns(self, event: Stored) -> bool:
        """Those with a label."""
        return not isinstance(event, BlockCopied) and event.moe is not None

    def on_stored(self, blocks: EventBlocks, event: Stored, applied: ApplyResult) -> None:
        """Label the blocks."""
        assert not isinstance(event, BlockCopied)
        assert event.moe is not None
        self.put(blocks.rank_number, blocks.hashes, event.moe)

    def on_removed(self, blocks: EventBlocks) -> None:
        """Erase the labels of blocks that the rank has no copy of any more."""
        self._erase_unheld(blocks.rank_number, blocks.hashes)

    def on_clear(self, rank_number: int, tier: Tier | None) -> None:
        """Erase the labels of blocks that the rank has in no other tier."""
        if not len(self.table):
            return
        hashes = self._hashes_of(rank_number)
        lost = self._numbers.holders(rank_number, tier)
        kept = [each for each in self._numbers.holders(rank_number) if each not in lost]
        gone = hashes[~self._block_store.which_held(hashes, kept)]
        self.table.erase(gone ^ mark_of(rank_number))

    def erase_gone(self) -> None:
        """Erase the labels of blocks that their ranks have no copy of any more."""
        for rank_number in self._rank_numbers():
            self._erase_unheld(rank_number, self._hashes_of(rank_number))

    def put(self, rank_number: int, hashes: U64, label: MoeLabel) -> None:
        """The rank's copies of these blocks carry the label, those of them that it has."""
        held = hashes[self._is_held(rank_number, hashes)]
        value = self._value(self._number(label), rank_number)
        self.table.put(held ^ mark_of(rank_number), np.full(len(held), value))

    def label(self, rank: Rank, sequence_hash: int) -> MoeLabel | None:
        """The label of the rank's copies of a block, None if they have none."""
        mark = mark_of(self._numbers.number_of(rank))
        found = self.table.find(np.array([sequence_hash], dtype=np.uint64) ^ mark)
        number = int(found[0] >> _LABEL_SHIFT)
        return next((label for label, n in self._number_of.items() if n == number), None)

    def num_aligned(self, hashes: U64, label: MoeLabel, depths: I64) -> I64:
        """int64[ranks]: how many of each rank's first depths[rank] blocks carry the label. A block
        that the rank reads in a pool carries the label of the rank that has put it there.

        hashes: uint64[n], sequence hashes of a request; depths: int64[ranks], Overlap.held of it.
        """
        number, counts = self._number_of.get(label), np.zeros(len(depths), dtype=np.int64)
        if number is None:
            return counts
        ranks = range(len(depths))
        marks = np.array([mark_of(rank) for rank in ranks], dtype=np.uint64)
        values = np.array([self._value(number, rank) for rank in ranks], dtype=np.uint64)
        self.table.count_equal(hashes, marks, depths, values, counts)
        for rank, labelled in self._labelled_in_pools(hashes, number).items():
            others = labelled & ~self._labelled(hashes, number, rank)
            counts[rank] += np.count_nonzero(others[: depths[rank]])
        return counts

    def _labelled(self, hashes: U64, number: int, rank_number: int) -> Mask:
        """bool[n]: blocks of which the rank's own copies carry the label."""
        found = self.table.find(hashes ^ mark_of(rank_number))
        return np.asarray(found == self._value(number, rank_number))

    def _labelled_in_pools(self, hashes: U64, number: int) -> dict[int, Mask]:
        """By rank that reads pools of others, bool[n]: blocks that carry the label there."""
        found: dict[int, Mask] = {}
        for holder, (owner, workers) in self._numbers.pools.items():
            labelled = self._labelled(hashes, number, owner)
            labelled &= self._block_store.which_held(hashes, [holder])
            for rank_number, rank in enumerate(self._numbers.ranks):
                if rank is not None and rank.worker in workers and rank_number != owner:
                    found[rank_number] = found.get(rank_number, False) | labelled
        return found

    def check(self) -> None:
        """Every label is of a block that the rank holds."""
        self.table.check()
        _, values = self.table.items()
        if not np.isin(values >> _LABEL_SHIFT, list(self._number_of.values())).all():
            raise IndexCorruptError("labels: a label without a number")
        for rank in self._rank_numbers():
            if not self._is_held(rank, self._hashes_of(rank)).all():
                raise IndexCorruptError("labels: a label of a block that the rank has not")

    def save(self) -> AnnotationState:
        """Labels with their numbers, and the table."""
        return AnnotationState(list(self._number_of.items()), {"table": self.table.slots})

    def load(self, state: AnnotationState) -> None:
        """Be what other labels were."""
        slots = state.arrays["table"]
        require_sound("moe.table", slots)
        self._number_of = dict(msgspec.convert(state.settings, list[tuple[MoeLabel, int]]))
        self.table = HashTable(ArrayVersion(is_tight=True), slots)
        self._next = 1 + max(self._number_of.values(), default=0)

    def _rank_numbers(self) -> list[int]:
        """The ranks that have labels."""
        ranks: list[int] = np.unique(self.table.items()[1] & _RANK).tolist()
        return ranks

    def _erase_unheld(self, rank_number: int, hashes: U64) -> None:
        gone = hashes[~self._is_held(rank_number, hashes)]
        self.table.erase(gone ^ mark_of(rank_number))

    def _hashes_of(self, rank_number: int) -> U64:
        """Sequence hashes of the rank's blocks with labels."""
        keys, values = self.table.items()
        return np.asarray(keys[values & _RANK == np.uint64(rank_number)] ^ mark_of(rank_number))

    def _is_held(self, rank_number: int, hashes: U64) -> Mask:
        return self._block_store.which_held(hashes, self._numbers.holders(rank_number))

    def _value(self, number: int, rank_number: int) -> np.uint64:
        return np.uint64(number << int(_LABEL_SHIFT) | rank_number)

    def _number(self, label: MoeLabel) -> int:
        number = self._number_of.get(label)
        if number is None:
            if len(self._number_of) >= self._max_labels:
                self._give_up_unused()
            number = self._number_of[label] = self._next
            self._next += 1
        return number

    def _give_up_unused(self) -> None:
        used = set(np.unique(self.table.items()[1] >> _LABEL_SHIFT).tolist())
        self._number_of = {label: n for label, n in self._number_of.items() if n in used}
        self._max_labels = max(_MIN_LABELS, 2 * len(used))
