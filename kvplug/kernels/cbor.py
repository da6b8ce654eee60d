"""Token ids to CBOR: an array of unsigned integers per block, in canonical form.

In:  uint32 token ids.   Out: bytes, those of block i end before out_ends[i].

RFC 8949, 4.2.1: the shortest head; a number below 24 is in the first byte, behind 24, 25 and 26
are 1, 2 and 4 bytes, big-endian. Reference: kvplug/hash_schemes/cbor.py.
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import i8, inlined, kernel, reads, u1, u4, u8, writes

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

MAX_HEAD_BYTES = 5
_UNSIGNED, _ARRAY = np.uint64(0), np.uint64(4 << 5)
_0, _1, _2, _4, _8 = (np.uint64(n) for n in (0, 1, 2, 4, 8))
_24, _25, _26, _255 = (np.uint64(n) for n in (24, 25, 26, 255))
_U8_END, _U16_END = np.uint64(1 << 8), np.uint64(1 << 16)


@inlined
def _put_head(kind: np.uint64, number: np.uint64, at: np.uint64, out_bytes: U8) -> np.uint64:
    """Returns the offset behind it."""
    if number < _24:
        out_bytes[at] = kind | number
        return at + _1
    code, num_bytes = _26, _4
    if number < _U8_END:
        code, num_bytes = _24, _1
    elif number < _U16_END:
        code, num_bytes = _25, _2
    out_bytes[at] = kind | code
    for i in range(_1, num_bytes + _1):
        out_bytes[at + i] = (number >> (_8 * (num_bytes - i))) & _255
    return at + num_bytes + _1


@kernel(u8(reads(u4), i8, writes(u8), writes(u1)))
def encode_blocks(tokens: U32, block_size: int, out_ends: U64, out_bytes: U8) -> np.uint64:
    """Fill out_ends for its length of blocks, return the number of bytes written.

    out_bytes has MAX_HEAD_BYTES for each token and each block.
    """
    n, at = np.uint64(block_size), _0
    for i in range(np.uint64(len(out_ends))):
        at = _put_head(_ARRAY, n, at, out_bytes)
        for token in range(i * n, (i + _1) * n):
            at = _put_head(_UNSIGNED, np.uint64(tokens[token]), at, out_bytes)
        out_ends[i] = at
    return at
