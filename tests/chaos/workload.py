"""Prompts that overflow an engine's cache.

In:  an engine, a seed.   Out: requests with shared prefixes, duplicates that start together (stored
twice), generated blocks; evictions all the time.
"""

from random import Random

from tests.chaos.engines import BLOCK_SIZE

_FIRST_TOKEN, _END_TOKEN = 10, 4000  # of the tiny model's vocabulary, without its special tokens


class Workload:
    """round: some messages with much in them; tick: one message at least."""

    def __init__(self, engine, seed):
        self._engine, self._random = engine, Random(seed)
        self._prefixes = [self._tokens(256) for _ in range(6)]

    def round(self):
        tail = self._tokens(self._random.randrange(1, 90))
        reference = self._tokens(160)
        prompts = [self._random.choice(self._prefixes) + tail, reference, reference]
        self._engine.complete(prompts, max_tokens=self._random.choice([1, 1, 1, 40]))

    def tick(self):
        """A new block; it makes an engine publish, whatever it did before."""
        self._engine.complete([self._tokens(BLOCK_SIZE + 1)])

    def _tokens(self, count):
        return [self._random.randrange(_FIRST_TOKEN, _END_TOKEN) for _ in range(count)]
