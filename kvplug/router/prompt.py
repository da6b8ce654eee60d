"""Prompt: what one request asks to be prefilled, and its hashes where a kernel does not make them.

In:  uint32 token ids and the seed of their namespace, or sequence hashes.
Out: its length, hashes by block size and window.
"""

from __future__ import annotations

import math
from typing import Final

from kvplug.errors import ConfigError
from kvplug.hashing import BlockHasher, Hashes, Tokens
from kvplug.setting import finite, shown, whole

MAX_TOKENS: Final = 10_000_000
"""Of a prompt or an answer: far more than any engine takes, and what the fitted models can bear."""


def checked_num_tokens(
    value: object, name: str, attempt: str, most: float = float(MAX_TOKENS)
) -> int:
    """A number of tokens that a caller gave; ConfigError if it cannot be one."""
    number = whole(value)
    if not 0 <= finite(number) <= most:
        bounds = f"0 to {most:,.0f}" if math.isfinite(most) else "0 or more"
        expected = f"expected {name} to be a whole number of tokens, {bounds}"
        raise ConfigError(f"cannot {attempt}: {expected}, got {shown(value)}")
    return int(number)


class Prompt:
    """len(prompt) tokens; known_hashes(hasher)."""

    __slots__ = ("_given", "_hashes", "_num_tokens", "seed", "tokens")

    def __init__(
        self,
        tokens: Tokens,
        namespace_seed: int,
        hashes: Hashes | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """`hashes` of `num_tokens` tokens, which then need not be given."""
        self.tokens, self.seed, self._given = tokens, namespace_seed, hashes
        self._num_tokens = len(tokens) if num_tokens is None else num_tokens
        self._hashes: dict[tuple[int, int], Hashes] = {}

    def __len__(self) -> int:
        return self._num_tokens

    def known_hashes(self, hasher: BlockHasher) -> Hashes | None:
        """uint64[hasher.num_blocks(len(self))]; None if the routing kernel computes them."""
        if self._given is not None:
            return self._given
        if hasher.window == hasher.block_size:
            return None
        asked = hasher.block_size, hasher.window
        hashes = self._hashes.get(asked)
        if hashes is None:
            hashes = self._hashes[asked] = hasher.sequence_hashes(self.tokens, self.seed)
        return hashes
