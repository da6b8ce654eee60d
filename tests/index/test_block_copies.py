"""Who holds a block."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import BlockIndex, BlockRemoved, BlockStored, EventBatch, Rank, Tier
from kvplug.errors import HashingError
from kvplug.events import CxlMetadata, CxlState
from kvplug.hashing import BlockHasher, as_tokens
from kvplug.index.block_copies import BlockCopies

TOKENS = tuple(range(16))
HASHES = BlockHasher(4).sequence_hashes(as_tokens(TOKENS))


def make_index(*ranks):
    index = BlockIndex(4)
    for rank in ranks:
        index.add_rank(rank)
    return index


def store(index, rank, num_blocks, **more):
    names, tokens = tuple(range(1, num_blocks + 1)), TOKENS[: 4 * num_blocks]
    event = BlockStored(block_hashes=names, token_ids=tokens, block_size=4, **more)
    applied = index.apply(rank, EventBatch(events=(event,)))
    assert not applied.rejected


def test_each_rank_with_the_tiers_that_have_the_block():
    a, b, c = Rank("a"), Rank("b", 1), Rank("c")
    index = make_index(a, b, c)
    store(index, a, 2, tier=Tier.DISK)
    store(index, a, 3)
    store(index, b, 1, tier=Tier.HOST)
    assert index.holders_of(HASHES) == [
        {a: BlockCopies(tiers=(Tier.DEVICE, Tier.DISK)), b: BlockCopies(tiers=(Tier.HOST,))},
        {a: BlockCopies(tiers=(Tier.DEVICE, Tier.DISK))},
        {a: BlockCopies(tiers=(Tier.DEVICE,))},
        {},
    ]
    assert index.holders_of([]) == []


def test_copies_in_pools_say_who_can_read_them():
    a, b = Rank("a"), Rank("b")
    index = make_index(a, b)
    pooled = CxlMetadata(state=CxlState.CXL_POOLED, pool_id=1, accessible_workers=("b",))
    store(index, a, 1, cxl=pooled)
    assert index.holders_of(HASHES[:1]) == [{a: BlockCopies(pools=(("b",),))}]


def test_further_cache_groups_are_counted():
    a = Rank("a")
    index = make_index(a)
    store(index, a, 2)
    store(index, a, 1, group=1, attention="sliding_window", sliding_window=8)
    assert index.holders_of(HASHES[:2]) == [
        {a: BlockCopies(tiers=(Tier.DEVICE,), num_groups=1)},
        {a: BlockCopies(tiers=(Tier.DEVICE,))},
    ]


def test_hashes_that_are_none_are_refused():
    with pytest.raises(HashingError):
        make_index().holders_of([-1])


steps = st.tuples(st.integers(0, 70), st.sampled_from(Tier), st.integers(1, 4), st.booleans())


@given(st.lists(steps, max_size=30))
def test_holders_are_those_of_every_rank_asked_alone(given_steps):
    ranks = [Rank(f"w{number}") for number in range(71)]
    index = make_index(*ranks)
    for number, tier, num_blocks, removes in given_steps:
        if removes:
            names = tuple(range(num_blocks, 5))
            event = BlockRemoved(block_hashes=names, tier=tier)
            index.apply(ranks[number], EventBatch(events=(event,)))
        else:
            store(index, ranks[number], num_blocks, tier=tier)
    touched = [ranks[number] for number in sorted({number for number, *_ in given_steps})]
    for name, copies in enumerate(index.holders_of(HASHES), start=1):
        expected = {}
        for rank in touched:
            tiers = [tier for tier in Tier if name in index.engine_hashes_of(rank, tier)]
            if tiers:
                expected[rank] = BlockCopies(tiers=tuple(tiers))
        assert copies == expected
