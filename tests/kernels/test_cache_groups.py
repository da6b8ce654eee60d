"""What the KV cache groups of ranks allow, against plain loops over every prefix."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplug.index.block_store import BlockSpan, BlockStore
from kvplug.index.prefix_query import PrefixQuery, credits_of
from kvplug.kernels import cache_groups, prefix_lengths

CREDITS = [1.0, 0.75, 0.25, 0.9]
CONFIDENCE = np.array([1.0, 0.5, 1.0, 1.0])
# Ranks 0 and 1 hold blocks on their devices (holders 0 and 1) and in host memory (2 and 3); rank 2
# has only windows; rank 3 has no other groups, and computes the last block that matches anew.
# Groups: holder, rank, how many blocks they need.
TIERS = {0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (1, 1), 4: (3, 0)}
ALL = 1000
GROUPS = [(10, 0, 1), (70, 0, 3), (12, 1, ALL), (13, 2, 2), (14, 2, 4)]
NUM_OF_RANK = {0: 2, 1: 1, 2: 2}
RECOMPUTES = 3
HOLDERS = [*TIERS, *(holder for holder, _, _ in GROUPS)]
holder_sets = st.frozensets(st.sampled_from(HOLDERS), max_size=len(HOLDERS))


def rows():
    alone = cache_groups.row(
        RECOMPUTES, num_rows=1, has_main=True, holder=-1, num_needed=0, num_recomputed=1
    )
    return alone + [
        column
        for holder, rank, needed in GROUPS
        for column in cache_groups.row(
            rank,
            num_rows=NUM_OF_RANK[rank],
            has_main=rank != 2,
            holder=holder,
            num_needed=needed,
        )
    ]


def query(block_store):
    owner = np.full(128, -1, dtype=np.int64)
    for holder, (rank, tier) in TIERS.items():
        owner[holder] = prefix_lengths.NUM_CLASSES * rank + tier
    owner[[holder for holder, _, _ in GROUPS]] = -2
    groups = np.array(rows(), dtype=np.int64)
    credits = credits_of(CREDITS, CONFIDENCE)
    return PrefixQuery(block_store, owner, np.zeros(1, dtype=np.int64), credits, groups=groups)


def hashes_of(num_blocks):
    return np.arange(1, num_blocks + 1, dtype=np.uint64)


def fill(block_store, holders_of_block):
    """A middle that nobody holds is stored and dropped, as its successors are found by depth."""
    hashes = hashes_of(len(holders_of_block))
    for block, holders in enumerate(holders_of_block):
        span = BlockSpan(hashes[block : block + 1], int(hashes[block - 1]) if block else 0)
        for holder in sorted(holders) or [20]:
            block_store.store(holder, span)
    gone = [block for block, holders in enumerate(holders_of_block) if not holders]
    block_store.drop(20, hashes[gone])


def main_length(rank, holders_of_block, tiers):
    held = [
        any(TIERS.get(each, (None, None)) in [(rank, tier) for tier in tiers] for each in holders)
        for holders in holders_of_block
    ]
    return [*held, False].index(False)


def allows(holders_of_block, holder, needed, length):
    first = max(0, length - needed)
    return all(holder in holders for holders in holders_of_block[first:length])


def longest(rank, holders_of_block, max_blocks):
    """The longest prefix that every group of the rank allows."""
    most = min(max_blocks, len(holders_of_block))
    if rank != 2:
        most = min(most, main_length(rank, holders_of_block, [0, 1]))
    if rank == RECOMPUTES:
        return max(0, most - 1)
    groups = [(holder, needed) for holder, each, needed in GROUPS if each == rank]
    return max(
        length
        for length in range(most + 1)
        if all(allows(holders_of_block, *group, length) for group in groups)
    )


@given(
    st.lists(st.tuples(holder_sets, st.integers(1, 4)), max_size=8), st.integers(0, 3), st.data()
)
def test_a_prefix_counts_if_every_group_has_what_it_needs(spans, num_unknown, data):
    holders_of_block = [holders for holders, length in spans for _ in range(length)]
    block_store = BlockStore()
    fill(block_store, holders_of_block)
    block_store.check()
    hashes = hashes_of(len(holders_of_block) + num_unknown)
    hashes = hashes[: data.draw(st.integers(0, len(hashes)))]
    asked = query(block_store)
    twice, ends = np.concatenate([hashes, hashes]), np.array([len(hashes), 2 * len(hashes)])
    for overlap in (asked.overlap(hashes, 0.0), *asked.overlap_many(twice, ends, 0.0)):
        for rank in range(4):
            length = longest(rank, holders_of_block, len(hashes))
            assert overlap.held[rank] == overlap.depth[rank] == length
            on_device = length
            if rank != 2:
                on_device = min(length, main_length(rank, holders_of_block, [0]))
            assert overlap.device[rank] == on_device
            worth = on_device + CREDITS[1] * (length - on_device)
            np.testing.assert_allclose(overlap.credit[rank], CONFIDENCE[rank] * worth)
