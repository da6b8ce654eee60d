"""Segments and load to what a request would cost on each rank.

In:  segments of the request (kernels/matching.py), the holder sets, the load of each rank.
Out: per rank the depth of its contiguous prefix, the credit for it, and the cost, in blocks.

Twin: plain loops over Python sets (tests/kernels/test_costing.py).
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import f8, i4, i8, inlined, kernel, reads, u8, void, writes

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]

_0, _1 = np.uint64(0), np.uint64(1)


@inlined
def _best_credits(words: U64, rank_of_holder: I32, credit_of_holder: F64, out_best: F64) -> None:
    """out_best[rank] = the best credit among its holders in this set."""
    for w in range(len(words)):
        word, holder = words[w], 64 * w
        while word != _0:
            if word & _1 != _0:
                rank = rank_of_holder[holder]
                out_best[rank] = max(out_best[rank], credit_of_holder[holder])
            word >>= _1
            holder += 1


@inlined
def _extend(
    words: U64,
    rank_of_holder: I32,
    start: int,
    end: int,
    best: F64,
    out_depth: I64,
    out_credit: F64,
) -> int:
    """Move the ranks that hold everything up to `start` on to `end`; returns how many did."""
    num_alive = 0
    for w in range(len(words)):
        word, holder = words[w], 64 * w
        while word != _0:
            rank = rank_of_holder[holder]
            if word & _1 != _0 and out_depth[rank] == start:
                out_depth[rank] = end
                out_credit[rank] += best[rank] * (end - start)
                num_alive += 1
            if word & _1 != _0:
                best[rank] = 0.0
            word >>= _1
            holder += 1
    return num_alive


@kernel(void(reads(i8), reads(i8), reads(u8), i8, reads(i4), reads(f8), writes(i8), writes(f8)))
def overlap(
    ends: I64,
    sets: I64,
    bits: U64,
    words: int,
    rank_of_holder: I32,
    credit_of_holder: F64,
    out_depth: I64,
    out_credit: F64,
) -> None:
    """Per rank: how many leading blocks it holds in any tier, and what they are worth.

    Each block counts with the credit of the rank's nearest copy (GPU 1.0). A rank leaves at the
    first block that it does not hold. out_depth and out_credit start at 0.
    """
    best = np.zeros(len(out_depth), dtype=np.float64)
    start = 0
    for s in range(len(ends)):
        members = bits[sets[s] * words : (sets[s] + 1) * words]
        _best_credits(members, rank_of_holder, credit_of_holder, best)
        num_alive = _extend(members, rank_of_holder, start, ends[s], best, out_depth, out_credit)
        if num_alive == 0:
            return
        start = ends[s]


@kernel(void(f8, i8, f8, reads(f8), reads(f8), reads(i8), reads(i8), writes(f8)))
def cost(
    prompt_blocks: float,
    num_full_blocks: int,
    overlap_weight: float,
    credit: F64,
    prefill_blocks: F64,
    active_blocks: I64,
    active_depth: I64,
    out_cost: F64,
) -> None:
    """out_cost[r] = overlap_weight * prefill + decode, in blocks (docs/how-it-works.md, "Cost").

    prefill: what rank r already has to prefill, plus this prompt, less its credit, at least 0.
    decode: blocks of live requests on r, plus this prompt's that no live request there shares.
    """
    for r in range(len(out_cost)):
        prefill = max(0.0, prefill_blocks[r] + prompt_blocks - credit[r])
        decode = active_blocks[r] + num_full_blocks - active_depth[r]
        out_cost[r] = overlap_weight * prefill + decode
