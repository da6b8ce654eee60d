"""Candidates by what they are busy with: those below thresholds, and the least loaded one.

In:  numbers of ranks in rising order; the rows of kernels/costing.py.   Out: some of the numbers.

Reference: comprehensions over rows (tests/kernels/test_candidates.py).
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import f8, i8, inlined, kernel, reads, u8, writes
from kvplug.kernels.costing import ACTIVE_BLOCKS, CAPACITY_BLOCKS, NUM_RUNNING, PREFILL_TOKENS, of

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Index = int | np.int64


@inlined
def _is_busy(ranks: F64, rank: Index, most_tokens: float, most_share: float) -> bool:
    capacity = of(ranks, rank, CAPACITY_BLOCKS)
    has_filled = capacity > 0.0 and of(ranks, rank, ACTIVE_BLOCKS) > most_share * capacity
    return bool(of(ranks, rank, PREFILL_TOKENS) > most_tokens or has_filled)


@kernel(i8(reads(i8), reads(f8), f8, f8, writes(i8)))
def keep_idle(
    candidates: I64, ranks: F64, most_tokens: float, most_share: float, out: I64
) -> Index:  # fmt: skip
    """Put those that have no more tokens to prefill than that, and whose live requests take no
    larger share of a known capacity, into out, int64[candidates]; returns how many they are.
    """
    num_kept = 0
    for i in range(len(candidates)):
        out[num_kept] = candidates[i]
        num_kept += not _is_busy(ranks, candidates[i], most_tokens, most_share)
    return num_kept


@kernel(i8(reads(i8), reads(f8), u8))
def least_loaded(candidates: I64, ranks: F64, random: np.uint64) -> Index:
    """The one with the fewest requests in flight; of n that have, the one number random % n."""
    fewest, num_fewest = np.inf, np.uint64(0)
    for i in range(len(candidates)):
        running = of(ranks, candidates[i], NUM_RUNNING)
        if running < fewest:
            fewest, num_fewest = running, np.uint64(0)
        num_fewest += np.uint64(running == fewest)
    left = np.int64(random % num_fewest)
    for i in range(len(candidates)):
        if of(ranks, candidates[i], NUM_RUNNING) == fewest:
            if left == 0:
                return np.int64(candidates[i])
            left -= 1
    return np.int64(candidates[0])
