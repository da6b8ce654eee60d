"""What both sides of `make bench-router` hold and are asked; runs in either environment.

In:  numbers of prompts, ranks and blocks.   Out: token ids and how many blocks each rank holds.

Rank r of R holds the first (r + 1) / R of every warm prompt, so each rank offers another depth and
only the last ones offer all. FILLER_BLOCKS other blocks, as many on each rank, make the index warm.
"""

from __future__ import annotations

from random import Random

from tests.benchmarks.splitmix import prompt, splitmix64

BLOCK_SIZE = 16
FILLER_BLOCKS = 1_000_000
BLOCKS_PER_CHAIN = 512
NUM_PROMPTS = {512: 64, 4096: 64, 32768: 4}
"""Prompts by their length, asked in turn."""

_NUMBER_OF_FIRST = {512: 1000, 4096: 2000, 32768: 3000}


def warm_prompts(num_tokens: int) -> list[list[int]]:
    """The prompts of this length of which every rank holds a part."""
    first = _NUMBER_OF_FIRST[num_tokens]
    return [prompt(first + i, num_tokens) for i in range(NUM_PROMPTS[num_tokens])]


def held_blocks(num_tokens: int, rank: int, num_ranks: int) -> int:
    """How many blocks of a warm prompt of this length the rank holds."""
    return num_tokens // BLOCK_SIZE * (rank + 1) // num_ranks


def chain_lengths(num_ranks: int, num_blocks: int = FILLER_BLOCKS) -> list[int]:
    """Blocks of each of the chains that fill one rank."""
    whole, rest = divmod(num_blocks // num_ranks, BLOCKS_PER_CHAIN)
    return [BLOCKS_PER_CHAIN] * whole + ([rest] if rest else [])


def marker(rank: int) -> list[int]:
    """The tokens of the block that a rank stores last."""
    return prompt(4000 + rank, BLOCK_SIZE)


def cache_blocks(num_ranks: int, num_blocks: int = FILLER_BLOCKS) -> int:
    """What the fullest rank holds, which is what the caches of all have room for."""
    warm = sum(count * (tokens // BLOCK_SIZE) for tokens, count in NUM_PROMPTS.items())
    return sum(chain_lengths(num_ranks, num_blocks)) + warm + 1


def cold_prompt(number: int, num_tokens: int) -> list[int]:
    """A prompt of which nobody holds anything."""
    return Random(splitmix64(number)).choices(range(32_000), k=num_tokens)
