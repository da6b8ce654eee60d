"""The work of `make bench-index` in plain Python, so that each side makes the same for itself.

In:  chain numbers.   Out: events of the numbers' splitmix64.

A chain is a sequence of blocks. Block `place` of chain `chain` has an engine hash ("name"), by
which parents and removals are named, and a hash of what is in it, by which requests ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.benchmarks.splitmix import splitmix64

CHAIN_BLOCKS = 2048
NOISE_CHAINS, NOISE_BLOCKS = 8, 512
BRANCH_BLOCKS = 64
BUILD_BLOCKS = 128  # an event, where building is not what is measured
_HASH, _NAME = 0x1111 << 48, 0x2222 << 48


class Stored(NamedTuple):
    """Consecutive blocks; `parent` is the name before the first, None at the start of a chain."""

    worker: int
    parent: int | None
    names: list[int]
    hashes: list[int]


class Removed(NamedTuple):
    """Blocks that are gone, deepest first."""

    worker: int
    names: list[int]


Event = Stored | Removed


class Held(NamedTuple):
    """What workers hold before they are asked, and the right answer: {worker: depth}."""

    events: list[Stored]
    query: list[int]
    depths: dict[int, int]


class Chain:
    """The blocks of one chain, behind `parent`."""

    def __init__(
        self, number: int, num_blocks: int = CHAIN_BLOCKS, parent: int | None = None
    ) -> None:
        self.parent = parent
        self.names = [name_of(number << 24 ^ place) for place in range(num_blocks)]
        self.hashes = [hash_of(number << 24 ^ place) for place in range(num_blocks)]

    def stored(
        self, worker: int, blocks_per_event: int, num_blocks: int | None = None
    ) -> Iterator[Stored]:
        """The first `num_blocks` of it."""
        end = len(self.names) if num_blocks is None else num_blocks
        for first in range(0, end, blocks_per_event):
            run = slice(first, min(first + blocks_per_event, end))
            parent = self.names[first - 1] if first else self.parent
            yield Stored(worker, parent, self.names[run], self.hashes[run])

    def removed(self, worker: int, blocks_per_event: int) -> Iterator[Removed]:
        """All of it, from its end."""
        names = self.names[::-1]
        for first in range(0, len(names), blocks_per_event):
            yield Removed(worker, names[first : first + blocks_per_event])


def name_of(block: int) -> int:
    """The engine hash of a block by its number."""
    return splitmix64(_NAME ^ block)


def hash_of(block: int) -> int:
    """What a request asks for, by the block's number."""
    return splitmix64(_HASH ^ block)


def stores(num_chains: int, num_workers: int, blocks_per_event: int) -> list[Stored]:
    """All workers store the same chains, one worker after the other."""
    chains = [Chain(number) for number in range(num_chains)]
    return [
        event
        for worker in range(num_workers)
        for chain in chains
        for event in chain.stored(worker, blocks_per_event)
    ]


def removals(num_chains: int, blocks_per_event: int) -> list[Removed]:
    """Worker 0 removes these chains."""
    return [
        event
        for number in range(num_chains)
        for event in Chain(number).removed(0, blocks_per_event)
    ]


def held(shape: str, num_workers: int, num_blocks: int) -> Held:
    """`all` hold the whole query; `staggered`: worker w its first (w + 1) / num_workers;
    `branching`: then a branch of its own, too. Noise chains are held by some.
    """
    asked = Chain(0, num_blocks)
    depths: dict[int, int] = {}
    events: list[Stored] = []
    for number in range(1, NOISE_CHAINS + 1):
        noise = Chain(number, NOISE_BLOCKS)
        events += noise.stored(number % num_workers, BUILD_BLOCKS)
    for worker in range(num_workers):
        depth = num_blocks if shape == "all" else num_blocks * (worker + 1) // num_workers
        events += asked.stored(worker, BUILD_BLOCKS, depth)
        depths[worker] = depth
        if shape == "branching":
            branch = Chain(1000 + worker, BRANCH_BLOCKS, parent=asked.names[depth - 1])
            events += branch.stored(worker, BUILD_BLOCKS)
    return Held(events, asked.hashes, depths)


def fill(num_blocks: int, num_workers: int) -> Iterator[list[Stored]]:
    """`num_blocks` unique blocks, each held by all workers; one list of events per chain."""
    for number, first in enumerate(range(0, num_blocks, CHAIN_BLOCKS)):
        chain = Chain(number, min(CHAIN_BLOCKS, num_blocks - first))
        yield [e for w in range(num_workers) for e in chain.stored(w, BUILD_BLOCKS)]
