from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplug.index.hash_table import HashTable
from kvplug.kernels import active_blocks

NUM_RANKS = 3
# A sequence hash stands for a whole prefix: here the number with the digits of its blocks.
prompts = st.lists(st.integers(1, 3), max_size=40).map(
    lambda blocks: [int("".join(map(str, blocks[: i + 1]))) % 2**61 for i in range(len(blocks))]
)
steps = st.lists(st.tuples(st.integers(0, NUM_RANKS - 1), prompts, st.booleans()), max_size=12)


def u64(numbers):
    return np.array(numbers, dtype=np.uint64)


@given(steps, prompts)
def test_blocks_count_once_per_rank_as_long_as_any_request_has_them(steps, asked):
    table, live = HashTable(), []
    counts = [Counter() for _ in range(NUM_RANKS)]
    for rank, prompt, ends in steps:
        table.reserve(len(prompt))
        num_new = active_blocks.enter(table.slots, u64(prompt), rank)
        assert num_new == len(set(prompt) - set(counts[rank]))
        counts[rank] += Counter(prompt)
        live.append((rank, prompt))
        if ends:
            over, gone = live.pop(0)
            counts[over] -= Counter(gone)
            left = len(set(gone) - set(counts[over]))
            assert active_blocks.leave(table.slots, u64(gone), over) == left
    depths = np.empty(NUM_RANKS, dtype=np.int64)
    active_blocks.fill_shared(table.slots, u64(asked), depths)
    assert depths.tolist() == [[*(h in c for h in asked), False].index(False) for c in counts]
    assert len(table) == sum(map(len, counts))
    table.check()


def num_exclusive(prompt, counts):
    """From the last block on, as long as the count is 1."""
    own = [counts[block] == 1 for block in reversed(prompt)]
    return [*own, False].index(False)


@given(st.lists(st.tuples(st.integers(0, NUM_RANKS - 1), prompts), min_size=1, max_size=12))
def test_the_last_blocks_that_only_one_request_has(requests):
    table, counts = HashTable(), [Counter() for _ in range(NUM_RANKS)]
    for rank, prompt in requests:
        table.reserve(len(prompt))
        active_blocks.enter(table.slots, u64(prompt), rank)
        counts[rank] += Counter(prompt)
    for rank, prompt in requests:
        num_own = active_blocks.num_exclusive(table.slots, u64(prompt), rank)
        assert num_own == num_exclusive(prompt, counts[rank])


def test_a_long_prompt_is_entered_and_left_whole():
    table, prompt = HashTable(), np.arange(1, 5001, dtype=np.uint64) * np.uint64(2**40 + 1)
    table.reserve(2 * len(prompt))
    assert active_blocks.enter(table.slots, prompt, 0) == 5000
    assert active_blocks.enter(table.slots, prompt[:3000], 0) == 0
    assert active_blocks.enter(table.slots, prompt, 1) == 5000
    assert active_blocks.leave(table.slots, prompt, 0) == 2000
    depths = np.empty(2, dtype=np.int64)
    active_blocks.fill_shared(table.slots, prompt, depths)
    assert depths.tolist() == [3000, 5000]
