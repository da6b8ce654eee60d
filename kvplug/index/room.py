"""Room in an index within its bounds: whether blocks may come, and what has to go for them.

In:  a number of blocks of a holder.   Out: whether they fit, or an Eviction that makes room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvplug.index.bounds import Bounds, Lost, LostNames
from kvplug.index.domain import Domain
from kvplug.index.evicting import Eviction
from kvplug.index.holdings import Holdings
from kvplug.index.sweeping import Named

U64 = npt.NDArray[np.uint64]

# Of the blocks, to go at once: a sweep costs as much for one block as for many.
_PART_TO_EVICT = 8


class Room:
    """is_over_bytes, eviction, make; `lost` and `lost_names` say what had to go.

    `others_nbytes` is the memory of what is no holding, with a domain's table as large as it would
    be with so many more names; `domains` are all domains; `forget_gone` is called when blocks have
    left the index by an eviction.
    """

    def __init__(
        self,
        bounds: Bounds,
        holdings: Holdings,
        others_nbytes: Callable[[Domain | None, int], int],
        domains: Callable[[], Sequence[Named]],
        forget_gone: Callable[[], None],
    ) -> None:
        self.bounds, self.lost, self.lost_names = bounds, Lost(), LostNames()
        self.holdings, self._others_nbytes, self._domains = holdings, others_nbytes, domains
        self._forget_gone = forget_gone
        holdings.table.limit = bounds.max_blocks or 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory of what is remembered of evicted blocks."""
        return self.lost_names.nbytes

    def is_over_bytes(self, domain: Domain, holder: int, num_blocks: int) -> bool:
        """Whether arrays would have to grow beyond the bound for an event of so many blocks.

        What is there already is no reason to evict: arrays do not shrink.
        """
        if self.bounds.max_bytes is None:
            return False
        now = self.holdings.nbytes + self._others_nbytes(None, 0)
        grown = self.holdings.grown_nbytes(holder, num_blocks)
        grown += self._others_nbytes(domain, num_blocks)
        lost = self.lost_names.nbytes_for(len(self.holdings) + num_blocks)
        return grown > now and grown + lost > self.bounds.max_bytes

    def eviction(self, num_blocks: int) -> Eviction:
        """What makes room for so many blocks, and for many more; it may find nothing to evict."""
        num_wanted = max(num_blocks, len(self.holdings) // _PART_TO_EVICT)
        return Eviction(self.holdings, self._domains(), num_wanted, self.lost, self.lost_names)

    def make(self, domain: Domain, holder: int, hashes: U64) -> bool:
        """Evict what is in the way of these blocks, all at once; False if nothing more can go."""
        while self._is_over(domain, holder, hashes):
            eviction = self.eviction(len(hashes))
            eviction.finish()
            self._forget_gone()
            if not eviction.num_blocks:
                return False
        return True

    def _is_over(self, domain: Domain, holder: int, hashes: U64) -> bool:
        held, limit = self.holdings, self.bounds.max_blocks
        if limit is not None and len(held) + len(hashes) > limit:
            num_new = int((held.table.find(hashes) == 0).sum())
            return len(held) + num_new > limit
        return self.is_over_bytes(domain, holder, len(hashes))
