"""Token ids to sequence hashes in an engine's process: those of kvplug/hashing.py, without Numba.

In:  token ids, a seed, the hash before the first block.   Out: integers, one hash per full block.

vLLM 0.32 for the CPU does not start in a process that has loaded Numba, so here the xxhash package
hashes block by block (docs/decisions.md, 83).
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Final

import xxhash

from kvplug.errors import HashingError
from kvplug.events import Namespace

BASE_SEED: Final = 1337
_U64: Final = 2**64
_TOKEN_BYTES: Final = 4
_pair: Final = struct.Struct("<QQ").pack
_digest: Final = xxhash.xxh3_64_intdigest


def seed_of(namespace: Namespace) -> int:
    """As hashing.seed_of; HashingError for names that are no Unicode text."""
    seed = BASE_SEED
    try:
        if namespace.lora_name:
            seed += _digest(namespace.lora_name.encode(), 0)
        if namespace.salt:
            seed += _digest(namespace.salt.encode(), 1)
    except UnicodeEncodeError as error:
        raise HashingError(
            f"cannot hash a LoRA name or a salt: expected Unicode text: {error}"
        ) from error
    return seed % _U64


class BlockHashes:
    """sequence_hashes for one block size, in tokens; as hashing.BlockHasher, with lists of int."""

    def __init__(self, block_size: int, *, bigrams: bool = False) -> None:
        self.block_size, self.window = block_size, block_size + bigrams

    def sequence_hashes(
        self,
        token_ids: Sequence[int],
        seed: int = BASE_SEED,
        *,
        parent: int | None = None,
        extra_keys: Sequence[Sequence[int]] = (),
    ) -> list[int]:
        """One hash per full block; `parent` is the sequence hash before the first one.

        `extra_keys[i]`: further 64-bit keys of block i. HashingError for ids outside u32.
        """
        words = _little_endian("I", token_ids)
        step, width = _TOKEN_BYTES * self.block_size, _TOKEN_BYTES * self.window
        starts = range(0, len(words) - width + 1, step)
        if any(extra_keys):
            keys = (*extra_keys, *[()] * len(starts))
            parts = [words[at : at + width] for at in starts]
            blocks = [_digest(p + _sorted(k), seed) for p, k in zip(parts, keys, strict=False)]
        else:
            blocks = [_digest(words[at : at + width], seed) for at in starts]
        return _chained(blocks, parent)


def _chained(blocks: list[int], parent: int | None) -> list[int]:
    """Block hashes to sequence hashes, in place."""
    before = parent
    for at, block in enumerate(blocks):
        before = block if before is None else _digest(_pair(before, block), BASE_SEED)
        blocks[at] = before
    return blocks


def _sorted(keys: Sequence[int]) -> bytes:
    return _little_endian("Q", sorted(keys)) if keys else b""


def _little_endian(typecode: str, numbers: Sequence[int]) -> bytes:
    try:
        values = array(typecode, numbers)
    except (OverflowError, TypeError) as error:
        raise HashingError(f"cannot hash tokens: expected integers in a row: {error}") from error
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
