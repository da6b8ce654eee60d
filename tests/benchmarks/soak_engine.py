"""A simulated prefix cache that makes `make soak-index` its events.

In:  conversations.   Out: Stored and Removed events, and what the cache holds.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from typing import NamedTuple

from tests.benchmarks.index_workload import Removed, Stored, hash_of, name_of

NUM_PREFIXES, PREFIX_BLOCKS = 24, 96
NUM_RECENT = 400
MIN_TURN, MAX_TURN = 8, 48
MAX_BLOCKS = 512
NEW_SHARE = 0.3


class Conversation(NamedTuple):
    """Blocks from the first on: what engines call them, and what they are asked for by."""

    names: list[int]
    hashes: list[int]


class Conversations:
    """New ones begin with one of a few prefixes; others go on from an interior point of a recent
    one, by blocks that nobody has seen: a branch.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._num_blocks = 0
        nothing = Conversation([], [])
        self._prefixes = [self._grown(nothing, PREFIX_BLOCKS) for _ in range(NUM_PREFIXES)]
        self._recent: deque[Conversation] = deque(self._prefixes, maxlen=NUM_RECENT)

    def next(self) -> Conversation:
        """The next request."""
        rng = self._rng
        pool = self._prefixes if rng.random() < NEW_SHARE else self._recent
        before = pool[rng.randrange(len(pool))]
        num_kept = min(rng.randint(1, len(before.names)), MAX_BLOCKS - MAX_TURN)
        kept = Conversation(before.names[:num_kept], before.hashes[:num_kept])
        self._recent.append(self._grown(kept, rng.randint(MIN_TURN, MAX_TURN)))
        return self._recent[-1]

    def unseen(self, num_blocks: int) -> Conversation:
        """One that shares nothing with any other."""
        return self._grown(Conversation([], []), num_blocks)

    def _grown(self, before: Conversation, num_blocks: int) -> Conversation:
        blocks = range(self._num_blocks, self._num_blocks + num_blocks)
        self._num_blocks += num_blocks
        names, hashes = [name_of(b) for b in blocks], [hash_of(b) for b in blocks]
        return Conversation(before.names + names, before.hashes + hashes)


class Engine:
    """One worker's blocks by name, the next to be evicted first.

    A request touches its blocks from the last to the first, so ends go before beginnings: whatever
    is there, its parent is there.
    """

    def __init__(self, worker: int, capacity: int) -> None:
        self.worker, self.capacity = worker, capacity
        self.names: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.names)

    def num_cached(self, conversation: Conversation) -> int:
        """How many leading blocks of it are there."""
        for place, name in enumerate(conversation.names):
            if name not in self.names:
                return place
        return len(conversation.names)

    def serve(self, conversation: Conversation) -> list[Stored | Removed]:
        """Store what is missing, evict what is too much."""
        names, hashes = conversation
        start = self.num_cached(conversation)
        events: list[Stored | Removed] = []
        if start < len(names):
            parent = names[start - 1] if start else None
            events.append(Stored(self.worker, parent, names[start:], hashes[start:]))
        for name in reversed(names):
            self.names[name] = None
            self.names.move_to_end(name)
        excess = max(0, len(self.names) - self.capacity)
        if excess:
            evicted = [self.names.popitem(last=False)[0] for _ in range(excess)]
            events.append(Removed(self.worker, evicted))
        return events

    def forget(self) -> None:
        """Everything is gone."""
        self.names.clear()
