"""The keys of a prompt's multimodal items, block by block, as vLLM's events have them.

In:  where each item is in the prompt, and its identifier.
Out: 64-bit keys of each block; none behind the last item.

Read against vLLM 0.32.0, v1/core/kv_cache_utils.py (`_gen_mm_extra_hash_keys`): a block has the key
of every item of which it contains a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvplug.wire import extra_key


class Item(NamedTuple):
    """An image or a sound: `num_tokens` tokens of the prompt from `first` on stand for it."""

    identifier: str
    first: int
    num_tokens: int


def block_keys(items: Sequence[Item], block_size: int) -> list[list[int]]:
    """Of each block up to the last with an item, sorted; SkipError for what is no identifier."""
    last = max((item.first + item.num_tokens for item in items), default=0)
    keys: list[list[int]] = [[] for _ in range(-(-last // block_size))]
    for item in items:
        end = item.first + item.num_tokens
        for block in range(item.first // block_size, -(-end // block_size)):
            keys[block].append(extra_key(item.identifier))
    return [sorted(each) for each in keys]
