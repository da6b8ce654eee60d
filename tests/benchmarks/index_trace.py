"""What a fleet with prefix caches makes of a Mooncake trace: queries, stored and removed blocks.

In:  JSON lines with `hash_ids`, one per request and each for a whole prefix of 512 tokens.
Out: operations on block numbers.

Each id is taken for four blocks of 128 tokens. Request i goes to worker (i * 2654435761 >> 16) % 8.
A worker is a cache of 16,384 blocks: a request asks for all of its blocks, stores those that are
missing behind those that are there, touches them from its last to its first, so that ends of
sequences are evicted before their beginnings, and removes what is too much in one event.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.index_workload import Removed, Stored, hash_of, name_of

NUM_WORKERS, BLOCKS_PER_ID, CAPACITY = 8, 4, 16_384
FILES = {
    "conversation": "conversation_trace.jsonl",
    "synthetic": "synthetic_trace.jsonl",
}
EXPECTED = {"conversation": [894_560, 366_408], "synthetic": [649_608, 287_076]}
"""Over all queries: the sum of all workers' depths, and of the deepest."""

QUERY, STORED, REMOVED = range(3)


class Operation(NamedTuple):
    """kind: QUERY, STORED (behind block `parent`, 0: at the start) or REMOVED; `blocks` by number,
    from 1."""

    kind: int
    worker: int
    parent: int
    blocks: list[int]


class Asked(NamedTuple):
    """A request."""

    hashes: list[int]


class Cache:
    """One worker's blocks, the next to be evicted first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def num_cached(self, blocks: list[int]) -> int:
        """How many leading blocks are there."""
        for place, block in enumerate(blocks):
            if block not in self.blocks:
                return place
        return len(blocks)

    def add(self, blocks: list[int]) -> None:
        """Store blocks."""
        self.blocks.update(dict.fromkeys(blocks))

    def touch(self, blocks: list[int]) -> None:
        """They are used: the first becomes the last to go."""
        for block in reversed(blocks):
            if block in self.blocks:
                self.blocks.move_to_end(block)

    def evict(self) -> list[int]:
        """What is too much, oldest first."""
        excess = max(0, len(self.blocks) - self.capacity)
        return [self.blocks.popitem(last=False)[0] for _ in range(excess)]


def operations(
    requests: Iterable[list[int]],
    num_workers: int = NUM_WORKERS,
    blocks_per_id: int = BLOCKS_PER_ID,
    capacity: int = CAPACITY,
) -> list[Operation]:
    """Of requests, each a list of ids."""
    caches = [Cache(capacity) for _ in range(num_workers)]
    result: list[Operation] = []
    for number, ids in enumerate(requests):
        worker = (number * 2654435761 >> 16) % num_workers
        blocks = [id_ * blocks_per_id + part + 1 for id_ in ids for part in range(blocks_per_id)]
        result.append(Operation(QUERY, worker, 0, blocks))
        result += _served(caches[worker], worker, blocks)
    return result


def _served(cache: Cache, worker: int, blocks: list[int]) -> Iterator[Operation]:
    start = cache.num_cached(blocks)
    missing = blocks[start:]
    # Blocks behind a gap are not stored again: rare, because ends are evicted first.
    if missing and not any(block in cache.blocks for block in missing):
        cache.add(missing)
        yield Operation(STORED, worker, blocks[start - 1] if start else 0, missing)
    cache.touch(blocks)
    evicted = cache.evict()
    if evicted:
        yield Operation(REMOVED, worker, 0, evicted)


def read_requests(path: Path) -> list[list[int]]:
    """The ids of each request of a trace."""
    with path.open() as lines:
        return [list(json.loads(line)["hash_ids"]) for line in lines]


def as_events(ops: Iterable[Operation]) -> Iterator[Asked | Stored | Removed]:
    """Asked, Stored and Removed, with the blocks' hashes."""
    hashes, names = _Memo(hash_of), _Memo(name_of)
    for kind, worker, parent, blocks in ops:
        if kind == QUERY:
            yield Asked([hashes[b] for b in blocks])
        elif kind == REMOVED:
            yield Removed(worker, [names[b] for b in blocks])
        else:
            before = names[parent] if parent else None
            yield Stored(worker, before, [names[b] for b in blocks], [hashes[b] for b in blocks])


class _Memo(dict[int, int]):
    """function(block), each computed once."""

    def __init__(self, function: Callable[[int], int]) -> None:
        self._function = function

    def __missing__(self, block: int) -> int:
        self[block] = number = self._function(block)
        return number
