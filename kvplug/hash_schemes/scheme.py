"""HashScheme: what every scheme can do.

In:  uint32 token ids, their namespace.   Out: uint64, one sequence hash per full block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from kvplug.errors import HashingError
from kvplug.events import Namespace, SequenceHash
from kvplug.hashing import (
    Ends,
    HashedSequences,
    Hashes,
    Tokens,
    checked_block_size,
    checked_ends,
)

ExtraKey = int | tuple[str, int] | bytes
"""What else a block depends on, as engines publish it: a 64-bit hash (Dynamo, TensorRT-LLM), a
multimodal item with its offset in the block or the digest of prompt embeddings (vLLM)."""

ExtraKeys = Sequence[Sequence[ExtraKey]]
"""By block; blocks beyond the end have none."""

Parent = SequenceHash | bytes
"""The prefix before the first block: its hash, or its digest where the hash is only part of it."""

NO_NAMESPACE = Namespace()


class HashScheme(ABC):
    """Sequence hashes for one block size, in tokens per block."""

    def __init__(self, name: str, block_size: int) -> None:
        self.name = name
        self.block_size = checked_block_size(block_size)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}, block size {self.block_size}>"

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks are full."""
        return num_tokens // self.block_size

    def sequence_hashes(
        self,
        tokens: Tokens,
        namespace: Namespace = NO_NAMESPACE,
        *,
        parent: Parent | None = None,
        extra_keys: ExtraKeys = (),
    ) -> Hashes:
        """uint64[num_blocks(len(tokens))]; `parent` identifies the prefix before the first block.

        Raises HashingError for a namespace, parents or keys that the scheme does not define, and
        for tokens that are no uint32 in a row.
        """
        return self._hash(checked_tokens(tokens), namespace, parent, checked_keys(extra_keys))

    @abstractmethod
    def _hash(
        self, tokens: Tokens, namespace: Namespace, parent: Parent | None, extra_keys: ExtraKeys
    ) -> Hashes:
        """What `sequence_hashes` promises; nothing is left out."""

    def sequence_hashes_many(
        self, tokens: Tokens, ends: Ends, namespaces: Sequence[Namespace] | None = None
    ) -> HashedSequences:
        """Of sequences in a row: sequence s ends before tokens[ends[s]]; none has a parent.

        Without `namespaces`, which has one for each sequence, none has LoRA or salt.
        """
        tokens = checked_tokens(tokens)
        ends = checked_ends(ends, len(tokens))
        return self._hash_many(tokens, ends, namespaces_of(namespaces, len(ends)))

    def _hash_many(
        self, tokens: Tokens, ends: Ends, namespaces: Sequence[Namespace]
    ) -> HashedSequences:
        """What `sequence_hashes_many` promises, with a namespace for each sequence."""
        parts = np.split(tokens, ends[:-1])
        hashes = [self.sequence_hashes(*part) for part in zip(parts, namespaces, strict=False)]
        block_ends = np.cumsum([len(part) for part in hashes], dtype=np.int64)
        return HashedSequences(np.concatenate([NO_HASHES, *hashes]), block_ends)


_NO_TOKENS = "cannot hash tokens: expected an array of uint32 in a row (as_tokens makes one)"
NO_HASHES: Hashes = np.empty(0, dtype=np.uint64)


def namespaces_of(namespaces: Sequence[Namespace] | None, num_sequences: int) -> list[Namespace]:
    """One for each sequence; raises HashingError if there are more or fewer."""
    if namespaces is None:
        return [NO_NAMESPACE] * num_sequences
    if len(namespaces) != num_sequences:
        raise HashingError(f"expected {num_sequences} namespaces, got {len(namespaces)}")
    return list(namespaces)


def hash_of(parent: object, name: str) -> SequenceHash | None:
    """The parent of a scheme that continues from 64 bits; raises HashingError for another one."""
    if parent is None:
        return None
    if not isinstance(parent, int | np.integer) or not 0 <= parent < 2**64:
        raise HashingError(f"{name} continues from a hash in [0, 2**64), got {parent!r}")
    return SequenceHash(int(parent))


def checked_tokens(tokens: object) -> Tokens:
    """uint32[n], contiguous; raises HashingError for what is no uint32 in a row."""
    if not isinstance(tokens, np.ndarray):
        raise HashingError(f"{_NO_TOKENS}, got {type(tokens).__name__}")
    if tokens.dtype != np.uint32 or tokens.ndim != 1:
        raise HashingError(f"{_NO_TOKENS}, got {tokens.dtype}{tokens.shape}")
    return np.ascontiguousarray(tokens)


def checked_keys(extra_keys: ExtraKeys) -> ExtraKeys:
    """The same; raises HashingError unless they are sequences of keys, one for each block."""
    if not _is_sequence(extra_keys) or not all(map(_is_sequence, extra_keys)):
        raise HashingError(f"extra keys are sequences of keys, one a block, got {extra_keys!r}")
    return extra_keys


def _is_sequence(keys: object) -> bool:
    return isinstance(keys, Sequence) and not isinstance(keys, str | bytes)
