"""kvplug's side of `make bench-index`: BlockIndex, from packed events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby, islice
from typing import Any

import numpy as np

from kvplug import Rank, packed
from kvplug.hashing import BlockHasher, Hashes, Tokens, TokensLike, as_tokens
from kvplug.index.block_index import BlockIndex
from kvplug.index.prefix_query import Overlap
from tests.benchmarks.index_side import Arguments, Call, run
from tests.benchmarks.index_workload import Event, Stored

BLOCK_SIZE = 16


class Kvplug:
    """One index that follows as many workers."""

    def __init__(self, num_workers: int) -> None:
        self.index = BlockIndex(BLOCK_SIZE)
        self._numbers = [self.index.add_rank(rank_of(worker)) for worker in range(num_workers)]
        self.apply: Callable[[Rank, bytes], object] = self.index.apply_packed
        self.find: Callable[..., Overlap] = self.index.overlap

    @staticmethod
    def calls(events: Iterable[Event], events_per_call: int) -> Iterator[Call]:
        """Arguments of `apply`: up to `events_per_call` of one worker in a payload."""
        for worker, own in groupby(events, key=lambda event: event.worker):
            packable = map(as_packed, own)
            while some := list(islice(packable, events_per_call)):
                yield rank_of(worker), packed.encode(some)

    @staticmethod
    def query(hashes: list[int], form: str) -> Arguments:
        """Arguments of `find`, from a list or an array of u64."""
        return (hashes if form == "list" else np.array(hashes, dtype=np.uint64), 0.0)

    @staticmethod
    def hashing(tokens: list[int], form: str) -> tuple[Callable[..., Any], Arguments]:
        """The call that hashes blocks, and its arguments."""
        given = tokens if form == "list" else np.array(tokens, dtype=np.uint32)
        return partial(_hash_blocks, BlockHasher(BLOCK_SIZE).block_hashes), (given,)

    def depths(self, answer: Overlap) -> dict[int, int]:
        """{worker: depth}, of those with any."""
        depths = answer.depth[self._numbers].tolist()
        return {worker: depth for worker, depth in enumerate(depths) if depth}

    def nbytes(self) -> int:
        """Of every table."""
        return int(self.index.nbytes)


def rank_of(worker: int) -> Rank:
    """Its only rank."""
    return Rank(f"w{worker}")


def as_packed(event: Event) -> packed.PackedEvent:
    """The event in kvplug's words."""
    if isinstance(event, Stored):
        return packed.PackedStored(event.names, event.hashes, parent=event.parent)
    return packed.PackedRemoved(event.names)


def _hash_blocks(function: Callable[[Tokens], Hashes], tokens: TokensLike) -> Hashes:
    return function(as_tokens(tokens))


if __name__ == "__main__":
    run(Kvplug)
