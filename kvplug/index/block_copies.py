"""Who holds a block, and in which memory.

In:  sequence hashes, a block store, who is behind its holders.   Out: BlockCopies by rank.
"""

from __future__ import annotations

import msgspec

from kvplug.events import Rank, Tier
from kvplug.hashing import Hashes
from kvplug.index.block_store import BlockStore
from kvplug.index.holder_numbers import HolderNumbers
from kvplug.kernels.prefix_lengths import NUM_CLASSES


class BlockCopies(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank has copies of one block.

    tiers: the nearest first, those of the main KV cache group; pools: for each CXL pool with a
    copy of this rank, the workers that can read it there, too; num_groups: further KV cache groups
    of a hybrid model that have the block on the device.
    """

    tiers: tuple[Tier, ...] = ()
    pools: tuple[tuple[str, ...], ...] = ()
    num_groups: int = 0


def copies_of(
    hashes: Hashes, block_store: BlockStore, numbers: HolderNumbers
) -> list[dict[Rank, BlockCopies]]:
    """For each block, the ranks that have it, in the order of their numbers."""
    behind = _Behind(numbers)
    return [behind.copies(holders) for holders in block_store.holders_of(hashes)]


class _Behind:
    """Who is behind holders, as of now."""

    def __init__(self, numbers: HolderNumbers) -> None:
        self._numbers, self._pools = numbers, numbers.pools
        self._groups = {holder: n for n, mine in numbers.groups.items() for holder in mine}

    def copies(self, holders: list[int]) -> dict[Rank, BlockCopies]:
        """By rank."""
        mine: dict[int, list[int]] = {}
        for holder in holders:
            mine.setdefault(self._rank_number(holder), []).append(holder)
        return {self._numbers.rank(n): self._copies_of_rank(mine[n]) for n in sorted(mine)}

    def _copies_of_rank(self, holders: list[int]) -> BlockCopies:
        pools = [each for each in holders if each in self._pools]
        num_groups = sum(each in self._groups for each in holders)
        plain = [each for each in holders if each not in self._pools and each not in self._groups]
        tiers = sorted(Tier(int(self._numbers.owner[each]) % NUM_CLASSES) for each in plain)
        readers = tuple(self._pools[each][1] for each in pools)
        return BlockCopies(tiers=tuple(tiers), pools=readers, num_groups=num_groups)

    def _rank_number(self, holder: int) -> int:
        if holder in self._pools:
            return self._pools[holder][0]
        known = self._groups.get(holder)
        return int(self._numbers.owner[holder]) // NUM_CLASSES if known is None else known
