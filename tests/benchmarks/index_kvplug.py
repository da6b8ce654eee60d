"""kvplug's side of `make bench-index`: BlockIndex, from packed events."""

from functools import partial
from itertools import groupby, islice

import numpy as np

from kvplug import Rank, packed
from kvplug.hashing import as_tokens
from tests.benchmarks.index_side import run
from tests.benchmarks.index_standin import Index, block_hashes
from tests.benchmarks.index_workload import Stored

BLOCK_SIZE = 16


class Kvplug:
    """One index that follows as many workers."""

    def __init__(self, num_workers):
        self.index = Index(block_size=BLOCK_SIZE)
        self._numbers = [self.index.add_rank(rank_of(worker)) for worker in range(num_workers)]
        self.apply, self.find = self.index.apply_packed, self.index.overlap

    @staticmethod
    def calls(events, events_per_call):
        """Arguments of `apply`: up to `events_per_call` of one worker in a payload."""
        for worker, own in groupby(events, key=lambda event: event.worker):
            packable = map(as_packed, own)
            while some := list(islice(packable, events_per_call)):
                yield rank_of(worker), packed.encode(some)

    @staticmethod
    def query(hashes, form):
        """Arguments of `find`, from a list or an array of u64."""
        return (hashes if form == "list" else np.array(hashes, dtype=np.uint64), 0.0)

    @staticmethod
    def hashing(tokens, form):
        """The call that hashes blocks, and its arguments."""
        given = tokens if form == "list" else np.array(tokens, dtype=np.uint32)
        return partial(_hash_blocks, block_hashes(BLOCK_SIZE)), (given,)

    def depths(self, answer):
        """{worker: depth}, of those with any."""
        depths = answer.depth[self._numbers].tolist()
        return {worker: depth for worker, depth in enumerate(depths) if depth}

    def nbytes(self):
        """Of every table."""
        return self.index.nbytes


def rank_of(worker):
    """Its only rank."""
    return Rank(f"w{worker}")


def as_packed(event):
    """The event in kvplug's words."""
    if isinstance(event, Stored):
        return packed.PackedStored(event.names, event.hashes, parent=event.parent)
    return packed.PackedRemoved(event.names)


def _hash_blocks(function, tokens):
    return function(as_tokens(tokens))


if __name__ == "__main__":
    run(Kvplug)
