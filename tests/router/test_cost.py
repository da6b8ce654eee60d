"""One call of a kernel says what the steps say one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplug import BlockStored, EventBatch, Rank, Tier
from kvplug.hashing import as_tokens
from kvplug.index.block_index import BlockIndex
from kvplug.router.cost import cost_per_rank, price
from kvplug.router.load import ActiveLoad, ActiveRequest

RANKS = [Rank("a"), Rank("b"), Rank("b", 1)]
prompts = st.lists(st.integers(1, 2), max_size=24).map(tuple)
numbers, tiers = st.integers(0, 2), st.sampled_from(list(Tier))
stores = st.lists(st.tuples(numbers, tiers, prompts), max_size=6)
requests = st.lists(st.tuples(numbers, prompts), max_size=4)


def names(content, size):
    return tuple(hash(content[: i + size]) % 2**64 for i in range(0, len(content) - size + 1, size))


def index_with(block_size, stored):
    index = BlockIndex(block_size)
    for rank in RANKS:
        index.add_rank(rank)
    for number, tier, content in stored:
        whole = content[: len(content) // block_size * block_size]
        event = BlockStored(
            block_hashes=names(whole, block_size), token_ids=whole, block_size=block_size, tier=tier
        )
        index.apply(RANKS[number], EventBatch(events=(event,)))
    return index


@given(st.sampled_from([1, 2, 5]), stores, requests, stores, prompts, st.floats(0, 3))
def test_the_steps_one_by_one_and_all_at_once(size, stored, live, expected, prompt, weight):
    index, load = index_with(size, stored), ActiveLoad(60.0)
    index.set_worth(RANKS[1], 0.5)
    for number, _, content in expected:
        hashes = index.hasher.sequence_hashes(as_tokens(content))
        index.speculative.insert(number, hashes, 0.0)
    for number, (rank, content) in enumerate(live):
        hashes = index.hasher.sequence_hashes(as_tokens(content))
        load.start(str(number), ActiveRequest(rank, hashes, len(content), 60.0))
    tokens = as_tokens(prompt)
    priced = price(tokens, 1337, index, load, 1.0, weight)
    hashes = index.hasher.sequence_hashes(tokens)
    overlap = index.overlap(hashes, 1.0)
    costs = cost_per_rank(len(tokens), size, overlap, load.of(hashes, 3), weight)
    assert priced.hashes.tolist() == hashes.tolist()
    assert priced.overlap.depth.tolist() == overlap.depth.tolist()
    np.testing.assert_allclose(priced.overlap.credit, overlap.credit)
    np.testing.assert_allclose(priced.costs, costs)
