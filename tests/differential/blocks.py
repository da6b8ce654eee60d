"""Blocks of made-up prompts: a tree, in which equal prefixes are equal blocks.

In:  random numbers.   Out: prompts, as token ids and as the names that engines give their blocks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_VOCABULARY = 50_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """`names` of its full blocks; token ids."""

    names: tuple[int, ...]
    tokens: list[int]


class BlockTree:
    """Prompts that share prefixes of `families`, and what is in each block."""

    def __init__(self, random_: random.Random, block_size: int, num_families: int) -> None:
        self._random, self.block_size = random_, block_size
        self._names: dict[tuple[int | None, tuple[int, ...]], int] = {}
        self.tokens_of: dict[int, tuple[int, ...]] = {}
        self.parent_of: dict[int, int | None] = {}
        self.families: list[tuple[int, ...]] = []
        for _ in range(num_families):
            self.families.append(self._family())

    def prompt(self) -> Prompt:
        """Some blocks of a family, and tokens of its own; an old prompt, too, now and then."""
        family = self._random.choice(self.families)
        names = family[: self._random.randint(0, len(family))]
        num_own = self._random.choice((0, 1, self._random.randint(0, 3 * self.block_size)))
        own = self._tokens(num_own if names else max(1, num_own))
        tokens = [token for name in names for token in self.tokens_of[name]] + own
        return Prompt(self._path(names, own), tokens)

    def fresh(self) -> Prompt:
        """A block that nobody has."""
        own = self._tokens(self.block_size)
        return Prompt(self._path((), own), own)

    def _family(self) -> tuple[int, ...]:
        """A path that begins with a part of another one, half of the time."""
        first: tuple[int, ...] = ()
        if self.families and self._random.random() < 0.5:
            other = self._random.choice(self.families)
            first = other[: self._random.randint(1, len(other))]
        return self._path(first, self._tokens(self._random.randint(4, 20) * self.block_size))

    def _tokens(self, number: int) -> list[int]:
        return self._random.choices(range(_VOCABULARY), k=number)

    def _path(self, first: tuple[int, ...], tokens: list[int]) -> tuple[int, ...]:
        names, size = list(first), self.block_size
        for at in range(0, len(tokens) - size + 1, size):
            parent = names[-1] if names else None
            names.append(self._name(parent, tuple(tokens[at : at + size])))
        return tuple(names)

    def _name(self, parent: int | None, tokens: tuple[int, ...]) -> int:
        key = (parent, tokens)
        if key not in self._names:
            name = self._names[key] = self._random.getrandbits(63)
            self.tokens_of[name], self.parent_of[name] = tokens, parent
        return self._names[key]
