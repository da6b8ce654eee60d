"""What a rank holds of a request by its own events: speculative blocks do not count.

In:  an index, a rank, sequence hashes.   Out: a number of leading blocks.
"""

from __future__ import annotations

import numpy as np

from kvplug.events import Rank
from kvplug.hashing import Hashes
from kvplug.index.block_index import BlockIndex


def resident_blocks(index: BlockIndex, rank: Rank, sequence_hashes: Hashes) -> int:
    """Leading blocks that the rank's engine said it has, in any tier; 0 for an unknown rank."""
    if rank not in index.numbers or not len(sequence_hashes):
        return 0
    segments = index.match(sequence_hashes)
    holders = index.numbers.holders(index.numbers.number_of(rank))
    is_held = index.holdings.sets.any_of(holders)[segments.sets]
    missing = np.flatnonzero(~is_held)
    num_segments = int(missing[0]) if len(missing) else len(is_held)
    return int(segments.ends[num_segments - 1]) if num_segments else 0
