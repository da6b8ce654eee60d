"""Dynamo's side of `make bench-index`: RadixTree of ai-dynamo-runtime 1.6.1, in its environment.

The tree lives on a thread of its own behind a channel; a call is a round trip. Events are JSON, one
a call: there is no call for more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

os.environ.setdefault("DYN_LOG", "off")

from dynamo.llm import RadixTree, compute_block_hash_for_seq

from tests.benchmarks.index_dynamo_events import encode
from tests.benchmarks.index_side import Arguments, Call, run
from tests.benchmarks.index_workload import Event

BLOCK_SIZE = 16


class Dynamo:
    """One tree; workers are known from their first event."""

    def __init__(self, num_workers: int) -> None:
        tree = RadixTree()
        self.apply: Callable[[int, bytes], object] = tree.apply_event
        self.find: Callable[[list[int]], Any] = tree.find_matches

    @staticmethod
    def calls(events: Iterable[Event], events_per_call: int) -> Iterator[Call]:
        """Arguments of `apply`, one call an event."""
        return ((event.worker, encode(event)) for event in events)

    @staticmethod
    def query(hashes: list[int], form: str) -> Arguments:
        """Arguments of `find`: a list, as the binding takes nothing else."""
        return (hashes,)

    @staticmethod
    def hashing(tokens: list[int], form: str) -> tuple[Callable[..., Any], Arguments]:
        """The call that hashes blocks, and its arguments."""
        return compute_block_hash_for_seq, (tokens, BLOCK_SIZE)

    def depths(self, answer: Any) -> dict[int, int]:
        """{worker: depth}, of those with any."""
        return {worker: depth for (worker, _), depth in answer.scores.items()}

    def nbytes(self) -> int:
        """The tree does not say."""
        return 0


if __name__ == "__main__":
    run(Dynamo)
