"""Which blocks each request has: hits, allocation, freeing.

In:  requests and how many tokens a step will compute.   Out: allocated or not; cached tokens.

It does what KVCacheManager of vLLM 0.32 does (v1/core/kv_cache_manager.py) for one full-attention
group without speculative decoding and connectors. Blocks count as cached from the moment at which
the step that fills them is scheduled, so requests later in that step find them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvplug.events import BlockStored, Event, Namespace
from kvplug.sim.pool import BlockPool
from kvplug.sim.request import Request
from kvplug.vllm_hashes import event_id


class KvCache:
    """find_hits, then allocate for as many steps as the request lives, then free."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size, self.max_model_len = block_size, max_model_len
        self._blocks: dict[Request, list[int]] = {}
        self._num_cached: dict[Request, int] = {}  # leading blocks of the request that are cached
        self.num_queried_tokens = self.num_hit_tokens = 0

    def __contains__(self, request: Request) -> bool:
        """Whether the request has been given blocks."""
        return request in self._blocks

    def find_hits(self, request: Request) -> list[int]:
        """The cached blocks that the request begins with.

        Its last token is computed in any case, for its logits, so a prompt whose blocks are all
        cached loses its last one.
        """
        hits: list[int] = []
        max_hits = (request.num_tokens - 1) // self.block_size
        for block_hash in islice(request.block_hashes, max_hits):
            block = self.pool.find(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def allocate(
        self,
        request: Request,
        num_new_tokens: int,
        hits: Sequence[int] = (),
        *,
        whole_must_fit: bool = False,
    ) -> bool:
        """Make room for the next tokens and cache the blocks that they fill; False if full.

        `whole_must_fit` refuses a request of which a later chunk would find no room.
        """
        num_computed = request.num_computed + len(hits) * self.block_size
        if whole_must_fit and self._num_needed(request, request.num_tokens, hits) > self.num_free:
            return False
        num_tokens = num_computed + num_new_tokens
        if self._num_needed(request, num_tokens, hits) > self.num_free:
            return False
        blocks = self._blocks.setdefault(request, [])
        self._adopt(request, blocks, hits)
        blocks += self.pool.take(max(0, self._num_blocks(num_tokens) - len(blocks)))
        self._cache_full_blocks(request, blocks, min(num_tokens, request.num_tokens))
        return True

    def free(self, request: Request) -> None:
        """Give the request's blocks back, the last one to be evicted first."""
        self.pool.release(reversed(self._blocks.pop(request, [])))
        self._num_cached.pop(request, None)

    def count_lookup(self, request: Request, num_hit_tokens: int) -> None:
        """Count a lookup that led to an admission; those after a preemption do not count."""
        if not request.num_preemptions:
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += num_hit_tokens

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return self.pool.num_free

    def blocks_of(self, request: Request) -> tuple[int, ...]:
        """The physical blocks of a request, in the order of its tokens."""
        return tuple(self._blocks.get(request, ()))

    def take_events(self) -> tuple[Event, ...]:
        """What was stored, removed and cleared since the last call."""
        return self.pool.take_events()

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-min(num_tokens, self.max_model_len) // self.block_size)

    def _num_needed(self, request: Request, num_tokens: int, hits: Sequence[int]) -> int:
        """Free blocks that it takes: new ones, and hits that nobody else keeps from eviction."""
        held = len(hits) + len(self._blocks.get(request, ()))
        num_free_hits = sum(map(self.pool.is_free, hits))
        return max(0, self._num_blocks(num_tokens) - held) + num_free_hits

    def _adopt(self, request: Request, blocks: list[int], hits: Sequence[int]) -> None:
        if hits:
            self.pool.touch(hits)
            blocks += hits
            self._num_cached[request] = len(hits)

    def _cache_full_blocks(self, request: Request, blocks: list[int], num_tokens: int) -> None:
        first, end = self._num_cached.get(request, 0), num_tokens // self.block_size
        if first >= end:
            return
        self.pool.cache(blocks[first:end], request.block_hashes[first:end])
        self.pool.events.append(self._stored(request, first, end))
        self._num_cached[request] = end

    def _stored(self, request: Request, first: int, end: int) -> BlockStored:
        hashes, size = request.block_hashes, self.block_size
        return BlockStored(
            block_hashes=tuple(map(event_id, hashes[first:end])),
            token_ids=tuple(request.token_ids[first * size : end * size]),
            block_size=size,
            parent=event_id(hashes[first - 1]) if first else None,
            namespace=_published_namespace(request, first),
        )


def _published_namespace(request: Request, first: int) -> Namespace | None:
    """Name the salt only with the first block, as vLLM does: later ones inherit it."""
    return None if first and not request.lora else request.namespace
