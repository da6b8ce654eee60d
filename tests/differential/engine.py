"""One engine's cache, changed at random, and what it publishes of that.

In:  random numbers.   Out: events, and which blocks are in which tier.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from kvplug.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, Tier
from tests.differential.blocks import BlockTree

Held = dict[Tier, set[int]]


class Engine:
    """store, remove, clear: each changes `held` and returns its events.

    `leaves_gaps`: blocks are removed from the middle of a prefix, and lower tiers have parts of
    prefixes; else a block goes with all that is behind it, and each tier has whole prefixes.
    """

    def __init__(
        self, tree: BlockTree, random_: random.Random, tiers: Sequence[Tier], leaves_gaps: bool
    ) -> None:
        self.tree, self._random, self._tiers = tree, random_, tiers
        self._leaves_gaps = leaves_gaps
        self.held: Held = {tier: set() for tier in tiers}

    def change(self) -> list[Event]:
        """Something happens to the cache."""
        dice = self._random.random()
        if dice < 0.6:
            return self.store()
        return self.remove() if dice < 0.98 else self.clear()

    def store(self) -> list[Event]:
        """What a tier lacks of a prefix, an event for each run of blocks."""
        tier = self._random.choice(self._tiers)
        path = self._random.choice(self.tree.families)
        end = self._random.randint(1, len(path))
        first = self._random.choice(self._starts(path[:end], tier))
        runs = list(self._missing_runs(path, first, end, self.held[tier]))
        for run in runs:
            self.held[tier].update(run)
        return [self._stored(run, tier) for run in runs]

    def remove(self) -> list[Event]:
        """A block, and what is behind it; the last ones first."""
        tier = self._random.choice(self._tiers)
        held = self.held[tier]
        if not held:
            return []
        name = self._random.choice(sorted(held))
        gone = [name] if self._leaves_gaps else self._behind(name, held)
        held.difference_update(gone)
        return [BlockRemoved(block_hashes=tuple(gone), tier=tier)]

    def clear(self) -> list[Event]:
        """The cache is empty: all of its tiers."""
        for held in self.held.values():
            held.clear()
        return [AllBlocksCleared()]

    def _starts(self, path: tuple[int, ...], tier: Tier) -> list[int]:
        """Where what is stored may begin: in lower tiers behind any block that the engine has."""
        if not self._leaves_gaps or tier is Tier.DEVICE:
            return [0]
        held = set[int]().union(*self.held.values())
        return [0, *(at for at in range(1, len(path)) if path[at - 1] in held)]

    def _missing_runs(
        self, path: tuple[int, ...], first: int, end: int, held: set[int]
    ) -> Iterator[list[int]]:
        run: list[int] = []
        for name in path[first:end]:
            if name not in held:
                run.append(name)
            elif run:
                yield run
                run = []
        if run:
            yield run

    def _stored(self, run: list[int], tier: Tier) -> BlockStored:
        tokens = [token for name in run for token in self.tree.tokens_of[name]]
        return BlockStored(
            block_hashes=tuple(run),
            token_ids=tuple(tokens),
            block_size=self.tree.block_size,
            parent=self.tree.parent_of[run[0]],
            tier=tier,
        )

    def _behind(self, name: int, held: set[int]) -> list[int]:
        return [each for each in sorted(held, key=self._depth, reverse=True)
                if self._is_behind(each, name)]  # fmt: skip

    def _depth(self, name: int) -> int:
        parent = self.tree.parent_of[name]
        return 0 if parent is None else 1 + self._depth(parent)

    def _is_behind(self, name: int | None, first: int) -> bool:
        while name is not None and name != first:
            name = self.tree.parent_of[name]
        return name == first
