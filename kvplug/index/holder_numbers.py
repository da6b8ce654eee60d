"""Dense numbers for ranks, and for holders: a rank with the tier that a copy is in.

In:  Rank, Tier.   Out: small integers, and an array from holder number to rank number and tier.

Numbers of ranks that left are given again, so arrays indexed by them stay as short as the fleet.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvplug.events import Rank, Tier
from kvplug.index.changes import Changes
from kvplug.kernels.matching import NUM_CLASSES

I64 = npt.NDArray[np.int64]

_NOBODY = -1
_MIN_HOLDERS = 64  # one word of bits (kernels/holders.py)


class HolderNumbers:
    """Who is behind a number, and which numbers a rank has.

    owner: int64[a power of two, at least 64], who is behind each holder: NUM_CLASSES * rank number
    + tier, -1 nobody (kernels/matching.py).
    """

    def __init__(self, changes: Changes | None = None) -> None:
        self.ranks: list[Rank | None] = []
        self.owner: I64 = np.full(_MIN_HOLDERS, _NOBODY, dtype=np.int64)
        self._changes = changes or Changes()
        self._number_of: dict[Rank, int] = {}
        self._holder_of: dict[tuple[int, Tier], int] = {}
        self._holder_of_tier: dict[int, I64] = {}

    def __contains__(self, rank: Rank) -> bool:
        return rank in self._number_of

    def __len__(self) -> int:
        """Number of ranks."""
        return len(self._number_of)

    def number_of(self, rank: Rank) -> int:
        """The number of a rank that was added."""
        return self._number_of[rank]

    def rank(self, number: int) -> Rank:
        """The rank behind a number that is in use."""
        rank = self.ranks[number]
        assert rank is not None
        return rank

    def add(self, rank: Rank) -> int:
        """Give the rank a number, or return the one that it has."""
        if rank in self._number_of:
            return self._number_of[rank]
        number = self.ranks.index(None) if None in self.ranks else len(self.ranks)
        self.ranks[number : number + 1] = [rank]
        self._changes.count += 1
        self._number_of[rank] = number
        return number

    def load(self, ranks: list[Rank | None], owner: I64) -> None:
        """Be what other numbers were; there are none here yet."""
        self.ranks, self.owner = ranks, owner
        self._number_of = {rank: n for n, rank in enumerate(ranks) if rank is not None}
        for holder, behind in enumerate(owner.tolist()):
            if behind != _NOBODY:
                rank_number, tier = divmod(behind, NUM_CLASSES)
                self._holder_of[rank_number, Tier(tier)] = holder
        self._changes.count += 1

    def remove(self, rank: Rank) -> None:
        """The rank and its holders have no numbers any more."""
        number = self._number_of.pop(rank)
        self.ranks[number] = None
        self._changes.count += 1
        self._holder_of_tier.pop(number, None)
        for tier in Tier:
            holder = self._holder_of.pop((number, tier), None)
            if holder is not None:
                self.owner[holder] = _NOBODY

    def holder(self, rank_number: int, tier: Tier) -> int:
        """The holder number of the rank's copies in this tier; given on first use."""
        holder = self._holder_of.get((rank_number, tier))
        if holder is None:
            holder = self._holder_of[rank_number, tier] = self._free_holder()
            self._holder_of_tier.pop(rank_number, None)
            self._changes.count += 1
            self.owner[holder] = NUM_CLASSES * rank_number + tier
        return holder

    def holder_of_tier(self, rank_number: int) -> I64:
        """int64[tiers]: the holder number of the rank's copies in each tier, -1 if not given yet.

        DEVICE always has one.
        """
        self.holder(rank_number, Tier.DEVICE)
        holders = self._holder_of_tier.get(rank_number)
        if holders is None:
            holders = np.array([self._holder_of.get((rank_number, tier), -1) for tier in Tier])
            self._holder_of_tier[rank_number] = holders
        return holders

    def holders(self, rank_number: int, tier: Tier | None = None) -> list[int]:
        """The holder numbers that the rank has, in one tier or in all."""
        tiers = Tier if tier is None else (tier,)
        keys = [(rank_number, t) for t in tiers]
        return [self._holder_of[key] for key in keys if key in self._holder_of]

    def holders_of(self, ranks: Iterable[Rank]) -> list[int]:
        """The holder numbers that these ranks have, in all tiers."""
        return [holder for rank in ranks for holder in self.holders(self._number_of[rank])]

    def _free_holder(self) -> int:
        free = np.flatnonzero(self.owner == _NOBODY)
        if not len(free):
            self.owner = np.concatenate([self.owner, np.full_like(self.owner, _NOBODY)])
            return len(self.owner) // 2
        return int(free[0])
