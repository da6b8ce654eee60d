"""The answers of an index: what each rank holds of a request.

In:  arrays by rank number.   Out: the same, with names for the kinds of memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.kernels import matching

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


class Overlap(NamedTuple):
    """What each rank holds of a request, by rank number.

    depth: int64[ranks], leading blocks held in any tier, speculative ones included;
    credit: float64[ranks], what they are worth in blocks: at most `depth`, less on lower tiers and
    on ranks of which not everything is known;
    reach: int64[NUM_REACHES, ranks], leading blocks by kind of memory, without speculative ones
    (kernels/matching.py, REACHES).
    """

    depth: I64
    credit: F64
    reach: I64

    @property
    def device(self) -> I64:
        """int64[ranks], leading blocks in the memory of the rank's GPU."""
        return np.asarray(self.reach[matching.ON_DEVICE])

    @property
    def host(self) -> I64:
        """int64[ranks], leading blocks there or in host memory: `device` and its extension."""
        return np.asarray(self.reach[matching.IN_HOST])

    @property
    def disk(self) -> I64:
        """int64[ranks], leading blocks there or on disk: `host` and its extension."""
        return np.asarray(self.reach[matching.ON_DISK])

    @property
    def cxl_accessible(self) -> I64:
        """int64[ranks], leading blocks on the GPU or in CXL pools that the rank can read."""
        return np.asarray(self.reach[matching.ON_DEVICE_OR_POOLED])

    @property
    def held(self) -> I64:
        """int64[ranks], leading blocks in any memory; `depth` without speculative blocks."""
        return np.asarray(self.reach[matching.ANY])


class Overlaps(NamedTuple):
    """What each rank holds of many requests.

    reach: int64[requests, NUM_REACHES, ranks]; credit: float64[requests, ranks].
    """

    reach: I64
    credit: F64
