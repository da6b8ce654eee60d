"""Matching against plain loops: tiers, pools, holes in the middle, and every way to ask."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplug.index.asking import NO_POOLS, Asking, credits_of
from kvplug.index.holdings import Holdings, Stretch
from kvplug.kernels import runs
from kvplug.kernels.reach import ANY, NUM_CLASSES
from tests.kernels import twins

NUM_RANKS = 4
CREDITS = [1.0, 0.75, 0.25, 0.9]
WORTH = np.array([1.0, 0.5, 0.0, 1.0])
# Holders 0 to 11: rank h // 3 with class h % 3; holder 70 (in a second word): a pool that ranks 1
# and 3 read, holder 71: one that rank 3 reads; the rest is nobody.
POOLS = {70: [1, 3], 71: [3]}
own = {rank * 3 + each: (rank, each) for rank in range(NUM_RANKS) for each in range(3)}
holder_sets = st.frozensets(st.sampled_from([*own, *POOLS]), max_size=4)


def asking(holdings):
    owner = np.full(128, -1, dtype=np.int64)
    for holder, (rank, each) in own.items():
        owner[holder] = NUM_CLASSES * rank + each
    listed = []
    for holder, ranks in POOLS.items():
        owner[holder] = -2 - len(listed)
        listed += [len(ranks), *ranks]
    return Asking(holdings, owner, np.array(listed), credits_of(CREDITS, WORTH))


def hashes_of(num_blocks, *, branch=0):
    return np.arange(1, num_blocks + 1, dtype=np.uint64) + np.uint64(1000 * branch)


def store_block(holdings, holder, hashes, block):
    parent = int(hashes[block - 1]) if block else 0
    holdings.store(holder, Stretch(hashes[block : block + 1], parent))


def fill(holdings, holders_of_block, hashes):
    """Blocks in order, so that every parent is there, and holders in the order of a set."""
    for block, holders in enumerate(holders_of_block):
        for holder in sorted(holders):
            store_block(holdings, holder, hashes, block)


@given(st.lists(st.tuples(holder_sets, st.integers(1, 5)), max_size=8), st.integers(0, 4))
def test_a_reach_is_the_contiguous_prefix_of_each_rank(stretches, num_unknown):
    holders_of_block = [holders for holders, length in stretches for _ in range(length)]
    if frozenset() in holders_of_block:
        holders_of_block = holders_of_block[: holders_of_block.index(frozenset())]
    hashes, holdings = hashes_of(len(holders_of_block) + num_unknown), Holdings()
    fill(holdings, holders_of_block, hashes)
    holdings.check()
    asked = asking(holdings)
    held = asked.overlap(hashes, 0.0)
    expected, credit = twins.reaches(holders_of_block, own, POOLS, CREDITS, NUM_RANKS)
    assert held.reach.tolist() == expected
    np.testing.assert_allclose(held.credit, np.array(credit) * WORTH)
    halves = [hashes, hashes[: len(hashes) // 2], hashes[:0]]
    ends = np.cumsum([len(half) for half in halves])
    many = asked.overlap_many(np.concatenate(halves), ends, 0.0)
    for each, half in zip(many, halves, strict=True):
        one = asked.overlap(half, 0.0)
        assert each.reach.tolist() == one.reach.tolist()
        assert each.depth.tolist() == one.reach[ANY].tolist()
        np.testing.assert_allclose(each.credit, one.credit)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=12), st.integers(0, 40),
    st.integers(1, 40),
)  # fmt: skip
def test_holes_and_branches_are_no_part_of_a_match(removed, fork, length):
    trunk, branch = hashes_of(40), hashes_of(40, branch=1)
    holdings, twin = Holdings(), {rank: set(range(40)) for rank in range(4)}
    for rank in range(4):
        holdings.store(rank, Stretch(trunk))
    if 0 < fork < 40:
        holdings.store(2, Stretch(branch[fork:], int(trunk[fork - 1])))
    for rank, block in removed:
        holdings.drop(rank, trunk[block : block + 1])
        twin[rank].discard(block)
    holdings.check()
    owner = np.arange(64) * NUM_CLASSES
    asked = Asking(holdings, owner, NO_POOLS, credits_of(CREDITS, np.ones(4)))
    depth = asked.overlap(trunk[:length], 0.0).depth.tolist()
    assert depth == [
        [*(block in twin[rank] for block in range(length)), False].index(False) for rank in range(4)
    ]


def test_a_whole_run_is_one_segment_however_it_was_stored():
    holdings, hashes = Holdings(), hashes_of(4096)
    for holder in range(64):
        for first in range(0, 4096, 16):
            parent = int(hashes[first - 1]) if first else 0
            holdings.store(holder, Stretch(hashes[first : first + 16], parent))
    assert len(holdings.runs) == 1
    for first in range(4080, -1, -16):
        holdings.drop(5, hashes[first : first + 16])
    assert len(holdings.runs) == 1
    holdings.store(5, Stretch(hashes[:100]))
    assert len(holdings.runs) == 2
    assert holdings.runs.column(runs.START)[1:3].tolist() == [100, 0]
