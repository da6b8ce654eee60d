"""What a rank's copies in host memory and on disk are good for.

In:  copies that events name without their content, numbers of ranks.
Out: whether blocks in lower tiers are taken, and whether they outlive a clear.

vLLM's offloading connectors (0.32) have rules of their own:

* They look a chunk of blocks up by its last one, and load whole chunks. With chunks of several
  blocks an event says less, or more, than can be reused, so none is taken. Of placeholders only the
  last block is named: then all depths are multiples of the size of a chunk.
* A reset of the prefix cache empties the device alone, and is published without a tier.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt

from kvplug.events import Tier

I64 = npt.NDArray[np.int64]

# A connector may begin anywhere in a prompt; so few may have a common divisor by chance.
_MIN_COPIES = 4


class OffloadingRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a rank, by its number: whether no lower tier of it is taken; of its copies
    how many there were, and the greatest common divisor of the lengths of their prefixes.
    """

    rank: int
    is_refused: bool
    num_copies: int
    blocks_per_chunk: int


class LowerTiers:
    """refuse, refuses; note_copies, outlive_clears; forget; save, load. By the numbers of ranks."""

    def __init__(self) -> None:
        self.refused: set[int] = set()
        """Ranks of which no lower tier is taken."""
        self._blocks_per_chunk: dict[int, int] = {}
        self._num_copies: dict[int, int] = {}

    def refuse(self, rank_number: int) -> None:
        """Take no blocks of the rank in host memory or on disk from now on."""
        self.refused.add(rank_number)

    def refuses(self, rank_number: int, tier: Tier) -> bool:
        """Whether blocks of the rank in this tier are refused."""
        return tier is not Tier.DEVICE and rank_number in self.refused

    def note_copies(self, rank_number: int, depths: I64) -> bool:
        """The rank has copies of blocks at these depths, from 0; whether they may be single blocks,
        and need not be the last ones of chunks.
        """
        before = self._blocks_per_chunk.get(rank_number, 0)
        per_chunk = math.gcd(before, *(depths + 1).tolist())
        self._blocks_per_chunk[rank_number] = per_chunk
        num_copies = self._num_copies.get(rank_number, 0) + len(depths)
        self._num_copies[rank_number] = num_copies
        return per_chunk <= 1 or num_copies < _MIN_COPIES

    def outlive_clears(self, rank_number: int) -> bool:
        """Whether a clear that names no tier leaves them: a connector published them."""
        return rank_number in self._blocks_per_chunk

    def forget(self, rank_number: int) -> None:
        """The rank, which holds nothing, leaves."""
        self.refused.discard(rank_number)
        self._blocks_per_chunk.pop(rank_number, None)
        self._num_copies.pop(rank_number, None)

    def save(self) -> list[OffloadingRank]:
        """All that is known, for a snapshot."""
        return [
            OffloadingRank(
                number,
                number in self.refused,
                self._num_copies.get(number, 0),
                self._blocks_per_chunk.get(number, 0),
            )
            for number in sorted(self.refused | self._blocks_per_chunk.keys())
        ]

    def load(self, ranks: list[OffloadingRank]) -> None:
        """Know what was saved."""
        for each in ranks:
            if each.is_refused:
                self.refused.add(each.rank)
            if each.num_copies:
                self._num_copies[each.rank] = each.num_copies
                self._blocks_per_chunk[each.rank] = each.blocks_per_chunk
