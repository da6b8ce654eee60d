"""Which expert the copy of a block belongs to, one label per rank and block.

In:  MoE labels of stored blocks, per rank number and sequence hash.   Out: how many of the leading
blocks of a request carry a label.

    table   hash xor mark of the rank -> number of the label << 32 | rank number

A label goes with the last copy that the rank has of the block. Labels are numbered on first use;
numbers that no block has any more are given up when there are many.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvplug.errors import IndexCorruptError
from kvplug.events import MoeLabel
from kvplug.index.arrays import ArrayVersion
from kvplug.index.block_store import BlockStore
from kvplug.index.expiring import mark_of
from kvplug.index.hash_table import HashTable
from kvplug.index.holder_numbers import HolderNumbers

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_LABEL_SHIFT, _RANK = np.uint64(32), np.uint64(2**32 - 1)
_MIN_LABELS = 1024


class MoeLabels:
    """put, erase_gone, forget; num_aligned counts."""

    def __init__(self, numbers: HolderNumbers, block_store: BlockStore) -> None:
        self._numbers, self._block_store = numbers, block_store
        self._number_of: dict[MoeLabel, int] = {}
        self._next, self._max_labels = 1, _MIN_LABELS
        self.table = HashTable(ArrayVersion(is_tight=True))
        self.are_any = False  # may be True when the last one has just gone

    def __len__(self) -> int:
        return len(self.table)

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the table."""
        return self.table.nbytes

    @property
    def num_labels(self) -> int:
        """How many labels have numbers."""
        return len(self._number_of)

    def state(self) -> list[tuple[MoeLabel, int]]:
        """Every label with its number."""
        return list(self._number_of.items())

    def load(self, state: list[tuple[MoeLabel, int]], slots: U64) -> None:
        """Be what other labels were."""
        self._number_of, self.table = dict(state), HashTable(ArrayVersion(is_tight=True), slots)
        self._next = 1 + max(self._number_of.values(), default=0)
        self.are_any = len(self.table) > 0

    def put(self, rank_number: int, hashes: U64, label: MoeLabel) -> None:
        """The rank's copies of these blocks carry the label, those of them that it has."""
        held = hashes[self._is_held(rank_number, hashes)]
        value = self._value(self._number(label), rank_number)
        self.table.put(held ^ mark_of(rank_number), np.full(len(held), value))
        self.are_any = len(self.table) > 0

    def label(self, rank_number: int, sequence_hash: int) -> MoeLabel | None:
        """The label of the rank's copy of a block, if it has one."""
        key = np.array([sequence_hash], dtype=np.uint64) ^ mark_of(rank_number)
        number = int(self.table.find(key)[0] >> _LABEL_SHIFT)
        return next((label for label, n in self._number_of.items() if n == number), None)

    def erase_gone(self, rank_number: int, hashes: U64 | None = None) -> None:
        """The rank may have lost its last copy of some of these blocks, or of any."""
        self.are_any = len(self.table) > 0
        if not self.are_any:
            return
        hashes = self._hashes_of(rank_number) if hashes is None else hashes
        gone = hashes[~self._is_held(rank_number, hashes)]
        self.table.erase(gone ^ mark_of(rank_number))

    def forget(self, rank_number: int, but: list[int] | None = None) -> None:
        """The rank loses its copies, all `but` those of these holders."""
        self.are_any = len(self.table) > 0
        if not self.are_any:
            return
        hashes = self._hashes_of(rank_number)
        gone = hashes[~self._block_store.which_held(hashes, but or [])]
        self.table.erase(gone ^ mark_of(rank_number))

    def num_aligned(self, hashes: U64, label: MoeLabel, depths: I64) -> I64:
        """int64[ranks]: how many of each rank's first depths[rank] blocks carry the label."""
        number, counts = self._number_of.get(label), np.zeros(len(depths), dtype=np.int64)
        if number is None:
            return counts
        ranks = range(len(depths))
        marks = np.array([mark_of(rank) for rank in ranks], dtype=np.uint64)
        values = np.array([self._value(number, rank) for rank in ranks], dtype=np.uint64)
        self.table.count_equal(hashes, marks, depths, values, counts)
        return counts

    def check(self) -> None:
        """Every label is of a block that the rank holds."""
        self.table.check()
        _, values = self.table.items()
        if not np.isin(values >> _LABEL_SHIFT, list(self._number_of.values())).all():
            raise IndexCorruptError("labels: a label without a number")
        for rank in np.unique(values & _RANK).tolist():
            if not self._is_held(rank, self._hashes_of(rank)).all():
                raise IndexCorruptError("labels: a label of a block that the rank has not")

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
