"""A clear of a rank in stretches, so that queries can come in between.

In:  a rank's domain and its holders.   Out: holdings and names without its copies.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvplug.index.domain import Domain
from kvplug.index.holdings import Holdings
from kvplug.kernels import clearing as kernels

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


class Clearing:
    """advance until `is_done`; `num_dropped` copies are gone by then.

    `in_domain` are the holders of the domain's ranks as kernels/blocks.py wants them. Until it is
    done nothing else may change the index.
    """

    def __init__(
        self, holdings: Holdings, domain: Domain, holders: list[int], in_domain: U64
    ) -> None:
        self._holdings, self._domain, self._in_domain = holdings, domain, in_domain
        self._holders: I64 = np.array(holders, dtype=np.int64)
        self._next_slot = 0 if holders else self.num_slots
        self._num_dropped: I64 = np.zeros(1, dtype=np.int64)

    @property
    def num_slots(self) -> int:
        """Slots of the domain's table."""
        return len(self._domain.table.slots) // 2

    @property
    def is_done(self) -> bool:
        """Whether every name of the domain was looked at."""
        return self._next_slot >= self.num_slots

    @property
    def num_dropped(self) -> int:
        """Copies that are gone, those of one block in one tier counted once."""
        return int(self._num_dropped[0])

    def advance(self, max_slots: int) -> None:
        """Look at so many more slots of the domain's table."""
        held, sets = self._holdings, self._holdings.sets
        sets.reserve(0, 1)
        self._next_slot = int(
            kernels.clear_slots(
                self._next_slot,
                min(self._next_slot + max_slots, self.num_slots),
                self._holders,
                *held.table.arrays,
                *self._domain.table.arrays,
                *held.copies.arrays,
                held.hash_of_row,
                held.set_of_row,
                held.seed_of_row,
                held.free_rows,
                held.num_free,
                sets.bits,
                sets.meta,
                sets.intern,
                sets.header,
                self._in_domain,
                self._num_dropped,
            )
        )
