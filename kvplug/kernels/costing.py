"""Overlap and load to what a request would cost on each rank.

In:  what each rank holds of the request (kernels/matching.py), the load of each rank.
Out: the cost of each rank, in blocks.

Twin: a plain loop (tests/kernels/test_costing.py).
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import f8, i8, inlined, kernel, reads, void, writes

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


@inlined
def cost_of(
    prompt_blocks: float, num_full_blocks: int, overlap_weight: float,
    credit: float, prefill_blocks: float, active_blocks: int, active_depth: int,
) -> float:  # fmt: skip
    """overlap_weight * prefill + decode, in blocks (docs/how-it-works.md, "Cost").

    prefill: what the rank already has to prefill, plus this prompt, less its credit, at least 0.
    decode: blocks of live requests there, plus this prompt's that no live request there shares.
    """
    prefill = max(0.0, prefill_blocks + prompt_blocks - credit)
    return overlap_weight * prefill + (active_blocks + num_full_blocks - active_depth)


@kernel(void(f8, i8, f8, reads(f8), reads(f8), reads(i8), reads(i8), writes(f8)))
def cost(
    prompt_blocks: float, num_full_blocks: int, overlap_weight: float,
    credit: F64, prefill_blocks: F64, active_blocks: I64, active_depth: I64, out_cost: F64,
) -> None:  # fmt: skip
    """out_cost[r] = cost_of rank r."""
    for r in range(len(out_cost)):
        out_cost[r] = cost_of(
            prompt_blocks, num_full_blocks, overlap_weight,
            credit[r], prefill_blocks[r], active_blocks[r], active_depth[r],
        )  # fmt: skip
