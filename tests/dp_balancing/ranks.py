"""Two data-parallel ranks without an engine: real publishers, over ipc, on kvplug's own wire.

In:  a folder.   Out: the streams of the ranks; they store what a test tells them.
"""

from itertools import count

from kvplug import KvEventPublisher
from kvplug.dp_balancing.rank_streams import RankStream
from tests.plugins.stock_client import wait_until

BLOCK_SIZE = 4


class Ranks:
    """store, kill, stop; read `streams`."""

    def __init__(self, folder, num_ranks=2, *, first_rank=0, keys=None):
        self._names = count(1)
        self.publishers = [
            KvEventPublisher(
                f"ipc://{folder}/events_{rank}",
                kv_block_size=BLOCK_SIZE,
                dp_rank=first_rank + rank,
                dp_size=first_rank + num_ranks,
                answers_at=f"ipc://{folder}/answers_{rank}",
                keys=keys,
            )
            for rank in range(num_ranks)
        ]
        self.streams = [
            RankStream(engine_rank=first_rank + rank, events=each.endpoint, replay=each.answers_at)
            for rank, each in enumerate(self.publishers)
        ]

    def store(self, rank, tokens, **details):
        """Full blocks of the tokens."""
        num_blocks = len(tokens) // BLOCK_SIZE
        names = [next(self._names) for _ in range(num_blocks)]
        kept = tokens[: num_blocks * BLOCK_SIZE]
        sizes = [BLOCK_SIZE] * num_blocks
        self.publishers[rank].publish_stored(
            token_ids=kept, num_block_tokens=sizes, block_hashes=names, **details
        )

    def stop(self):
        for publisher in self.publishers:
            publisher.shutdown()


def until_held(chooser, tokens, num_blocks, **space):
    """Wait until some rank is known to hold so many blocks of the tokens."""

    def is_held():
        decision = chooser.router.peek(tokens, **space)
        return decision.overlap_blocks == num_blocks

    wait_until(is_held, "the blocks are known")
