"""Token ids (with LoRA name, salt and extra keys) to block hashes and sequence hashes.

In:  uint32 token ids.   Out: uint64, one hash per full block.

    tokens        1 2 3 4 | 5 6 7 8 | 9        block size 4
    block hash       a    |    b    | -        content of one block
    sequence hash    a    | h(a, b) | -        identifies the whole prefix: the key of the index

The scheme is `xxh3`, equal to Dynamo's (ai-dynamo 1.6.1, lib/kv-router), so that both can follow
one fleet: block hash = XXH3-64 of the little-endian u32 tokens of one full block with seed 1337
(+ XXH3-64(lora name, seed 0)) (+ XXH3-64(salt, seed 1)), sums modulo 2**64; extra 64-bit keys of a
block, sorted, are appended to its tokens; sequence hash of the first block = its block hash, of a
later one XXH3-64(parent || block, seed 1337). The trailing partial block is never hashed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

from kvplug.errors import ConfigError, HashingError
from kvplug.events import MAX_BLOCK_SIZE, Namespace, SequenceHash
from kvplug.kernels import hashing as kernels

Tokens = npt.NDArray[np.uint32]
Hashes = npt.NDArray[np.uint64]
TokensLike = Tokens | Sequence[int]
HashesLike = Hashes | Sequence[int]

BASE_SEED = 1337
_U64 = 2**64
_NO_PARENT = np.uint64(0)


def as_tokens(token_ids: TokensLike) -> Tokens:
    """uint32[n], contiguous; raises HashingError for anything but integers in [0, 2**32).

    A uint32 array is returned as it is, without a copy.
    """
    if isinstance(token_ids, np.ndarray):
        if token_ids.dtype == np.uint32:
            return np.ascontiguousarray(token_ids).reshape(-1)
        token_ids = token_ids.tolist()
    if isinstance(token_ids, str | bytes | bytearray):  # array("I") would take raw memory
        kind = type(token_ids).__name__
        raise HashingError(f"cannot hash tokens: expected integers in [0, 2**32), got {kind}")
    try:
        # array("I") checks type and range as it converts, three times faster than NumPy does.
        return np.frombuffer(array("I", token_ids), dtype=np.uint32)
    except (OverflowError, TypeError) as error:
        raise HashingError(
            f"cannot hash tokens: expected integers in [0, 2**32): {error}"
        ) from error


def as_hashes(sequence_hashes: HashesLike) -> Hashes:
    """uint64[n], contiguous; raises HashingError for anything but integers in [0, 2**64)."""
    if isinstance(sequence_hashes, np.ndarray) and sequence_hashes.dtype == np.uint64:
        return np.ascontiguousarray(sequence_hashes)
    try:
        return np.frombuffer(array("Q", sequence_hashes), dtype=np.uint64)
    except (OverflowError, TypeError) as error:
        raise HashingError(
            f"cannot use block hashes: expected integers in [0, 2**64): {error}"
        ) from error


@lru_cache(maxsize=4096)
def seed_of(namespace: Namespace) -> int:
    """The seed of block hashes in a namespace; 1337 without LoRA and salt."""
    seed = BASE_SEED
    if namespace.lora_name:
        seed += xxhash.xxh3_64_intdigest(namespace.lora_name.encode(), 0)
    if namespace.salt:
        seed += xxhash.xxh3_64_intdigest(namespace.salt.encode(), 1)
    return seed % _U64


class BlockHasher:
    """Hashes for one block size, in tokens per block."""

    def __init__(self, block_size: int) -> None:
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise ConfigError(f"block_size must be in [1, {MAX_BLOCK_SIZE}], got {block_size}")
        self.block_size = block_size

    def sequence_hashes(
        self,
        tokens: Tokens,
        namespace_seed: int = BASE_SEED,
        *,
        parent: SequenceHash | None = None,
        extra_keys: Sequence[Sequence[int]] = (),
    ) -> Hashes:
        """uint64[len(tokens) // block_size]; `parent` is the sequence hash before the first block.

        `namespace_seed` is seed_of(namespace). `extra_keys[i]` are further 64-bit keys of block i;
        blocks beyond its end have none.
        """
        block_hashes = self._block_hashes(tokens, namespace_seed, extra_keys)
        chained = np.empty_like(block_hashes)
        before = _NO_PARENT if parent is None else np.uint64(parent)
        seed = np.uint64(BASE_SEED)
        kernels.chain_blocks(block_hashes, parent is not None, before, seed, chained)
        return chained

    def _block_hashes(
        self, tokens: Tokens, seed: int, extra_keys: Sequence[Sequence[int]]
    ) -> Hashes:
        hashes = np.empty(len(tokens) // self.block_size, dtype=np.uint64)
        kernels.hash_blocks(tokens, self.block_size, np.uint64(seed), hashes)
        for block, keys in enumerate(extra_keys[: len(hashes)]):
            if keys:
                hashes[block] = self._hash_with_keys(tokens, block, seed, keys)
        return hashes

    def _hash_with_keys(
        self, tokens: Tokens, block: int, seed: int, keys: Sequence[int]
    ) -> np.uint64:
        start = block * self.block_size
        appended = np.array(sorted(keys), dtype="<u8").view("<u4")
        words = np.concatenate([tokens[start : start + self.block_size], appended])
        out = np.empty(1, dtype=np.uint64)
        kernels.hash_blocks(words.astype(np.uint32), len(words), np.uint64(seed), out)
        return np.uint64(out[0])
