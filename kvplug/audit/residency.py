"""What a rank holds of a request by its own events: speculative blocks do not count.

In:  an index, a rank, sequence hashes.   Out: numbers of leading blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvplug.events import Rank
from kvplug.hashing import Hashes
from kvplug.index.block_index import BlockIndex

Mask = npt.NDArray[np.bool_]


def resident_blocks(index: BlockIndex, rank: Rank, prompts: Iterable[Hashes]) -> list[int]:
    """For each prompt, the leading blocks that the rank's engine said it has, in any tier.

    0 for an unknown rank.
    """
    if rank not in index.numbers:
        return [0 for _ in prompts]
    holders = index.numbers.holders(index.numbers.number_of(rank))
    is_held_by_set = index.holdings.sets.any_of(holders)
    return [_num_held(index, is_held_by_set, hashes) for hashes in prompts]


def _num_held(index: BlockIndex, is_held_by_set: Mask, hashes: Hashes) -> int:
    if not len(hashes):
        return 0
    segments = index.match(hashes)
    is_held = is_held_by_set[segments.sets]
    if is_held.all():
        return int(segments.ends[-1]) if len(is_held) else 0
    first_missing = int(is_held.argmin())
    return int(segments.ends[first_missing - 1]) if first_missing else 0
