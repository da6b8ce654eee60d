"""The physical blocks of a KV cache: who uses them, what they hold, which one goes next.

In:  blocks taken, touched, filled and given back.   Out: block numbers; events, in order.

It does what vLLM 0.32 does (v1/core/block_pool.py) for one full-attention group. A block is in use
(references above zero) or in the free queue; in either state it may be cached, that is, found by
its hash. Free blocks are taken from the front of the queue: those that hold nothing are put back
there, cached ones at the end, so what was used longest ago is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvplug.events import AllBlocksCleared, BlockRemoved, Event
from kvplug.vllm_hashes import event_id

NULL_BLOCK = 0
"""vLLM keeps the first block as a placeholder: it is never used and never freed."""


class BlockPool:
    """Blocks 1 to num_blocks - 1; `events` are those since the last take_events()."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.events: list[Event] = []
        self._num_references = [0] * num_blocks
        self._hash_of_block: list[bytes | None] = [None] * num_blocks
        # Of several blocks with one hash, the first that was cached is found. A dict keeps order.
        self._blocks_of_hash: dict[bytes, dict[int, None]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, cached or not."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The part of the blocks in use, 0 to 1."""
        return 1.0 - len(self._free) / (self.num_blocks - 1)

    def find(self, block_hash: bytes) -> int | None:
        """A block that holds this content."""
        blocks = self._blocks_of_hash.get(block_hash)
        return next(iter(blocks)) if blocks else None

    def is_free(self, block: int) -> bool:
        """Whether nobody uses it, so that it may be evicted."""
        return not self._num_references[block]

    def take(self, num_blocks: int) -> list[int]:
        """Blocks for new content; what they held is evicted. There must be as many free ones."""
        taken = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in taken:
            self._evict(block)
            self._num_references[block] = 1
        return taken

    def touch(self, blocks: Iterable[int]) -> None:
        """One more request uses these."""
        for block in blocks:
            if not self._num_references[block]:
                del self._free[block]
            self._num_references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One request less uses these; the first of them will be evicted first."""
        empty = []
        for block in blocks:
            self._num_references[block] -= 1
            if self._num_references[block]:
                continue
            if self._hash_of_block[block] is None:
                empty.append(block)
            else:
                self._free[block] = None
        for block in reversed(empty):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def cache(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """From now on these blocks are found by these hashes. The caller tells the world."""
        for block, block_hash in zip(blocks, hashes, strict=True):
            self._hash_of_block[block] = block_hash
            self._blocks_of_hash.setdefault(block_hash, {})[block] = None

    def reset(self) -> bool:
        """Forget all content; refused while a block is in use."""
        if self.num_free != self.num_blocks - 1:
            return False
        self._blocks_of_hash.clear()
        self._hash_of_block = [None] * self.num_blocks
        self.events.append(AllBlocksCleared())
        return True

    def take_events(self) -> tuple[Event, ...]:
        """The events since the last call, in the order in which they happened."""
        events, self.events = tuple(self.events), []
        return events

    def eviction_order(self) -> list[int]:
        """The free blocks, the next to be taken first."""
        return list(self._free)

    def num_references(self, block: int) -> int:
        """How many requests use it."""
        return self._num_references[block]

    def cached_hashes(self) -> dict[bytes, list[int]]:
        """What is cached, and in which blocks."""
        return {block_hash: list(blocks) for block_hash, blocks in self._blocks_of_hash.items()}

    def _evict(self, block: int) -> None:
        block_hash = self._hash_of_block[block]
        if block_hash is None:
            return
        self._hash_of_block[block] = None
        copies = self._blocks_of_hash[block_hash]
        del copies[block]
        if not copies:
            del self._blocks_of_hash[block_hash]
        # Published although another copy may be left, as vLLM does.
        self.events.append(BlockRemoved(block_hashes=(event_id(block_hash),)))
