"""What a rank holds of a request by its own events: speculative blocks do not count.

In:  an index, a rank, sequence hashes.   Out: numbers of leading blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvplug.events import Rank
from kvplug.hashing import Hashes
from kvplug.index.block_index import BlockIndex
from kvplug.kernels.prefix_lengths import ANY


def resident_blocks(index: BlockIndex, rank: Rank, prompts: Sequence[Hashes]) -> list[int]:
    """For each prompt, the leading blocks that the rank's engine said it has, in any tier.

    0 for an unknown rank.
    """
    if rank not in index.numbers or not prompts:
        return [0 for _ in prompts]
    ends = np.cumsum([len(hashes) for hashes in prompts])
    overlaps = index.overlap_many(np.concatenate(prompts), ends)
    number = index.numbers.number_of(rank)
    return [int(overlap.prefix_lengths[ANY, number]) for overlap in overlaps]
