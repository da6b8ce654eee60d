"""KV cache groups: how much of a prefix each group of a hybrid model must hold for an engine to
reuse it.

In:  groups as stored events describe them.   Out: a holder of the block store for each group of a
rank; what kernels need to know of them (kernels/cache_groups.py).

vLLM (0.32, v1/core/kv_cache_coordinator.py) puts the layers of a model into groups, and reuses a
prefix of n blocks if every group has kept what its layers need at n:

    full attention, MLA     all n blocks
    sliding window          the last ceil((window - 1) / block size) of them, or all n
    Mamba, linear attention the last one, which has the state

The first group with full attention is the rank's main group. Its blocks are in the holders of the
rank's tiers, as those of a model with one group. Every other group has a holder of its own, which
is nobody's in queries; so the arrays that say who holds what say it of groups, too. A rank all of
whose groups have windows has no main group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.events import MAMBA, PARTIAL_ATTENTION, BlockCopied, BlockStored, Tier
from kvplug.index.block_store import BlockStore
from kvplug.index.holder_numbers import HolderNumbers
from kvplug.kernels import cache_groups as kernels
from kvplug.packed import PackedStored

I64 = npt.NDArray[np.int64]

MAX_GROUPS = 64
"""Of one rank besides the main one: models have a dozen at most."""

Stored = BlockStored | BlockCopied | PackedStored
_ALL = 2**40  # more blocks than a prefix has


class GroupKind(NamedTuple):
    """What an event says of a group."""

    attention: str
    sliding_window: int | None

    @property
    def is_full(self) -> bool:
        """Whether a prefix needs all of its blocks."""
        return self.attention not in PARTIAL_ATTENTION

    def num_needed(self, block_size: int) -> int:
        """How many of the last blocks of a prefix it needs."""
        if self.attention == MAMBA:
            return 1
        if self.is_full or self.sliding_window is None:  # a window of unknown length
            return _ALL
        return max(1, -(-(self.sliding_window - 1) // block_size))


class CacheGroup(NamedTuple):
    """A group that is not the main one, and the holder of its blocks."""

    holder: int
    kind: GroupKind


class RankGroups:
    """The groups of a rank: the number of the main one, if any has full attention, and the others
    by number.
    """

    def __init__(self, main: int | None, others: dict[int, CacheGroup]) -> None:
        self.main, self.others = main, others


class CacheGroups:
    """holder_to_store, holder_of, set_recomputed; `in` tells whether a rank has more than one
    plain group.

    A rank is here from the first event of a group that is not 0 or not of full attention.
    """

    def __init__(self, numbers: HolderNumbers, block_store: BlockStore, block_size: int) -> None:
        self._numbers, self._block_store = numbers, block_store
        self._block_size = block_size
        self._of_rank: dict[int, RankGroups] = {}
        self._num_recomputed: dict[int, int] = {}
        self._arrays: I64 | None = None

    def __contains__(self, rank_number: int) -> bool:
        return rank_number in self._of_rank

    def items(self) -> Iterable[tuple[int, RankGroups]]:
        """The ranks that are here, by number."""
        return self._of_rank.items()

    def holder_to_store(self, rank_number: int, event: Stored) -> int | None:
        """The holder of the blocks that an event brings; None: in a tier that is not followed.

        That is host memory and disk for all groups but the main one, and groups beyond MAX_GROUPS.
        """
        kind = GroupKind(event.attention, event.sliding_window)
        groups = self._of_rank.get(rank_number)
        if groups is None and event.group == 0 and kind.is_full:
            return self._numbers.holder(rank_number, event.tier)
        if groups is None:
            groups = self._add(rank_number)
        if isinstance(event, BlockCopied) and kind.is_full and event.group in groups.others:
            kind = groups.others[event.group].kind  # a copy need not say it
        if self._is_main(rank_number, groups, event.group, kind):
            return self._numbers.holder(rank_number, event.tier)
        is_new = event.group not in groups.others
        if event.tier is not Tier.DEVICE or (is_new and len(groups.others) >= MAX_GROUPS):
            return None
        return self._holder(rank_number, groups, event.group, kind)

    def holder_of(self, rank_number: int, group: int, tier: Tier) -> int | None:
        """The holder of blocks of a group, None if nothing of it is known."""
        groups = self._of_rank.get(rank_number)
        if groups is None:
            return self._numbers.holder(rank_number, tier) if group == 0 else None
        if group == groups.main:
            return self._numbers.holder(rank_number, tier)
        other = groups.others.get(group)
        return None if other is None or tier is not Tier.DEVICE else other.holder

    def num_held(self, rank_number: int) -> int:
        """Number of distinct blocks on the device, of the group that has the most."""
        if rank_number not in self._of_rank:
            return self._block_store.num_held(self._numbers.holder(rank_number, Tier.DEVICE))
        holders = self._numbers.holders(rank_number, Tier.DEVICE)
        return max(map(self._block_store.num_held, holders), default=0)

    def set_recomputed(self, rank_number: int, num_blocks: int) -> None:
        """The engine computes so many of the last blocks that match anew, as vLLM does with EAGLE
        or MTP heads. It is not used for hybrid models.
        """
        self._num_recomputed[rank_number] = num_blocks
        self._changed()

    def num_recomputed(self, rank_number: int) -> int:
        """How many of the last blocks that match are computed anew."""
        return 0 if rank_number in self else self._num_recomputed.get(rank_number, 0)

    def forget(self, rank_number: int) -> None:
        """The rank, which holds nothing, leaves."""
        self._of_rank.pop(rank_number, None)
        self._num_recomputed.pop(rank_number, None)
        self._arrays = None

    def load(self, of_rank: dict[int, RankGroups]) -> None:
        """Be what other groups were; there are none here yet."""
        self._of_rank, self._arrays = of_rank, None

    @property
    def arrays(self) -> I64:
        """int64[rows * WIDTH], what a prefix needs of each group (kernels/cache_groups.py)."""
        if self._arrays is None:
            rows = [row for number, groups in self.items() for row in self._rows(number, groups)]
            rows += [self._plain_row(n) for n in self._num_recomputed if self.num_recomputed(n)]
            self._arrays = np.array(rows, dtype=np.int64).reshape(-1)
        return self._arrays

    def _rows(self, rank_number: int, groups: RankGroups) -> list[list[int]]:
        has_main, others = groups.main is not None, list(groups.others.values())
        return [
            kernels.row(
                rank_number,
                num_rows=len(others),
                has_main=has_main,
                holder=other.holder,
                num_needed=other.kind.num_needed(self._block_size),
            )
            for other in others
        ]

    def _plain_row(self, rank_number: int) -> list[int]:
        return kernels.row(
            rank_number,
            num_rows=1,
            has_main=True,
            holder=-1,
            num_needed=0,
            num_recomputed=self.num_recomputed(rank_number),
        )

    def _add(self, rank_number: int) -> RankGroups:
        """What came before was of group 0, and is the main one."""
        held = self._block_store.num_held(self._numbers.holder(rank_number, Tier.DEVICE))
        groups = self._of_rank[rank_number] = RankGroups(0 if held else None, {})
        self._changed()
        return groups

    def _is_main(self, rank_number: int, groups: RankGroups, group: int, kind: GroupKind) -> bool:
        """Whether it is the main group; the first with full attention becomes it."""
        if kind.is_full and groups.main is None and group not in groups.others:
            groups.main = group
            self._changed()
        if groups.main == group and not kind.is_full and not self.num_held(rank_number):
            groups.main = None  # the engine has started with another model
            self._changed()
        return group == groups.main

    def _holder(self, rank_number: int, groups: RankGroups, group: int, kind: GroupKind) -> int:
        known = groups.others.get(group)
        if known is not None and known.kind == kind:
            return known.holder
        holder = self._numbers.add_group(rank_number) if known is None else known.holder
        groups.others[group] = CacheGroup(holder, kind)
        self._changed()
        return holder

    def _changed(self) -> None:
        self._arrays = None
        self._block_store.version.count += 1
