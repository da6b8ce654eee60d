"""Matching against plain loops: tiers, pools, holes in the middle, and every way to ask."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplug.index.block_store import BlockSpan, BlockStore
from kvplug.index.prefix_query import NO_POOLS, PrefixQuery, credits_of
from kvplug.kernels import runs
from kvplug.kernels.prefix_lengths import ANY, NUM_CLASSES
from tests.kernels import references

NUM_RANKS = 4
CREDITS = [1.0, 0.75, 0.25, 0.9]
CONFIDENCE = np.array([1.0, 0.5, 0.0, 1.0])
# Holders 0 to 11: rank h // 3 with class h % 3; holder 70 (in a second word): a pool that ranks 1
# and 3 read, holder 71: one that rank 3 reads; the rest is nobody.
POOLS = {70: [1, 3], 71: [3]}
own = {rank * 3 + each: (rank, each) for rank in range(NUM_RANKS) for each in range(3)}
holder_sets = st.frozensets(st.sampled_from([*own, *POOLS]), max_size=4)


def prefix_query(block_store):
    owner = np.full(128, -1, dtype=np.int64)
    for holder, (rank, each) in own.items():
        owner[holder] = NUM_CLASSES * rank + each
    listed = []
    for holder, ranks in POOLS.items():
        owner[holder] = -2 - len(listed)
        listed += [len(ranks), *ranks]
    return PrefixQuery(block_store, owner, np.array(listed), credits_of(CREDITS, CONFIDENCE))


def hashes_of(num_blocks, *, branch=0):
    return np.arange(1, num_blocks + 1, dtype=np.uint64) + np.uint64(1000 * branch)


def store_block(block_store, holder, hashes, block):
    parent = int(hashes[block - 1]) if block else 0
    block_store.store(holder, BlockSpan(hashes[block : block + 1], parent))


def fill(block_store, holders_of_block, hashes):
    """Blocks in order, so that every parent is there, and holders in the order of a set."""
    for block, holders in enumerate(holders_of_block):
        for holder in sorted(holders):
            store_block(block_store, holder, hashes, block)


@given(st.lists(st.tuples(holder_sets, st.integers(1, 5)), max_size=8), st.integers(0, 4))
def test_what_a_rank_holds_is_its_contiguous_prefix(spans, num_unknown):
    holders_of_block = [holders for holders, length in spans for _ in range(length)]
    if frozenset() in holders_of_block:
        holders_of_block = holders_of_block[: holders_of_block.index(frozenset())]
    hashes, block_store = hashes_of(len(holders_of_block) + num_unknown), BlockStore()
    fill(block_store, holders_of_block, hashes)
    block_store.check()
    asked = prefix_query(block_store)
    held = asked.overlap(hashes, 0.0)
    expected, credit = references.lengths(holders_of_block, own, POOLS, CREDITS, NUM_RANKS)
    assert held.prefix_lengths.tolist() == expected
    np.testing.assert_allclose(held.credit, np.array(credit) * CONFIDENCE)
    halves = [hashes, hashes[: len(hashes) // 2], hashes[:0]]
    ends = np.cumsum([len(half) for half in halves])
    many = asked.overlap_many(np.concatenate(halves), ends, 0.0)
    for each, half in zip(many, halves, strict=True):
        one = asked.overlap(half, 0.0)
        assert each.prefix_lengths.tolist() == one.prefix_lengths.tolist()
        assert each.depth.tolist() == one.prefix_lengths[ANY].tolist()
        np.testing.assert_allclose(each.credit, one.credit)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=12), st.integers(0, 40),
    st.integers(1, 40),
)  # fmt: skip
def test_holes_and_branches_are_no_part_of_a_match(removed, fork, length):
    trunk, branch = hashes_of(40), hashes_of(40, branch=1)
    block_store, reference = BlockStore(), {rank: set(range(40)) for rank in range(4)}
    for rank in range(4):
        block_store.store(rank, BlockSpan(trunk))
    if 0 < fork < 40:
        block_store.store(2, BlockSpan(branch[fork:], int(trunk[fork - 1])))
    for rank, block in removed:
        block_store.drop(rank, trunk[block : block + 1])
        reference[rank].discard(block)
    block_store.check()
    owner = np.arange(64) * NUM_CLASSES
    asked = PrefixQuery(block_store, owner, NO_POOLS, credits_of(CREDITS, np.ones(4)))
    depth = asked.overlap(trunk[:length], 0.0).depth.tolist()
    assert depth == [
        [*(block in reference[rank] for block in range(length)), False].index(False)
        for rank in range(4)
    ]


def test_a_whole_run_is_one_segment_however_it_was_stored():
    block_store, hashes = BlockStore(), hashes_of(4096)
    for holder in range(64):
        for first in range(0, 4096, 16):
            parent = int(hashes[first - 1]) if first else 0
            block_store.store(holder, BlockSpan(hashes[first : first + 16], parent))
    assert len(block_store.runs) == 1
    for first in range(4080, -1, -16):
        block_store.drop(5, hashes[first : first + 16])
    assert len(block_store.runs) == 1
    block_store.store(5, BlockSpan(hashes[:100]))
    assert len(block_store.runs) == 2
    assert block_store.runs.column(runs.START)[1:3].tolist() == [100, 0]
