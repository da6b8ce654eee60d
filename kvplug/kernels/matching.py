"""A request's leading blocks to segments: runs of blocks that are held by the same set.

In:  rows of the leading blocks that the index has, in order, and the set of each row.
Out: segments as two arrays: where each ends (exclusive, in blocks) and its set number.

The sets of a long prefix change only where a rank stops holding it, so a request of thousands of
blocks comes down to a handful of segments, and scoring no longer depends on its length.
Twin: itertools.groupby (tests/kernels/test_matching.py).
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import i8, kernel, reads, u4, u8, writes

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


@kernel(i8(reads(u8), reads(u4), writes(i8), writes(i8)))
def segments(rows: U64, set_of_row: U32, out_ends: I64, out_sets: I64) -> int:
    """Returns the number of segments; the out arrays have room for one per row."""
    num_segments = 0
    for i in range(len(rows)):
        set_id = np.int64(set_of_row[np.int64(rows[i])])
        if num_segments == 0 or set_id != out_sets[num_segments - 1]:
            out_sets[num_segments] = set_id
            num_segments += 1
        out_ends[num_segments - 1] = i + 1
    return num_segments
