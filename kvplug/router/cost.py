"""What a request would cost on each rank.

In:  the overlap of the request with each rank's cache, and each rank's load.
Out: float64[ranks], in blocks; lower is better.

    cost = overlap_score_weight * prefill_blocks + decode_blocks

    prefill_blocks  tokens that the rank has to prefill before and with this request, in blocks,
                    less the credit for what it holds of the prompt; at least 0
    decode_blocks   distinct blocks of live requests there, plus those of this prompt that no
                    live request shares

This is the formula of Dynamo's KV cache routing, with its load terms as of ai-dynamo 1.6.1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvplug.index.overlaps import Overlap
from kvplug.kernels import costing
from kvplug.router.load import Load

F64 = npt.NDArray[np.float64]


def cost_per_rank(
    num_tokens: int, block_size: int, overlap: Overlap, load: Load, overlap_score_weight: float
) -> F64:
    """float64[ranks] in blocks. Only full blocks count as decode blocks."""
    costs = np.empty(len(overlap.depth))
    costing.cost(
        num_tokens / block_size,
        num_tokens // block_size,
        overlap_score_weight,
        overlap.credit,
        load.prefill_tokens / block_size,
        load.active_blocks,
        load.active_depth,
        costs,
    )
    return costs
