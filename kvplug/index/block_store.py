"""Which holder has which block, in flat arrays that kernels read and change.

In:  sequence hashes and a holder number.   Out: the arrays changed; what a holder has.

    table    sequence hash -> place: the run of the block, and its depth     kernels/table.py
    runs     blocks in a row with one set of holders: the set, the namespace  kernels/runs.py
    sets     interned sets of holders                                        kernels/holders.py
    copies   (hash, holder) -> copies above the first one: engines store a block twice and remove
             it twice

docs/index-implementation.md shows them with numbers. A block that nobody holds is in no table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.errors import IndexCorruptError
from kvplug.index.arrays import ArrayVersion
from kvplug.index.hash_table import HashTable, least_nbytes
from kvplug.index.holder_sets import HolderSets
from kvplug.index.run_table import RunTable
from kvplug.kernels import checking, membership, runs
from kvplug.kernels.bundle import Bundle

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

NO_ENGINE_HASHES: U64 = np.zeros(0, dtype=np.uint64)
"""No engine hashes, or every holder in the hash space."""


_MIN_BLOCKS = 800
ARRAYS = ("table", "copies", "runs", "bits", "meta", "intern", "header")
"""Names of BlockStore.arrays."""


HashSpaceArrays = tuple[U64, U64]
"""What kernels need of a hash space (kvplug/index/hash_spaces.py).

slots: of its table, engine hash -> sequence hash; members: uint64[words], its holders as bits, or
NO_ENGINE_HASHES for every holder there is.
"""

NO_HASH_SPACE: HashSpaceArrays = NO_ENGINE_HASHES, NO_ENGINE_HASHES


class BlockSpan(NamedTuple):
    """Consecutive blocks of a sequence.

    hashes: uint64[n], sequence hashes; parent: that of the block before the first, 0 at the start;
    seed: of their namespace; engine_hashes: uint64[n], none if they have none.
    """

    hashes: U64
    parent: int = 0
    seed: int = 0
    engine_hashes: U64 = NO_ENGINE_HASHES


class BlockStore:
    """store, copy, drop. It is arrays only, which kernels change, too.

    `version` counts when one of the arrays has become another one.
    """

    def __init__(self, version: ArrayVersion | None = None) -> None:
        self.version = version or ArrayVersion()
        self.table = HashTable(self.version)
        self.table.reserve(_MIN_BLOCKS)
        self.copies = HashTable(self.version)
        self.runs = RunTable(self.version)
        self.sets = HolderSets(self.version)
        self._scratch: U64 = np.empty(0, dtype=np.uint64)
        self._seen_version = -1

    def __len__(self) -> int:
        """Number of blocks that somebody holds."""
        return len(self.table)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All arrays, in the order of ARRAYS and of kernels/residency.py."""
        bits, meta, intern, header = self.sets.arrays
        return self.table.slots, self.copies.slots, self.runs.words, bits, meta, intern, header

    @property
    def bundle(self) -> U64:
        """All arrays and scratch as one argument of a kernel, good until one is replaced."""
        if self._seen_version != self.version.count:
            self._bundle = Bundle(*self.arrays, self._scratch)
            self._seen_version = self.version.count
        return self._bundle.words

    def load(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Be what another block store was; its arrays stay in use."""
        table, copies, words, *sets = arrays
        limit = self.table.limit
        self.table, self.copies = HashTable(self.version, table), HashTable(self.version, copies)
        self.table.limit = limit
        self.runs = RunTable(self.version, words)
        self.sets.load(*sets)
        self.version.count += 1

    def read(self, table: U64, words: U64, bits: U64, header: I64) -> None:
        """Have the arrays that another process writes: the table, the runs, bits and header of the
        sets. Queries use no others, and nothing may be changed here any more.
        """
        self.table, self.runs = HashTable(self.version, table), RunTable(self.version, words)
        self.sets.load(bits, self.sets.meta, self.sets.intern, header)
        self.version.count += 1

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all tables and arrays."""
        tables = self.table.nbytes + self.copies.nbytes
        return tables + self.runs.nbytes + self.sets.nbytes + int(self._scratch.nbytes)

    @property
    def num_memberships(self) -> int:
        """Pairs of a block and a holder that has it."""
        sets = self.runs.sets[self.runs.is_live]
        return int((self.runs.num_blocks[self.runs.is_live] * self.sets.num_members[sets]).sum())

    def grown_nbytes(self, holder: int, num_blocks: int) -> int:
        """Bytes of memory of all tables and arrays after `reserve`."""
        tables = self.table.grown_nbytes(num_blocks) + self.copies.grown_nbytes(num_blocks)
        arrays = self.runs.grown_nbytes(num_blocks) + self.sets.grown_nbytes(holder, num_blocks)
        return tables + arrays + int(self._scratch.nbytes)

    def reserve(self, holder: int, num_blocks: int) -> None:
        """Make room for so many blocks that come to the holder."""
        self.table.reserve(num_blocks)
        self.copies.reserve(num_blocks)
        self.runs.reserve(num_blocks)
        self.sets.reserve(holder, num_blocks)
        if num_blocks > len(self._scratch):
            self._scratch = np.empty(2 * num_blocks, dtype=np.uint64)
            self.version.count += 1

    def shrink(self) -> bool:
        """Give memory back that is not needed; False if there is not much of it."""
        has_shrunk = self.table.shrink() or self.copies.shrink()
        if not len(self.table) and self.runs.nbytes > self.runs.least_nbytes(0):
            # Runs and sets have numbers, so they only ever start over.
            self.runs.start_over()
            self.sets.start_over()
            has_shrunk = True
        return has_shrunk

    def least_nbytes(self, num_blocks: int) -> int:
        """Bytes of memory if nobody held anything before so many blocks came in one event."""
        tables = 2 * least_nbytes(num_blocks) + self.runs.least_nbytes(num_blocks)
        return tables + self.sets.least_nbytes + 16 * num_blocks

    def reserve_runs(self, holder: int, num_blocks: int) -> None:
        """Make room for so many blocks that leave the holder: runs may fall to pieces."""
        num_moved = min(num_blocks, len(self.table))
        self.runs.reserve(num_moved)
        self.sets.reserve(holder, num_moved)

    def store(
        self,
        holder: int,
        span: BlockSpan,
        hash_space: HashSpaceArrays = NO_HASH_SPACE,
    ) -> int | None:
        """The holder has one more copy of consecutive blocks.

        `hash_space` is that of their engine hashes, if they have any.
        Returns how many blocks the holder did not have before; None, and nothing done, if engine
        hashes and contents do not go together.
        """
        hashes = span.hashes
        self.reserve(holder, len(hashes))
        parent, seed = np.uint64(span.parent), np.uint64(span.seed)
        event = holder, parent, seed, span.engine_hashes, hashes
        num_new = membership.store_blocks(*event, *hash_space, self.bundle)
        return None if num_new == membership.CONFLICT else int(num_new)

    def copy(self, holder: int, sequence_hashes: U64) -> int:
        """As `store`, for blocks that some holder has; returns how many this one did not have."""
        self.reserve(holder, len(sequence_hashes))
        return int(membership.copy_blocks(holder, sequence_hashes, self.bundle))

    def drop(self, holder: int, sequence_hashes: U64) -> int:
        """The holder has one copy less of each block; returns how many it has no more copy of."""
        self.reserve_runs(holder, len(sequence_hashes))
        return int(membership.drop_hashes(holder, sequence_hashes, self.bundle))

    def drop_engine_hashes(
        self, holder: int, engine_hashes: U64, hash_space: HashSpaceArrays
    ) -> int:
        """As `drop`, by engine hashes; returns how many the holder had."""
        self.reserve_runs(holder, len(engine_hashes))
        return int(membership.drop_engine_hashes(holder, engine_hashes, *hash_space, self.bundle))

    def seed_of(self, sequence_hash: int) -> int:
        """The seed of a block's namespace."""
        return int(self.seeds_of(np.array([sequence_hash], dtype=np.uint64))[0])

    def seeds_of(self, sequence_hashes: U64) -> U64:
        """uint64[blocks], the seed of each block's namespace."""
        places = self.table.find(sequence_hashes)
        return np.asarray(self.runs.column(runs.SEED)[places & np.uint64(0xFFFFFFFF)])

    def depths_of(self, sequence_hashes: U64) -> I64:
        """int64[blocks], where each block that somebody holds is in its sequence, from 0."""
        return (self.table.find(sequence_hashes) >> np.uint64(32)).astype(np.int64)

    def which_held(self, sequence_hashes: U64, holders: list[int]) -> Mask:
        """bool[blocks], whether any of the holders has the block."""
        held = np.empty(len(sequence_hashes), dtype=np.uint8)
        membership.which_held(sequence_hashes, self.sets.mask_of(holders), self.bundle, held)
        return held.view(np.bool_)

    def holders_of(self, sequence_hashes: U64) -> list[list[int]]:
        """The holders of each block, by number; none of a block that nobody has."""
        places, low = self.table.find(sequence_hashes), np.uint64(0xFFFFFFFF)
        sets = self.runs.column(runs.SET)[places & low] & low
        words = np.ascontiguousarray(self.sets.bits.reshape(-1, self.sets.words)[sets])
        members = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        is_held = (places != 0).tolist()
        return [
            np.flatnonzero(mine).tolist() if held else []
            for mine, held in zip(members, is_held, strict=True)
        ]

    def num_held(self, holder: int) -> int:
        """Number of blocks that the holder has."""
        counts = self.sets.num_held
        return int(counts[holder]) if holder < len(counts) else 0

    def check(self) -> None:
        """Every invariant of these arrays; raises IndexCorruptError."""
        self.table.check()
        self.copies.check()
        self._check_runs()
        self._check_places()
        num_copied = checking.count_copied(
            self.copies.slots, self.table.slots, self.runs.words, self.sets.bits, self.sets.words
        )
        if num_copied != len(self.copies):
            raise IndexCorruptError("block store: copies of a block that its holder does not have")

    def _check_runs(self) -> None:
        live = self.runs.is_live
        if int(live.sum()) != len(self.runs):
            raise IndexCorruptError("runs: counted others than there are")
        if not self.runs.is_list_whole:
            raise IndexCorruptError("runs: the free numbers are no list")
        sets = self.runs.sets[live]
        if not sets.all():
            raise IndexCorruptError("runs: a run that nobody has")
        self.sets.check(sets)
        self._check_num_held(sets)
        self._check_links()
        self._check_changes()

    def _check_num_held(self, set_of_run: I64) -> None:
        num_blocks = self.runs.num_blocks[self.runs.is_live]
        if not np.array_equal(self.sets.num_held, self.sets.sum_by_holder(set_of_run, num_blocks)):
            raise IndexCorruptError("block store: a holder counts other blocks than it has")

    def _check_links(self) -> None:
        live, above, below = self.runs.is_live, self.runs.above, self.runs.below
        starts, ends = self.runs.column(runs.START), self.runs.column(runs.END)
        linked = np.flatnonzero(live & (above != 0))
        if not np.array_equal(below[above[linked]], linked):
            raise IndexCorruptError("runs: a run above does not name the run below")
        if not np.array_equal(ends[above[linked]] + np.uint64(1), starts[linked]):
            raise IndexCorruptError("runs: a run does not begin behind the run above")
        linked = np.flatnonzero(live & (below != 0))
        if not np.array_equal(above[below[linked]], linked):
            raise IndexCorruptError("runs: a run below does not name the run above")

    def _check_changes(self) -> None:
        changes, words = self.runs.only_changes, self.sets.words
        known = np.flatnonzero(self.runs.is_live & (changes >= 0))
        sets, holders = self.runs.sets, changes[known]
        bits = self.sets.bits.reshape(-1, words)
        found = bits[sets[known]] ^ bits[sets[self.runs.above[known]]]
        expected = np.zeros_like(found)
        is_holder = holders < 64 * words
        at = np.flatnonzero(is_holder), holders[is_holder] // 64
        expected[at] = np.uint64(1) << (holders[is_holder] % 64).astype(np.uint64)
        if not is_holder.all() or not np.array_equal(found, expected):
            raise IndexCorruptError("runs: another holder comes or goes than is remembered")

    def _check_places(self) -> None:
        live, column = self.runs.is_live, self.runs.column
        spans = np.where(live, column(runs.END) + np.uint64(1) - column(runs.START), 0)
        ends = np.cumsum(spans.astype(np.int64))
        firsts, num_blocks = ends - spans.astype(np.int64), np.zeros(len(ends), dtype=np.int64)
        seen = np.zeros(int(ends[-1]) // 8 + 1, dtype=np.uint8)
        num_placed = checking.count_placed(
            self.table.slots, self.runs.words, firsts, seen, num_blocks
        )
        if num_placed != len(self.table) or not np.array_equal(num_blocks, self.runs.num_blocks):
            raise IndexCorruptError("runs: a block is not at its depth in its run, or not alone")
        self._check_tails()

    def _check_tails(self) -> None:
        # Where the parent of a run is says nothing: hashes of packed events are taken as they come,
        # and may put a block that left and comes back at another depth. Matches go by depths.
        live = self.runs.is_live
        tails, ends = self.runs.column(runs.TAIL), self.runs.column(runs.END)
        known = np.flatnonzero(live & (tails != 0)).astype(np.uint64)
        places = self.table.find(np.ascontiguousarray(tails[known]))
        if not np.array_equal(places, known | (ends[known] << np.uint64(32))):
            raise IndexCorruptError("runs: a run does not end with its last block")
