"""Blocks that were routed, then stored, then removed are gone, whatever their time to live."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplug import codec
from kvplug.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Rank
from kvplug.hashing import as_tokens
from kvplug.index.apply_result import ApplyResult
from kvplug.index.block_index import BlockIndex
from kvplug.records import read_payloads

SIZE, NUM_BLOCKS = 2, 6
RANKS = [Rank("a"), Rank("b")]
TOKENS = tuple(range(SIZE * NUM_BLOCKS))
counts = st.integers(0, NUM_BLOCKS)


def apply_batch(index, event):
    index.apply(RANKS[0], EventBatch(events=(event,)))


def apply_record(index, event):
    records = read_payloads([codec.encode(EventBatch(events=(event,)))])
    assert index.apply_records(RANKS[0], records, 0, 10**6, ApplyResult()) == 1


ways = st.sampled_from([apply_batch, apply_record])


def routed_index(num_routed):
    """Both ranks were routed the first blocks of the prompt."""
    index = BlockIndex(SIZE, speculative_ttl_s=100.0)
    hashes = index.hasher.sequence_hashes(as_tokens(TOKENS))
    for rank in RANKS:
        index.speculative.insert(index.add_rank(rank), hashes[:num_routed], 0.0)
    return index, hashes


def stored(num_blocks):
    names = tuple(range(1, num_blocks + 1))
    return BlockStored(block_hashes=names, token_ids=TOKENS[: SIZE * num_blocks], block_size=SIZE)


@given(counts, st.integers(1, NUM_BLOCKS), st.data(), ways, ways)
def test_what_was_stored_and_removed_is_not_there(num_routed, num_stored, data, store, remove):
    index, hashes = routed_index(num_routed)
    store(index, stored(num_stored))
    names = range(1, num_stored + 1)
    removed = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    remove(index, BlockRemoved(block_hashes=tuple(removed)))
    index.check()
    held = [i < max(num_stored, num_routed) and i + 1 not in removed for i in range(NUM_BLOCKS)]
    overlap = index.overlap(hashes, now_s=1.0)
    assert overlap.depth.tolist() == [[*held, False].index(False), num_routed]
    assert np.array_equal(overlap.depth, overlap.credit)


@given(counts, ways)
def test_a_whole_prompt_leaves_nothing(num_routed, way):
    index, _ = routed_index(num_routed)
    index.speculative.forget(1)
    way(index, stored(NUM_BLOCKS))
    way(index, BlockRemoved(block_hashes=tuple(range(1, NUM_BLOCKS + 1))))
    assert (len(index), len(index.speculative)) == (0, 0)


@given(ways)
def test_a_store_that_says_nothing_new_ends_what_was_routed(way):
    index, hashes = routed_index(0)
    way(index, stored(NUM_BLOCKS))
    index.speculative.insert(0, hashes, 0.0)
    way(index, stored(NUM_BLOCKS))
    assert len(index.speculative) == 0


@given(counts)
def test_a_clear_takes_what_was_routed_of_this_rank_alone(num_routed):
    index, hashes = routed_index(num_routed)
    apply_batch(index, AllBlocksCleared())
    index.check()
    assert index.overlap(hashes, now_s=1.0).depth.tolist() == [0, num_routed]


@given(ways)
def test_a_table_that_grew_between_two_events_is_the_one_that_changes(way):
    index, _ = routed_index(0)
    way(index, stored(1))
    others = np.arange(1, 5001, dtype=np.uint64)
    index.speculative.insert(1, others, 0.0)
    hashes = index.hasher.sequence_hashes(as_tokens(TOKENS))
    index.speculative.insert(0, hashes, 0.0)
    way(index, stored(NUM_BLOCKS))
    assert len(index.speculative) == len(others)
    index.check()
