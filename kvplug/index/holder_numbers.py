"""Dense numbers for ranks, and for holders: a rank with the tier that a copy is in.

In:  Rank, Tier; for a copy in a pool the workers that can read it.   Out: small integers, and
arrays from holder number to rank number and tier, or to the ranks that can read the copy.

Numbers of ranks that left are given again, so arrays indexed by them stay as short as the fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvplug.errors import IndexCorruptError, UnknownRankError
from kvplug.events import Rank, Tier
from kvplug.index.arrays import ArrayVersion
from kvplug.kernels.prefix_lengths import NUM_CLASSES
from kvplug.setting import shown

I64 = npt.NDArray[np.int64]

_NOBODY = -1
_NUM_NAMED = 16
_MIN_HOLDERS = 64  # one word of bits (kernels/holders.py)


def unknown_rank(rank: object, known: Sequence[Rank | None]) -> UnknownRankError:
    """The error for a rank that is none of these, which names the first of them."""
    names = [str(each) for each in known if each is not None]
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    if not isinstance(rank, Rank):
        return UnknownRankError(f"cannot find a rank: expected a Rank, got {shown(rank)}")
    return UnknownRankError(
        f"cannot find rank {rank}: expected one that was added, "
        f"known: {', '.join(names[:_NUM_NAMED]) or 'none'}{more}"
    )


class HolderNumbers:
    """Who is behind a number, and which numbers a rank has.

    owner: int64[a power of two, at least 64], who is behind each holder: NUM_CLASSES * rank number
    + tier, -1 nobody, below that a pool (kernels/prefix_lengths.py) or a KV cache group
    (kvplug/index/cache_groups.py), which is as a pool that nobody can read.
    readers: int64[n], the ranks that can read each pool, the one that put the copies there first.
    """

    def __init__(self, version: ArrayVersion | None = None) -> None:
        self.ranks: list[Rank | None] = []
        self.owner: I64 = np.full(_MIN_HOLDERS, _NOBODY, dtype=np.int64)
        self._version = version or ArrayVersion()
        self._number_of: dict[Rank, int] = {}
        self._holder_of: dict[tuple[int, Tier], int] = {}
        self._holder_of_tier: dict[int, I64] = {}
        self._pools: dict[int, tuple[int, tuple[str, ...]]] = {}
        self._pools_of: dict[int, list[int]] = {}
        self._groups_of: dict[int, list[int]] = {}
        self._reads: dict[str, frozenset[int]] = {}
        self._pool_ids: dict[int, int] = {}
        self.readers: I64 = np.zeros(0, dtype=np.int64)

    def __contains__(self, rank: Rank) -> bool:
        return rank in self._number_of

    def __len__(self) -> int:
        """Number of ranks."""
        return len(self._number_of)

    def number_of(self, rank: Rank) -> int:
        """The number of a rank that was added; UnknownRankError for another."""
        try:
            return self._number_of[rank]
        except (KeyError, TypeError):
            raise unknown_rank(rank, list(self._number_of)) from None

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
        self._version.count += 1
        self._number_of[rank] = number
        self._list_readers()
        return number

    def load(
        self, ranks: list[Rank | None], owner: I64, pools: dict[int, tuple[int, tuple[str, ...]]],
        groups: dict[int, list[int]],
    ) -> None:  # fmt: skip
        """Be what other numbers were, instead of those that are here.

        pools: holder -> number of the rank that put the copies there, workers that can read them;
        groups: number of the rank -> holders of its KV cache groups.
        """
        self._groups_of, self._holder_of, self._holder_of_tier = groups, {}, {}
        self._pools_of, self._pool_ids = {}, {}
        self.ranks, self.owner, self._pools = ranks, owner, pools
        self._number_of = {rank: n for n, rank in enumerate(ranks) if rank is not None}
        for holder, (rank_number, _) in pools.items():
            self._pools_of.setdefault(rank_number, []).append(holder)
        self._list_readers()
        for holder, behind in enumerate(owner.tolist()):
            if behind >= 0:
                rank_number, tier = divmod(behind, NUM_CLASSES)
                self._holder_of[rank_number, Tier(tier)] = holder
        self._version.count += 1

    def remove(self, rank: Rank) -> None:
        """The rank and its holders have no numbers any more."""
        number = self._number_of.pop(rank)
        self.ranks[number] = None
        self._version.count += 1
        self._holder_of_tier.pop(number, None)
        for tier in Tier:
            holder = self._holder_of.pop((number, tier), None)
            if holder is not None:
                self.owner[holder] = _NOBODY
        self.owner[self._groups_of.pop(number, [])] = _NOBODY
        self.remove_pools(self.pools_of(number))

    def add_group(self, rank_number: int) -> int:
        """A holder number for the blocks of a KV cache group of the rank."""
        holder = self._free_holder()
        self._groups_of.setdefault(rank_number, []).append(holder)
        self._list_readers()
        self._version.count += 1
        return holder

    @property
    def groups(self) -> dict[int, list[int]]:
        """Number of a rank -> holders of its KV cache groups."""
        return {number: list(holders) for number, holders in self._groups_of.items()}

    def set_pools_read_by(self, worker: str, pool_ids: Iterable[int]) -> None:
        """The worker can read these CXL pools, and no others, of those whose copies do not say
        which workers can.
        """
        self._reads[worker] = frozenset(pool_ids)
        if not self._reads[worker]:
            del self._reads[worker]
        self._settle_pools()

    def workers_that_read(self, pool_id: int) -> tuple[str, ...]:
        """The workers that can read a CXL pool, by what they say themselves; sorted."""
        return tuple(sorted(name for name, pool_ids in self._reads.items() if pool_id in pool_ids))

    def follow_pools(self, pool_ids: Mapping[int, int]) -> None:
        """By holder, the CXL pool: whoever can read that can read the holder's copies."""
        self._pool_ids |= {h: pool_id for h, pool_id in pool_ids.items() if h in self._pools}
        self._settle_pools()

    def _settle_pools(self) -> None:
        for holder, pool_id in self._pool_ids.items():
            self._pools[holder] = self._pools[holder][0], self.workers_that_read(pool_id)
        self._list_readers()
        self._version.count += 1

    def add_pool(
        self, rank_number: int, workers: tuple[str, ...] | None, pool_id: int | None
    ) -> int:
        """A holder number for copies of the rank in a pool that these workers can read, too; None:
        those that can read CXL pool `pool_id`.

        Their ranks are readers while they are in the fleet.
        """
        holder = self._free_holder()
        if workers is None and pool_id is not None:
            self._pool_ids[holder] = pool_id
            workers = self.workers_that_read(pool_id)
        self._pools[holder] = rank_number, workers or ()
        self._pools_of.setdefault(rank_number, []).append(holder)
        self.readers = np.append(self.readers, self._readers_behind(len(self.readers), holder))
        self._version.count += 1
        return holder

    def remove_pools(self, holders: list[int]) -> None:
        """The numbers of pools in which nobody has copies any more are free."""
        for holder in holders:
            rank_number, _ = self._pools.pop(holder)
            self._pool_ids.pop(holder, None)
            self._pools_of[rank_number].remove(holder)
            self.owner[holder] = _NOBODY
        self._list_readers()
        self._version.count += 1

    @property
    def pools(self) -> dict[int, tuple[int, tuple[str, ...]]]:
        """Holder -> number of the rank that put the copies there, workers that can read them."""
        return dict(self._pools)

    def pools_of(self, rank_number: int) -> list[int]:
        """The holder numbers of the rank's copies in pools."""
        return list(self._pools_of.get(rank_number, ()))

    def readers_of(self, holder: int) -> list[int]:
        """The ranks that can read a pool, the one that put the copies there first."""
        rank_number, workers = self._pools[holder]
        others = [n for rank, n in self._number_of.items() if rank.worker in workers]
        return [rank_number, *(n for n in others if n != rank_number)]

    def holder(self, rank_number: int, tier: Tier) -> int:
        """The holder number of the rank's copies in this tier; given on first use."""
        holder = self._holder_of.get((rank_number, tier))
        if holder is None:
            holder = self._holder_of[rank_number, tier] = self._free_holder()
            self._holder_of_tier.pop(rank_number, None)
            self._version.count += 1
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
        """The holder numbers that the rank has, in one tier or in all and in pools; those of KV
        cache groups are on the device.
        """
        keys = [(rank_number, each) for each in (Tier if tier is None else (tier,))]
        pools = self.pools_of(rank_number) if tier is None else []
        groups = self._groups_of.get(rank_number, []) if tier in (None, Tier.DEVICE) else []
        return [self._holder_of[key] for key in keys if key in self._holder_of] + pools + groups

    def holders_of(self, ranks: Iterable[Rank]) -> list[int]:
        """The holder numbers that these ranks have, in all tiers and in pools."""
        return [holder for rank in ranks for holder in self.holders(self._number_of[rank])]

    def check(self) -> None:
        """Pools and their readers agree with the fleet; raises IndexCorruptError."""
        pools = np.flatnonzero(self.owner < _NOBODY).tolist()
        groups = [holder for holders in self._groups_of.values() for holder in holders]
        if pools != sorted([*self._pools, *groups]):
            raise IndexCorruptError("numbers: a pool or a KV cache group is nobody's")
        for holder in pools:
            first = _NOBODY - int(self.owner[holder])
            readers = self.readers[first : first + int(self.readers[first - 1])].tolist()
            if readers != ([] if holder in groups else self.readers_of(holder)):
                raise IndexCorruptError("numbers: others can read a pool than the fleet says")

    def _list_readers(self) -> None:
        """Who can read what, anew: ranks come and go seldom."""
        readers: list[int] = []
        for holder in self._pools:
            readers += self._readers_behind(len(readers), holder)
        for holders in self._groups_of.values():
            self.owner[holders] = _NOBODY - 1 - len(readers)
            readers.append(0)
        self.readers = np.array(readers, dtype=np.int64)

    def _readers_behind(self, first: int, holder: int) -> list[int]:
        """What is in `readers` from `first` on for a pool."""
        self.owner[holder] = _NOBODY - 1 - first
        ranks = self.readers_of(holder)
        return [len(ranks), *ranks]

    def _free_holder(self) -> int:
        free = np.flatnonzero(self.owner == _NOBODY)
        if not len(free):
            self.owner = np.concatenate([self.owner, np.full_like(self.owner, _NOBODY)])
            return len(self.owner) // 2
        return int(free[0])
