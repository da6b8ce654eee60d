"""The prompt of a request: its tokens, or the hashes of its full blocks, or both.

In:  uint32[tokens], or uint64[blocks].   Out: hashes for an index, if the kernel does not compute
them anyway.
"""

from __future__ import annotations

import numpy as np

from kvplug.hashing import BlockHasher, Hashes, Tokens

NO_TOKENS: Tokens = np.empty(0, dtype=np.uint32)


class Prompt:
    """What a request asks to be prefilled: len(prompt) tokens, and their hashes if no kernel
    computes them. `given`: the hashes that the caller had.
    """

    __slots__ = ("_hashes", "_num_tokens", "given", "seed", "tokens")

    def __init__(
        self,
        tokens: Tokens,
        namespace_seed: int,
        hashes: Hashes | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """`hashes` of `num_tokens` tokens, which then need not be given."""
        self.tokens, self.seed, self.given = tokens, namespace_seed, hashes
        self._num_tokens = len(tokens) if num_tokens is None else num_tokens
        self._hashes: dict[tuple[int, int], Hashes] = {}

    def __len__(self) -> int:
        return self._num_tokens

    def known_hashes(self, hasher: BlockHasher) -> Hashes | None:
        """uint64[hasher.num_blocks(len(self))]; None if the routing kernel computes them."""
        if self.given is None and not self._hashes and hasher.window == hasher.block_size:
            return None
        return self.hashes(hasher)

    def hashes(self, hasher: BlockHasher) -> Hashes:
        """uint64[hasher.num_blocks(len(self))], computed once."""
        if self.given is not None:
            return self.given
        asked = hasher.block_size, hasher.window
        hashes = self._hashes.get(asked)
        if hashes is None:
            hashes = self._hashes[asked] = hasher.sequence_hashes(self.tokens, self.seed)
        return hashes
