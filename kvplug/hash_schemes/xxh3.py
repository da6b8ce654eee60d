"""xxh3: Dynamo's hashes (ai-dynamo 1.6.1), which are the keys of kvplug's index.

In:  uint32 token ids, their namespace.   Out: uint64, one sequence hash per full block.

The formula is in kvplug/hashing.py, which the index calls directly.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvplug.errors import HashingError
from kvplug.events import Namespace
from kvplug.hash_schemes.scheme import (
    ExtraKey,
    ExtraKeys,
    HashScheme,
    Parent,
    hash_of,
)
from kvplug.hashing import BlockHasher, Ends, HashedSequences, Hashes, Tokens, seed_of


class Xxh3(HashScheme):
    """XXH3-64; with `bigrams` over windows of block_size + 1 tokens, as with EAGLE.

    Extra keys are u64 numbers.
    """

    def __init__(self, name: str, block_size: int, *, bigrams: bool = False) -> None:
        super().__init__(name, block_size)
        self._hasher = BlockHasher(block_size, bigrams=bigrams)

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks are full, with the token after them if they are bigrams."""
        return self._hasher.num_blocks(num_tokens)

    def _hash(
        self, tokens: Tokens, namespace: Namespace, parent: Parent | None, extra_keys: ExtraKeys
    ) -> Hashes:
        return self._hasher.sequence_hashes(
            tokens,
            seed_of(namespace),
            parent=hash_of(parent, self.name),
            extra_keys=[_numbers(keys) for keys in extra_keys],
        )

    def _hash_many(
        self, tokens: Tokens, ends: Ends, namespaces: Sequence[Namespace]
    ) -> HashedSequences:
        """In one kernel."""
        seeds = [seed_of(each) for each in namespaces]
        return self._hasher.sequence_hashes_many(tokens, ends, seeds)


def _numbers(keys: Sequence[ExtraKey]) -> list[int]:
    numbers = [key for key in keys if isinstance(key, int) and 0 <= key < 2**64]
    if len(numbers) != len(keys):
        raise HashingError(f"extra keys of xxh3 are integers in [0, 2**64), got {keys!r}")
    return numbers
