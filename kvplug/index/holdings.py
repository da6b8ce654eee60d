"""The relation block x holder, in arrays.

In:  sequence hashes and a holder number.   Out: who holds which leading blocks, as segments.

Each held block has a row, numbered from 1:

    table              sequence hash -> row                    kernels/table.py
    hash_of_row[row]   its sequence hash, for removal
    set_of_row[row]    number of its set of holders, 0 = free  kernels/holders.py
    seed_of_row[row]   the seed of its namespace, for blocks that follow it
    copies             (holder, row) -> copies above the first one: engines store a block twice
                       and remove it twice

A block that nobody holds has no row; its number is used again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.errors import IndexCorruptError
from kvplug.index.hash_table import HashTable
from kvplug.index.holder_sets import HolderSets
from kvplug.kernels import matching

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]

_MIN_ROWS = 64
_HOLDER_SHIFT = np.uint64(32)


class Segments(NamedTuple):
    """Runs of a request's leading blocks with the same holders.

    ends: int64[n], where each run ends (exclusive, in blocks); sets: int64[n], its set number.
    """

    ends: I64
    sets: I64


class Holdings:
    """store, drop and match; arrays only. Kernels change them, too (kernels/blocks.py)."""

    def __init__(self) -> None:
        self.table = HashTable()
        self.sets = HolderSets()
        self.copies = HashTable()
        self.hash_of_row: U64 = np.zeros(_MIN_ROWS, dtype=np.uint64)
        self.set_of_row: U32 = np.zeros(_MIN_ROWS, dtype=np.uint32)
        self.seed_of_row: U64 = np.zeros(_MIN_ROWS, dtype=np.uint64)
        self.free_rows: U64 = np.arange(_MIN_ROWS - 1, 0, -1).astype(np.uint64)
        self.num_free: I64 = np.array([_MIN_ROWS - 1], dtype=np.int64)
        self._num_growths = 0

    def __len__(self) -> int:
        """Number of blocks that somebody holds."""
        return len(self.table)

    @property
    def num_growths(self) -> int:
        """How often arrays have become others, by growing."""
        parts = self.table.num_growths + self.copies.num_growths + self.sets.num_growths
        return self._num_growths + parts

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all tables and arrays."""
        parts = (self.hash_of_row, self.set_of_row, self.seed_of_row, self.free_rows)
        tables = self.table.nbytes + self.copies.nbytes + self.sets.nbytes
        return tables + sum(int(part.nbytes) for part in parts)

    def store(self, holder: int, sequence_hashes: U64) -> tuple[U64, int]:
        """The holder has one more copy of each block.

        Returns the row of each block and how many blocks the holder did not have before.
        """
        rows = self._rows_for(sequence_hashes)
        return rows, self.store_rows(holder, rows)

    def store_rows(self, holder: int, rows: U64) -> int:
        """As `store`, for blocks that have rows; returns how many the holder did not have."""
        self.sets.reserve(holder, len(rows))
        was_new = self.sets.add(holder, rows, self.set_of_row)
        if not was_new.all():
            self.copies.count_up(_copy_keys(holder, rows[~was_new]))
        return int(was_new.sum())

    def drop(self, holder: int, rows: U64) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """The holder has one copy less of each block; rows may repeat.

        Returns two masks over the rows: which blocks the holder had, and which it has no more.
        """
        kept = np.zeros(len(rows), dtype=np.bool_)
        if len(self.copies):
            kept = self.copies.count_down(_copy_keys(holder, rows))
        gone = np.zeros(len(rows), dtype=np.bool_)
        gone[~kept] = self._remove(holder, rows[~kept])
        return kept | gone, gone

    def rows_of(self, holder: int) -> U64:
        """The rows of the blocks that the holder has."""
        return self.sets.rows_of(holder, self.set_of_row)

    def find(self, sequence_hashes: U64) -> U64:
        """The row of each block, 0 where nobody holds it."""
        return self.table.find(sequence_hashes)

    def match(self, sequence_hashes: U64) -> Segments:
        """Segments of the leading blocks that anybody holds."""
        rows = self.table.find_prefix(sequence_hashes)
        ends = np.empty(len(rows), dtype=np.int64)
        sets = np.empty(len(rows), dtype=np.int64)
        num_segments = matching.segments(rows, self.set_of_row, ends, sets)
        return Segments(ends[:num_segments], sets[:num_segments])

    def num_copies(self, holder: int, rows: U64) -> U64:
        """How many copies of each block the holder has, at least 1 for those that it has."""
        return self.copies.find(_copy_keys(holder, rows)) + np.uint64(1)

    def check(self) -> None:
        """Every invariant of the docstring; raises IndexCorruptError."""
        self.table.check()
        self.copies.check()
        self.sets.check(self.set_of_row)
        hashes, rows = self.table.items()
        if not np.array_equal(self.hash_of_row[rows], hashes):
            raise IndexCorruptError("holdings: a row does not carry the hash that leads to it")
        if np.count_nonzero(self.set_of_row) != len(rows) or not self.set_of_row[rows].all():
            raise IndexCorruptError("holdings: a row without holders, or holders without a row")
        self._check_free_rows(rows)
        self._check_copies()

    def _check_free_rows(self, used: U64) -> None:
        free = self.free_rows[: self.num_free[0]]
        everything = np.sort(np.concatenate([free, used]))
        expected = np.arange(1, len(self.hash_of_row), dtype=np.uint64)
        if not np.array_equal(everything, expected):
            raise IndexCorruptError("holdings: a row is neither used nor free, or both")

    def _check_copies(self) -> None:
        keys, _ = self.copies.items()
        for holder in np.unique(keys >> _HOLDER_SHIFT):
            rows = keys[keys >> _HOLDER_SHIFT == holder] & np.uint64(0xFFFFFFFF)
            if not np.isin(rows, self.rows_of(int(holder))).all():
                raise IndexCorruptError("holdings: copies of a block that the holder has not")

    def _rows_for(self, sequence_hashes: U64) -> U64:
        """The row of each block, a new one where nobody held it."""
        self.reserve_rows(len(sequence_hashes))
        end = int(self.num_free[0])
        fresh = self.free_rows[end - len(sequence_hashes) : end][::-1]
        rows, num_taken = self.table.find_or_put(sequence_hashes, np.ascontiguousarray(fresh))
        self.num_free -= num_taken
        self.hash_of_row[rows] = sequence_hashes
        return rows

    def _remove(self, holder: int, rows: U64) -> npt.NDArray[np.bool_]:
        self.sets.reserve(holder, len(rows))
        gone = self.sets.drop(holder, rows, self.set_of_row)
        self._free(np.unique(rows[gone & (self.set_of_row[rows] == 0)]))
        return gone

    def _free(self, rows: U64) -> None:
        self.table.erase(self.hash_of_row[rows])
        self.hash_of_row[rows] = 0
        # Descending, so that they are taken again in ascending order: neighbours stay neighbours.
        end = int(self.num_free[0])
        self.free_rows[end : end + len(rows)] = rows[::-1]
        self.num_free += len(rows)

    def reserve_rows(self, num_more: int) -> None:
        """Make room, so that as many rows are free."""
        num_free, old = int(self.num_free[0]), len(self.hash_of_row)
        if num_free >= num_more:
            return
        new = max(old + old // 2, old + num_more)
        self.hash_of_row = np.concatenate([self.hash_of_row, np.zeros(new - old, np.uint64)])
        self.set_of_row = np.concatenate([self.set_of_row, np.zeros(new - old, np.uint32)])
        self.seed_of_row = np.concatenate([self.seed_of_row, np.zeros(new - old, np.uint64)])
        # The stack of free rows: fresh ones below, in descending order, so that blocks of one
        # chain get neighbouring rows and a match reads memory in order.
        fresh = np.arange(new - 1, old - 1, -1).astype(np.uint64)
        padding = np.zeros(old - num_free, dtype=np.uint64)
        self.free_rows = np.concatenate([fresh, self.free_rows[:num_free], padding])
        self.num_free += len(fresh)
        self._num_growths += 1


def _copy_keys(holder: int, rows: U64) -> U64:
    # Rows are numbered in 32 bits (set_of_row has fewer than 2**32 entries).
    return np.uint64(holder << 32) | rows
