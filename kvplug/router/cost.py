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

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.hashing import Hashes, Tokens
from kvplug.index.block_index import BlockIndex
from kvplug.index.overlap import Overlap
from kvplug.kernels import costing
from kvplug.kernels import pricing as kernels
from kvplug.router.load import ActiveLoad, Load

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


class Priced(NamedTuple):
    """A request on one index: its hashes, what each rank holds of it, float64[ranks] in blocks."""

    hashes: Hashes
    overlap: Overlap
    costs: F64


def price(
    tokens: Tokens, seed: int, index: BlockIndex, load: ActiveLoad, now_s: float, weight: float
) -> Priced:
    """All that a request has to know of a fleet with one index, in one call of a kernel."""
    num_ranks, block_size = len(index.numbers.ranks), index.block_size
    load.reserve(num_ranks)
    asked, live = index.asking, load.asking
    hashes = np.empty(len(tokens) // block_size, dtype=np.uint64)
    held, active, costs = asked.new_rows(), live.new_rows(), np.empty(num_ranks)
    kernels.price(
        tokens, block_size, np.uint64(seed), now_s, weight, asked.bundle.words, live.bundle.words,
        load.prefill_tokens, load.active_blocks, hashes, held, active, costs,
    )  # fmt: skip
    return Priced(hashes, Overlap(held), costs)
