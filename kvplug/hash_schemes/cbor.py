"""Canonical CBOR of what a block hash is made of (RFC 8949, 4.2.1: shortest heads).

In:  bytes, text, integers, None, tuples of them; token ids.   Out: bytes.

Equal to cbor2 6.2.1, `dumps(value, canonical=True)`, which vLLM 0.32.0 calls.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np

from kvplug.hashing import Tokens, utf8
from kvplug.kernels import cbor as kernels

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY = range(0, 5 << 5, 1 << 5)
_NULL: Final = b"\xf6"


class Encoded(bytes):
    """A part that is CBOR already."""


Value = int | bytes | str | None | tuple["Value", ...]


def _head(kind: int, number: int) -> bytes:
    if number < 24:
        return bytes((kind | number,))
    for code, num_bytes in ((24, 1), (25, 2), (26, 4)):
        if number < 1 << 8 * num_bytes:
            return bytes((kind | code,)) + number.to_bytes(num_bytes, "big")
    return bytes((kind | 27,)) + number.to_bytes(8, "big")


def dumps(value: Value) -> bytes:
    """The one canonical encoding."""
    match value:
        case None:
            return _NULL
        case Encoded():
            return value
        case bytes():
            return _head(_BYTES, len(value)) + value
        case str():
            text = utf8(value)
            return _head(_TEXT, len(text)) + text
        case tuple():
            return _head(_ARRAY, len(value)) + b"".join(map(dumps, value))
    return _head(_UNSIGNED, value) if value >= 0 else _head(_NEGATIVE, -1 - value)


def token_arrays(tokens: Tokens, block_size: int) -> list[Encoded]:
    """The tokens of each full block as an array: `dumps` of them, in a kernel."""
    num_blocks = len(tokens) // block_size
    ends = np.zeros(num_blocks, dtype=np.uint64)
    num_bytes = kernels.MAX_HEAD_BYTES * num_blocks * (block_size + 1)
    buffer = np.empty(num_bytes, dtype=np.uint8)
    written = buffer[: kernels.encode_blocks(tokens, block_size, ends, buffer)].tobytes()
    return [Encoded(written[start:end]) for start, end in pairwise([0, *ends.tolist()])]
