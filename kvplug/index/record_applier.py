"""Records to holdings: the plain events of a run in one kernel call.

In:  records of one rank.   Out: holdings, the rank's domain and the speculative blocks changed.

What it cannot do is left to BlockIndex, event by event: kernels/applying.py says what that is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvplug.events import Rank
from kvplug.index.applied import Applied, Refusal
from kvplug.index.domain import Domain
from kvplug.index.expiring import ExpiringBlocks, mark_of
from kvplug.index.holder_numbers import HolderNumbers
from kvplug.index.holdings import Holdings
from kvplug.kernels import applying as kernels
from kvplug.records import Records

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Flag = npt.NDArray[np.uint8]

_EVERYBODY: U64 = np.zeros(0, dtype=np.uint64)
_MIN_SCRATCH = 256


class RecordApplier:
    """apply; `needs_decision` tells why it ended."""

    def __init__(
        self,
        block_size: int,
        numbers: HolderNumbers,
        holdings: Holdings,
        speculative: ExpiringBlocks,
        is_wanted: Flag,
    ) -> None:
        self._block_size = block_size
        self._numbers, self._holdings, self._speculative = numbers, holdings, speculative
        self._is_wanted = is_wanted
        self._counts: I64 = np.zeros(kernels.NUM_COUNTS + 1, dtype=np.int64)
        self._arrays: tuple[Any, ...] = ()
        self._arrays_domain: Domain | None = None
        self._arrays_state = (0, 0, 0)
        self._make_scratch(_MIN_SCRATCH)

    @property
    def needs_decision(self) -> bool:
        """Whether the event at which `apply` ended is one for BlockIndex."""
        return bool(self._counts[kernels.NUM_COUNTS] == kernels.NEEDS_DECISION)

    def apply(
        self, rank: Rank, domain: Domain, records: Records, first: int, max_blocks: int,
        applied: Applied,
    ) -> int:  # fmt: skip
        """Apply from record `first` on; returns the number of the first that was not applied."""
        self._counts[:] = 0
        number = self._numbers.number_of(rank)
        at = self._call(number, domain, records, first, max_blocks)
        while self._counts[kernels.NUM_COUNTS] == kernels.NEEDS_ROOM:
            self._make_room(number, domain, records.num_blocks(at))
            at = self._call(number, domain, records, at, max_blocks)
        self._count(applied)
        return at

    def _call(
        self, number: int, domain: Domain, records: Records, first: int, max_blocks: int
    ) -> int:
        at = kernels.apply_records(
            first,
            records.num_events,
            max_blocks,
            self._block_size,
            mark_of(number),
            records.records,
            records.parents,
            records.names,
            records.tokens,
            self._numbers.holder_of_tier(number),
            *self._arrays_for(domain),
        )
        return int(at)

    def _arrays_for(self, domain: Domain) -> tuple[Any, ...]:
        """The arrays that stay the same between calls, until one of them grows."""
        tables = domain.table.num_growths + self._speculative.table.num_growths
        num_growths = tables + self._holdings.num_growths
        state = num_growths, self._numbers.num_changes, len(domain.ranks)
        if domain is not self._arrays_domain or state != self._arrays_state:
            self._arrays_domain, self._arrays_state = domain, state
            self._arrays = self._collect_arrays(domain)
        return self._arrays

    def _collect_arrays(self, domain: Domain) -> tuple[Any, ...]:
        held, expected = self._holdings, self._speculative.table
        return (
            *held.table.arrays,
            *domain.table.arrays,
            *held.copies.arrays,
            *expected.arrays,
            held.hash_of_row,
            held.set_of_row,
            held.seed_of_row,
            held.free_rows,
            held.num_free,
            *held.sets.arrays,
            self.members_of(domain),
            self._hashes,
            self._rows,
            self._flags,
            self._is_wanted,
            self._counts,
        )

    def _count(self, applied: Applied) -> None:
        num_stored, num_removed, num_unknown, _ = self._counts.tolist()
        applied.num_stored += num_stored
        applied.num_removed += num_removed
        applied.refuse(Refusal.UNKNOWN_BLOCK, num_unknown)

    def members_of(self, domain: Domain) -> U64:
        """The holders of a domain's ranks as bits; none at all if there is no other domain."""
        if len(domain.ranks) == len(self._numbers):
            return _EVERYBODY
        return self._holdings.sets.mask_of(self._numbers.holders_of(domain.ranks))

    def _make_room(self, number: int, domain: Domain, num_blocks: int) -> None:
        held = self._holdings
        for table in (held.table, domain.table, held.copies):
            table.reserve(num_blocks)
        held.reserve_rows(num_blocks)
        held.sets.reserve(int(self._numbers.holder_of_tier(number).max()), num_blocks)
        if num_blocks > len(self._rows):
            self._make_scratch(2 * num_blocks)

    def _make_scratch(self, num_blocks: int) -> None:
        self._hashes: U64 = np.empty(num_blocks, dtype=np.uint64)
        self._rows: U64 = np.empty(num_blocks, dtype=np.uint64)
        self._flags = np.empty(num_blocks, dtype=np.uint8)
        self._arrays_domain = None
