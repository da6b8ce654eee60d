"""Prompt: the tokens of one request, hashed once for each block size and window asked for.

In:  uint32 token ids, the seed of their namespace.   Out: sequence hashes by block size and window.
"""

from __future__ import annotations

from kvplug.hashing import BlockHasher, Hashes, Tokens


class Prompt:
    """len(prompt) tokens; hashes(hasher)."""

    __slots__ = ("_hashes", "seed", "tokens")

    def __init__(self, tokens: Tokens, namespace_seed: int) -> None:
        self.tokens = tokens
        self.seed = namespace_seed
        self._hashes: dict[tuple[int, int], Hashes] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def hashes(self, hasher: BlockHasher) -> Hashes:
        """uint64[hasher.num_blocks(len(self))]; computed when first asked for."""
        asked = hasher.block_size, hasher.window
        hashes = self._hashes.get(asked)
        if hashes is None:
            hashes = self._hashes[asked] = hasher.sequence_hashes(self.tokens, self.seed)
        return hashes
