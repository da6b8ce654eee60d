"""Tokens of a request to what it would cost on each rank, in one call.

In:  token ids, bundles of the index and of the live requests (kernels/matching.py), their load.
Out: sequence hashes, what each rank holds, what it would cost there.

Made of parts of the files that it names. Twin: the steps one by one (tests/router/test_cost.py).
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels import matching
from kvplug.kernels._jit import f8, i8, kernel, reads, u4, u8, void, writes
from kvplug.kernels.costing import cost_of
from kvplug.kernels.hashing import fill_sequence_hashes

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

_BASE_SEED, _NO_PARENT = np.uint64(1337), np.uint64(0)  # kvplug/hashing.py


@kernel(
    void(
        reads(u4), i8, u8, f8, f8, reads(u8), reads(u8), reads(i8), reads(i8),
        writes(u8), writes(i8), writes(i8), writes(f8),
    )
)  # fmt: skip
def price(
    tokens: U32, block_size: int, seed: np.uint64, now_s: float, overlap_weight: float,
    index: U64, load: U64, prefill_tokens: I64, active_blocks: I64,
    out_hashes: U64, out_held: I64, out_active: I64, out_cost: F64,
) -> None:  # fmt: skip
    """prefill_tokens, active_blocks: of each rank.

    out_hashes[i]: sequence hash of block i; out_held: as matching.overlap of the index, out_active
    of the live requests; out_cost[r]: cost_of rank r.
    """
    fill_sequence_hashes(tokens, block_size, seed, _NO_PARENT, _BASE_SEED, out_hashes)
    for which in range(2):  # compiled once: it is most of what a first request waits for
        asked, out = (index, out_held) if which == 0 else (load, out_active)
        matching.fill_answer(out_hashes, now_s, asked, out)
    num_ranks = len(out_cost)
    num_held = len(out_held) // matching.NUM_ROWS
    num_active = len(out_active) // matching.NUM_ROWS
    credit = out_held[matching.CREDIT * num_held :].view(np.float64)
    depth = out_active[matching.DEPTH * num_active :]
    for r in range(num_ranks):
        out_cost[r] = cost_of(
            len(tokens) / block_size, len(out_hashes), overlap_weight,
            credit[r], prefill_tokens[r] / block_size, active_blocks[r], depth[r],
        )  # fmt: skip
