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

With bigrams (SGLang with EAGLE keys a block by its pairs of token and next token) the blocks are
windows of one token more, a block apart, as Dynamo hashes them:

    tokens        1 2 3 4 5 6 7 8 9 10
    windows       1 2 3 4 5
                          5 6 7 8 9         the last block needs the token after it

Other schemes, by name: kvplug/hash_schemes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvplug.errors import ConfigError, HashingError
from kvplug.events import MAX_BLOCK_SIZE, Namespace, SequenceHash
from kvplug.kernels import hashing as kernels
from kvplug.setting import shown

Tokens = npt.NDArray[np.uint32]
Hashes = npt.NDArray[np.uint64]
Ends = npt.NDArray[np.int64]
TokensLike = Tokens | Sequence[int]
HashesLike = Hashes | Sequence[int]

BASE_SEED = 1337
_U64 = 2**64
_CHAIN_SEED = np.uint64(BASE_SEED)
_HASH = np.dtype(np.uint64)
_START = np.zeros(1, dtype=np.int64)


class HashedSequences(NamedTuple):
    """Hashes of many sequences in a row: those of sequence s are before hashes[ends[s]]."""

    hashes: Hashes
    ends: Ends


def as_tokens(token_ids: TokensLike) -> Tokens:
    """uint32[n], contiguous; raises HashingError for anything but integers in [0, 2**32) in a row.

    A uint32 array is returned as it is, without a copy.
    """
    expected = "cannot hash tokens: expected integers in [0, 2**32)"
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim != 1:
            raise HashingError(f"{expected} in a row, got {token_ids.dtype}{token_ids.shape}")
        if token_ids.dtype == np.uint32:
            return np.ascontiguousarray(token_ids)
        if token_ids.dtype == np.bool_:
            raise HashingError(f"{expected}, got truth values")
        return as_tokens(token_ids.tolist())
    return _as_array(token_ids, "I", expected)


def as_hashes(sequence_hashes: HashesLike) -> Hashes:
    """uint64[n], contiguous; raises HashingError for all but a row of integers in [0, 2**64)."""
    expected = "cannot use block hashes: expected integers in [0, 2**64)"
    if isinstance(sequence_hashes, np.ndarray):
        if sequence_hashes.ndim != 1:
            got = f"{sequence_hashes.dtype}{sequence_hashes.shape}"
            raise HashingError(f"{expected} in a row, got {got}")
        if sequence_hashes.dtype == _HASH:
            return np.ascontiguousarray(sequence_hashes)
        return as_hashes(sequence_hashes.tolist())
    return _as_array(sequence_hashes, "Q", expected)


def _as_array(numbers: Sequence[int], typecode: str, expected: str) -> npt.NDArray[Any]:
    # An array checks type and range as it converts: four times as fast as NumPy does, and a list
    # goes in by fromlist in two thirds of the time of array(typecode, list).
    # It would take raw memory, or numbers in no order.
    if isinstance(numbers, str | bytes | bytearray | set | frozenset | dict):
        raise HashingError(f"{expected}, got {type(numbers).__name__}")
    try:
        if isinstance(numbers, list):
            values = array(typecode)
            values.fromlist(numbers)
        else:
            values = array(typecode, numbers)
    except (OverflowError, TypeError) as error:
        raise HashingError(f"{expected}: {error}") from error
    return np.frombuffer(values, dtype=f"=u{values.itemsize}")


def checked_block_size(block_size: object) -> int:
    """`block_size` if it can be one; raises ConfigError."""
    if not isinstance(block_size, int | np.integer):
        raise ConfigError(f"block_size must be a whole number, got {block_size!r}")
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ConfigError(f"block_size must be in [1, {MAX_BLOCK_SIZE}], got {block_size}")
    return int(block_size)


def checked_ends(ends: Ends | Sequence[int], total: int, what: str = "tokens") -> Ends:
    """int64[n], contiguous; raises HashingError unless they never fall and reach `total`."""
    try:
        ends = np.asarray(ends)
    except ValueError as error:
        raise HashingError(f"ends of sequences are integers in a row: {error}") from error
    if ends.ndim != 1 or not (np.issubdtype(ends.dtype, np.integer) or not ends.size):
        raise HashingError(f"ends of sequences are integers in a row, got {ends.dtype}{ends.shape}")
    ends = np.ascontiguousarray(ends, dtype=np.int64)
    starts = np.concatenate([_START, ends])
    if starts[-1] != total or (starts[1:] < starts[:-1]).any():
        raise HashingError(f"ends of sequences must rise from 0 to {total}, the {what} given")
    return ends


def seed_of(namespace: Namespace) -> int:
    """The seed of block hashes in a namespace; 1337 without LoRA and salt. HashingError for what is
    no Namespace of texts.
    """
    if not isinstance(namespace, Namespace):
        raise HashingError(f"expected a Namespace, got {shown(namespace)}")
    seed = BASE_SEED
    if namespace.lora_name:
        seed += xxhash.xxh3_64_intdigest(utf8(namespace.lora_name), 0)
    if namespace.salt:
        seed += xxhash.xxh3_64_intdigest(utf8(namespace.salt), 1)
    return seed % _U64


def utf8(text: str) -> bytes:
    """The bytes that are hashed of a name or a salt; raises HashingError for half characters."""
    if not isinstance(text, str):
        raise HashingError(f"cannot hash {shown(text)}: expected a name or a salt, a str")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise HashingError(f"cannot hash {text!a}: expected Unicode text: {error}") from error


def _seed(namespace: Namespace | int) -> np.uint64:
    """Of a namespace, or as it is given."""
    if isinstance(namespace, Namespace):
        return np.uint64(seed_of(namespace))
    return _u64(namespace, "a Namespace, or its seed")


def _u64(number: int, what: str) -> np.uint64:
    try:
        return np.uint64(number)
    except (OverflowError, TypeError, ValueError) as error:
        raise HashingError(
            f"cannot hash tokens: expected {what}, in [0, 2**64): {error}"
        ) from error


def _seeds_of(namespaces: Sequence[Namespace | int] | None, num_sequences: int) -> Hashes:
    if namespaces is None:
        return np.full(num_sequences, BASE_SEED, dtype=np.uint64)
    if len(namespaces) != num_sequences:
        got = len(namespaces)
        raise HashingError(f"expected {num_sequences} namespaces, one a sequence, got {got}")
    return np.array([_seed(each) for each in namespaces], dtype=np.uint64)


class BlockHasher:
    """Hashes for one block size, in tokens per block.

    With `bigrams` a block is a window of block_size + 1 tokens (`window`), which shares its last
    one with the next block.
    """

    def __init__(self, block_size: int, *, bigrams: bool = False) -> None:
        self.block_size = checked_block_size(block_size)
        self.window = block_size + bigrams

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks are full."""
        return max(0, num_tokens - self.window + self.block_size) // self.block_size

    def block_hashes(
        self,
        tokens: TokensLike,
        namespace: Namespace | int = BASE_SEED,
        *,
        extra_keys: Sequence[Sequence[int]] = (),
    ) -> Hashes:
        """uint64[num_blocks(len(tokens))], of the content of each block alone.

        `namespace`: one, or its seed (seed_of). `extra_keys[i]` are further 64-bit keys of block i;
        blocks beyond its end have none.
        """
        tokens, seed = as_tokens(tokens), _seed(namespace)
        hashes = np.empty(self.num_blocks(len(tokens)), dtype=np.uint64)
        kernels.hash_blocks(tokens, self.window, self.block_size, seed, hashes)
        for block, keys in enumerate(extra_keys[: len(hashes)]):
            if keys:
                hashes[block] = self._hash_with_keys(tokens, block, seed, keys)
        return hashes

    def sequence_hashes(
        self,
        tokens: TokensLike,
        namespace: Namespace | int = BASE_SEED,
        *,
        parent: SequenceHash | None = None,
        extra_keys: Sequence[Sequence[int]] = (),
    ) -> Hashes:
        """uint64[num_blocks(len(tokens))]; `parent` is the sequence hash before the first block.

        `namespace` and `extra_keys` as of `block_hashes`; HashingError for what cannot be hashed.
        """
        tokens = as_tokens(tokens)
        linked, before = parent is not None, _u64(parent or 0, "the hash of a parent")
        if any(extra_keys):
            hashes = self.block_hashes(tokens, namespace, extra_keys=extra_keys)
            kernels.chain_blocks(hashes, linked, before, _CHAIN_SEED, hashes)
            return hashes
        hashes = np.empty(self.num_blocks(len(tokens)), dtype=np.uint64)
        sizes, seed = (self.window, self.block_size), _seed(namespace)
        kernels.hash_sequence(tokens, *sizes, seed, linked, before, _CHAIN_SEED, hashes)
        return hashes

    def sequence_hashes_many(
        self,
        tokens: TokensLike,
        ends: Ends | Sequence[int],
        namespaces: Sequence[Namespace | int] | None = None,
    ) -> HashedSequences:
        """Of sequences in a row: sequence s ends before tokens[ends[s]], and has namespace s, or
        its seed. Without `namespaces` none has LoRA or salt.
        """
        tokens = as_tokens(tokens)
        ends = checked_ends(ends, len(tokens))
        seeds = _seeds_of(namespaces, len(ends))
        lengths = np.diff(ends, prepend=0) - (self.window - self.block_size)
        block_ends = np.cumsum(np.maximum(lengths, 0) // self.block_size, dtype=np.int64)
        hashes = np.empty(block_ends[-1] if len(ends) else 0, dtype=np.uint64)
        sizes = self.window, self.block_size
        kernels.hash_sequences(tokens, ends, *sizes, seeds, _CHAIN_SEED, block_ends, hashes)
        return HashedSequences(hashes, block_ends)

    def _hash_with_keys(
        self, tokens: Tokens, block: int, seed: np.uint64, keys: Sequence[int]
    ) -> np.uint64:
        start = block * self.block_size
        appended = np.sort(as_hashes(keys)).astype("<u8").view("<u4")
        words = np.concatenate([tokens[start : start + self.window], appended])
        out = np.empty(1, dtype=np.uint64)
        kernels.hash_blocks(words.astype(np.uint32), len(words), len(words), seed, out)
        return np.uint64(out[0])
