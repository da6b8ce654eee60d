"""Dynamo's side of `make bench-index`: RadixTree of ai-dynamo-runtime 1.6.1, in its environment.

The tree lives on a thread of its own behind a channel; a call is a round trip. Events are JSON, one
a call: there is no call for more.
"""

import os

os.environ.setdefault("DYN_LOG", "off")

from dynamo.llm import RadixTree, compute_block_hash_for_seq

from tests.benchmarks.index_dynamo_events import encode
from tests.benchmarks.index_side import run

BLOCK_SIZE = 16


class Dynamo:
    """One tree; workers are known from their first event."""

    def __init__(self, num_workers):
        tree = RadixTree()
        self.apply, self.find = tree.apply_event, tree.find_matches

    @staticmethod
    def calls(events, events_per_call):
        """Arguments of `apply`, one call an event."""
        return ((event.worker, encode(event)) for event in events)

    @staticmethod
    def query(hashes, form):
        """Arguments of `find`: a list, as the binding takes nothing else."""
        return (hashes,)

    @staticmethod
    def hashing(tokens, form):
        """The call that hashes blocks, and its arguments."""
        return compute_block_hash_for_seq, (tokens, BLOCK_SIZE)

    @staticmethod
    def depths(answer):
        """{worker: depth}, of those with any."""
        return {worker: depth for (worker, _), depth in answer.scores.items()}

    @staticmethod
    def nbytes():
        """The tree does not say."""
        return 0


if __name__ == "__main__":
    run(Dynamo)
