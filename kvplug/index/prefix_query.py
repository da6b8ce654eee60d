"""What each rank holds of a request: the query and its answer, in one call of a kernel.

In:  sequence hashes, and who is behind the holders of a block store.   Out: Overlap, by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvplug.events import Rank
from kvplug.hashing import Hashes
from kvplug.index.block_store import BlockStore
from kvplug.index.holder_numbers import unknown_rank
from kvplug.kernels import matching, prefix_lengths
from kvplug.kernels.bundle import Bundle

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]
Expected = tuple[npt.NDArray[Any], ...]

_COUNT = np.dtype(np.int64)
NO_POOLS: I64 = np.zeros(0, dtype=np.int64)
NO_GROUPS: I64 = np.zeros(0, dtype=np.int64)
NOTHING_EXPECTED: Expected = (np.zeros(0, np.uint64), np.zeros(0), np.zeros(0, np.int64))


class SharedReads(NamedTuple):
    """Of an index that another process writes: the words of kernels/versioned.py, and what came of
    reading it, uint64[matching.READS_WIDTH].
    """

    control: U64
    reads: U64


OWN = SharedReads(np.zeros(0, np.uint64), np.zeros(0, np.uint64))
"""Of an index that this process writes itself."""


def one_rank_per_holder(num_ranks: int) -> I64:
    """Holder h is rank h, with everything on its device."""
    return prefix_lengths.NUM_CLASSES * np.arange(max(64, num_ranks), dtype=np.int64)


class TierCredits(NamedTuple):
    """What a block is worth by its nearest copy, if it is not on the device, where it is worth 1.

    The defaults of host and disk are those of Dynamo 1.6.1. cxl: in a pool that the rank can read.
    """

    host: float = 0.75
    disk: float = 0.25
    cxl: float = 0.9


def credits_of(classes: Sequence[float], confidence: F64) -> F64:
    """float64[NUM_MASKS + ranks]: what a block is worth by the classes of memory that a rank has it
    in, as a mask, and then `confidence`, float64[ranks]. A block counts by its best class.
    """
    best = [
        max([credit for each, credit in enumerate(classes) if has & (1 << each)], default=0.0)
        for has in range(prefix_lengths.NUM_MASKS)
    ]
    return np.concatenate([best, confidence])


class RankOverlap(msgspec.Struct, frozen=True):
    """What one rank holds of a request, in leading blocks without a gap; as the rows of Overlap."""

    depth: int
    credit: float
    device: int
    host: int
    disk: int
    cxl_accessible: int
    held: int


class Overlap:
    """By rank number; all counts are of leading blocks without a gap. Rows are made when asked for.
    `of` has them by rank.

    depth: int64[ranks], held in any class of memory, or expected to be in a moment;
    credit: float64[ranks], what they are worth in blocks: at most `depth`, less on lower tiers and
    on ranks of which not everything is known.
    """

    __slots__ = ("_answer", "_ranks")

    def __init__(self, answer: I64, ranks: Sequence[Rank | None] = ()) -> None:
        self._answer, self._ranks = answer, ranks

    def of(self, rank: Rank) -> RankOverlap:
        """What a rank holds; UnknownRankError if it was not followed as the index was asked."""
        try:
            number = self._ranks.index(rank)
        except ValueError:
            raise unknown_rank(rank, self._ranks) from None
        rows = self.device, self.host, self.disk, self.cxl_accessible, self.held
        device, host, disk, cxl_accessible, held = (int(row[number]) for row in rows)
        depth, credit = int(self.depth[number]), float(self.credit[number])
        return RankOverlap(depth, credit, device, host, disk, cxl_accessible, held)

    @property
    def _rows(self) -> I64:
        return self._answer.reshape(matching.NUM_ROWS, len(self._answer) // matching.NUM_ROWS)

    @property
    def depth(self) -> I64:
        """int64[ranks]."""
        row: I64 = self._rows[matching.DEPTH]
        return row

    @property
    def credit(self) -> F64:
        """float64[ranks]."""
        row: F64 = self._rows[matching.CREDIT].view(np.float64)
        return row

    @property
    def prefix_lengths(self) -> I64:
        """int64[NUM_SCOPES, ranks], by class of memory, nothing expected
        (prefix_lengths.SCOPES).
        """
        return self._rows[: prefix_lengths.NUM_SCOPES]

    @property
    def device(self) -> I64:
        """int64[ranks], on the rank's device."""
        return np.asarray(self._rows[prefix_lengths.ON_DEVICE])

    @property
    def host(self) -> I64:
        """int64[ranks], there or in host memory: `device` and its extension."""
        return np.asarray(self._rows[prefix_lengths.IN_HOST])

    @property
    def disk(self) -> I64:
        """int64[ranks], there or on disk: `host` and its extension."""
        return np.asarray(self._rows[prefix_lengths.ON_DISK])

    @property
    def cxl_accessible(self) -> I64:
        """int64[ranks], on the device, or in CXL pools that the rank can read."""
        return np.asarray(self._rows[prefix_lengths.ON_DEVICE_OR_POOLED])

    @property
    def held(self) -> I64:
        """int64[ranks], in any memory: `depth` without what is expected."""
        return np.asarray(self._rows[prefix_lengths.ANY])


class PrefixQuery:
    """overlap, overlap_many of the index as it was at `seen_version`; made anew when that changes.

    owner, readers, credits: who is behind each holder (kernels/prefix_lengths.py, Holders);
    expected: ExpiringBlocks.query_arrays; groups: CacheGroups.arrays; ranks: by number; shared: who
    writes the arrays.
    """

    def __init__(  # noqa: PLR0913 - what a query reads
        self, block_store: BlockStore, owner: I64, readers: I64, credits: F64,
        expected: Expected = NOTHING_EXPECTED, groups: I64 = NO_GROUPS,
        ranks: Sequence[Rank | None] = (), shared: SharedReads = OWN,
    ) -> None:  # fmt: skip
        self._ranks = tuple(ranks)
        self.seen_version = block_store.version.count
        self._num_ranks, self._credits = len(credits) - prefix_lengths.NUM_MASKS, credits
        self._size = matching.NUM_ROWS * self._num_ranks
        scratch: I64 = np.empty(
            prefix_lengths.num_scratch(self._num_ranks, len(owner)), dtype=np.int64
        )
        self.bundle = Bundle(
            block_store.table.slots, block_store.runs.words, block_store.sets.bits,
            block_store.sets.header, owner, readers, credits, scratch, groups, *expected,
            *shared,
        )  # fmt: skip

    def set_confidence(self, number: int, confidence: float) -> None:
        """What a block of a rank is worth from now on; nothing for a rank that came later."""
        if number < self._num_ranks:
            self._credits[prefix_lengths.NUM_MASKS + number] = confidence

    def new_rows(self) -> I64:
        """int64[NUM_ROWS * ranks], not filled yet: for an answer of matching.overlap."""
        return np.empty(self._size, dtype=_COUNT)

    def overlap(self, sequence_hashes: Hashes, now_s: float) -> Overlap:
        """What each rank holds of a request."""
        rows = self.new_rows()
        matching.overlap(sequence_hashes, now_s, self.bundle.words, rows)
        return Overlap(rows, self._ranks)

    def overlap_many(self, sequence_hashes: Hashes, ends: I64, now_s: float) -> list[Overlap]:
        """What each rank holds of many requests; request i has the hashes up to ends[i]."""
        rows: I64 = np.empty(len(ends) * self._size, dtype=np.int64)
        matching.overlap_many(sequence_hashes, ends, now_s, self.bundle.words, rows)
        return [Overlap(one, self._ranks) for one in rows.reshape(len(ends), self._size)]
