"""What both sides of `make bench-ingest` know of the frames without reading them."""

import random

BLOCK_SIZE, VOCABULARY = 16, 150_000


def last_tokens(seed):
    """The tokens of the last block of a stream."""
    rng = random.Random(seed + 1_000_000)
    return [rng.randrange(VOCABULARY) for _ in range(BLOCK_SIZE)]
