"""Token ids to sequence hashes: FNV-1a over the tokens, chained over the blocks.

In:  uint32 token ids.   Out: uint64, one hash per full block; the trailing partial block has none.

    h = BASIS ^ (hash of the block before * PRIME)        0 stands before the first block
    for each token:  h = (h ^ token) * PRIME

64-bit, modulo 2**64; a token is one step, not four bytes. Origin: the block keys of a fork of
vLLM's router (v0.12.0); BASIS and PRIME are those of FNV-1a (draft-eastlake-fnv). Reference:
tests/kernels/references.py.
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import i8, inlined, kernel, reads, u4, u8, void, writes

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_BASIS, _PRIME = np.uint64(14695981039346656037), np.uint64(1099511628211)
_NOTHING = np.uint64(0)


@inlined
def _hash_block(tokens: U32, start: np.uint64, n: np.uint64, before: np.uint64) -> np.uint64:
    h = _BASIS ^ (before * _PRIME)
    for at in range(start, start + n):
        h = (h ^ np.uint64(tokens[at])) * _PRIME
    return h


@inlined
def _fill(tokens: U32, block_size: int, before: np.uint64, out_hashes: U64) -> None:
    n = np.uint64(block_size)
    for i in range(np.uint64(len(out_hashes))):
        before = _hash_block(tokens, i * n, n, before)
        out_hashes[i] = before


@kernel(void(reads(u4), i8, u8, writes(u8)))
def hash_sequence(tokens: U32, block_size: int, parent: np.uint64, out_hashes: U64) -> None:
    """out_hashes[i] = hash of the blocks 0 to i behind `parent`, 0 for none.

    block_size >= 1 and len(out_hashes) * block_size <= len(tokens).
    """
    _fill(tokens, block_size, parent, out_hashes)


@kernel(void(reads(u4), reads(i8), i8, reads(i8), writes(u8)))
def hash_sequences(
    tokens: U32, ends: I64, block_size: int, block_ends: I64, out_hashes: U64
) -> None:
    """The same of many sequences in a row, none with a parent.

    Sequence s ends before tokens[ends[s]], its hashes before out_hashes[block_ends[s]].
    """
    start, first = 0, 0
    for s in range(len(ends)):
        end, last = ends[s], block_ends[s]
        _fill(tokens[start:end], block_size, _NOTHING, out_hashes[first:last])
        start, first = end, last
