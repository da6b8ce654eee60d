"""An index within bounds: tails go first, what is lost is counted, and nothing else is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import codec, packed
from kvplug.errors import ConfigError
from kvplug.events import BlockRemoved, BlockStored, EventBatch, Rank, Tier
from kvplug.hashing import as_tokens
from kvplug.index.apply_result import ApplyResult, RejectReason
from kvplug.index.block_index import BlockIndex
from kvplug.index.bounds import Bounds
from kvplug.index.evicting import EvictedHashFilter
from kvplug.records import read_payloads

RANKS = [Rank("a"), Rank("b"), Rank("c", 1)]
MAX_BLOCKS = 40


def bounded(**bounds):
    index = BlockIndex(1, bounds=Bounds(**bounds))
    for rank in RANKS:
        index.add_rank(rank)
    return index


def name_of(content):
    """An engine hash that identifies the tokens of a prefix."""
    return hash(("engine", content)) % 2**64


def stored(content, num_new):
    """The last `num_new` blocks of a prefix of one-token blocks."""
    first = len(content) - num_new
    return BlockStored(
        block_hashes=tuple(name_of(content[: i + 1]) for i in range(first, len(content))),
        token_ids=content[first:],
        block_size=1,
        parent=name_of(content[:first]) if first else None,
    )


def apply(index, rank, event, way):
    batch = EventBatch(events=(event,))
    if way == "typed":
        return index.apply(rank, batch)
    if way == "packed":
        return index.apply_packed(rank, packed.encode([as_packed(index, event)]))
    records, applied, at = read_payloads([codec.encode(batch)]), ApplyResult(), 0
    while at < records.num_events:
        at = index.apply_records(rank, records, at, 1, applied)
    return applied


def as_packed(index, event):
    parent = index.hash_spaces.hash_of(RANKS[0], event.parent)
    tokens = as_tokens(event.token_ids)
    hashes = index.hasher.sequence_hashes(tokens, parent=parent)
    return packed.PackedStored(event.block_hashes, hashes, event.parent)


contents = st.lists(st.integers(1, 3), min_size=1, max_size=30).map(tuple)
ways = st.sampled_from(["typed", "packed", "recorded"])
steps = st.lists(st.tuples(st.integers(0, 2), contents, ways), max_size=25)


def depth(index, rank, content):
    hashes = index.hasher.sequence_hashes(as_tokens(content))
    return int(index.overlap(hashes).depth[index.numbers.number_of(rank)])


@given(steps)
def test_whatever_comes_the_bound_holds_and_heads_stay_longest(operations):
    index, reference, num_rejected = (
        bounded(max_blocks=MAX_BLOCKS),
        {rank: set() for rank in RANKS},
        0,
    )
    for number, content, way in operations:
        rank = RANKS[number]
        known = max((n for n in range(len(content)) if content[:n] in reference[rank]), default=0)
        known = min(known, depth(index, rank, content))
        applied = apply(index, rank, stored(content, len(content) - known), way)
        index.check()
        assert len(index) <= MAX_BLOCKS
        num_rejected += sum(applied.rejected.values())
        if applied.num_stored:
            reference[rank].update(content[: i + 1] for i in range(len(content)))
        for each in RANKS:
            held = {c for c in reference[each] if depth(index, each, c) == len(c)}
            # Nobody is said to hold more than it stored; what is left of a chain is its head.
            assert len(index.engine_hashes_of(each)) == len(held)
            reference[each] = held
    assert num_rejected == 0 or index.capacity_guard.stats.num_blocks > 0


def test_the_oldest_tails_go_and_are_counted():
    index = bounded(max_blocks=64)
    old, new = (1,) * 30, (2,) * 30
    for content in (old, new):
        apply(index, RANKS[0], stored(content, 30), "typed")
    apply(index, RANKS[1], stored(old, 30), "typed")
    assert depth(index, RANKS[0], new) == 30
    apply(index, RANKS[0], stored((3,) * 10, 10), "typed")
    assert depth(index, RANKS[0], old) == depth(index, RANKS[1], old) == 20
    assert depth(index, RANKS[0], new) == 30
    assert (index.capacity_guard.stats.num_blocks, index.capacity_guard.stats.num_memberships) == (
        10,
        20,
    )


def test_a_chain_that_was_asked_for_stays():
    index = bounded(max_blocks=64)
    asked, forgotten = (1,) * 30, (2,) * 30
    for content in (asked, forgotten):
        apply(index, RANKS[0], stored(content, 30), "typed")
    assert depth(index, RANKS[0], asked) == 30
    apply(index, RANKS[0], stored((3,) * 10, 10), "typed")
    assert (depth(index, RANKS[0], asked), depth(index, RANKS[0], forgotten)) == (30, 20)


@pytest.mark.parametrize("way", ["typed", "packed", "recorded"])
def test_a_store_behind_an_evicted_block_is_no_lost_event(way):
    index = bounded(max_blocks=64)
    for token in (1, 2, 3):
        apply(index, RANKS[0], stored((token,) * 30, 30), "typed")
    event = stored((1,) * 31, 1)
    if way == "packed":
        payload = packed.encode([packed.PackedStored(event.block_hashes, [7], event.parent)])
        applied = index.apply_packed(RANKS[0], payload)
    else:
        applied = apply(index, RANKS[0], event, way)
    assert applied.rejected == {RejectReason.PARENT_EVICTED.value: 1}
    assert applied.num_orphans == 0
    removed = EventBatch(events=(BlockRemoved(block_hashes=(event.parent,), tier=Tier.DEVICE),))
    assert index.apply(RANKS[0], removed).rejected == {RejectReason.UNKNOWN_BLOCK.value: 1}


@pytest.mark.parametrize("way", ["typed", "packed", "recorded"])
def test_an_event_larger_than_the_bound_is_rejected_by_name(way):
    index = bounded(max_blocks=20)
    applied = apply(index, RANKS[0], stored((1,) * 21, 21), way)
    assert applied.rejected == {RejectReason.INDEX_FULL.value: 21}
    index.check()
    assert len(index) == 0


def test_memory_stays_below_its_bound():
    max_bytes = 400_000
    index = bounded(max_bytes=max_bytes)
    largest = 0
    for chain in range(300):
        tokens = tuple(range(chain * 1000, chain * 1000 + 100))
        assert apply(index, RANKS[chain % 3], stored(tokens, 100), "recorded").num_stored == 100
        largest = max(largest, index.nbytes)
    assert max_bytes / 2 < largest <= max_bytes
    assert index.capacity_guard.stats.num_blocks > 0
    index.check()


def test_what_is_no_block_of_an_engine_takes_no_block_away():
    index = bounded(max_bytes=400_000)
    apply(index, RANKS[0], stored((1,) * 100, 100), "typed")
    expected = np.arange(1, 20_001, dtype=np.uint64)
    index.speculative.insert(0, expected, 0.0)
    assert 0 < index.speculative.num_lost < len(expected)
    assert index.nbytes <= 400_000
    apply(index, RANKS[0], stored((2,) * 100, 100), "recorded")
    assert depth(index, RANKS[0], (1,) * 100) == depth(index, RANKS[0], (2,) * 100) == 100
    assert index.capacity_guard.stats.num_blocks == 0


def test_a_large_event_locks_nobody_out():
    index = bounded(max_bytes=400_000)
    event = BlockRemoved(block_hashes=tuple(range(50_000)), tier=Tier.DEVICE)
    apply(index, RANKS[0], event, "recorded")
    assert index.nbytes <= 400_000
    for chain in range(30):
        tokens = tuple(range(chain * 1000, chain * 1000 + 100))
        assert apply(index, RANKS[0], stored(tokens, 100), "recorded").num_stored == 100


def test_all_memory_is_counted():
    index = BlockIndex(1)
    empty = index.nbytes
    arrays = [*index.block_store.arrays, index.hash_spaces.common.table.slots]
    assert empty > sum(array.nbytes for array in arrays)
    index.apply_packed(RANKS[0], packed.encode([]))
    index.add_rank(RANKS[0])
    index.apply_packed(RANKS[0], packed.encode([packed.PackedRemoved(range(100_000))]))
    assert index.nbytes >= empty + 2 * 800_000  # the payload, and where its names are put


@pytest.mark.parametrize("way", ["typed", "recorded"])
def test_a_removal_of_unknown_blocks_takes_no_room_in_tables(way):
    index = bounded(max_bytes=400_000)
    apply(index, RANKS[0], stored((1,) * 100, 100), "typed")
    before = index.block_store.nbytes, len(index.hash_spaces.common.table.slots)
    event = BlockRemoved(block_hashes=tuple(range(50_000)), tier=Tier.DEVICE)
    assert apply(index, RANKS[0], event, way).rejected == {RejectReason.UNKNOWN_BLOCK.value: 50_000}
    assert (index.block_store.nbytes, len(index.hash_spaces.common.table.slots)) == before
    assert len(index) == 100


def test_a_filter_remembers_at_least_as_many_names_as_it_was_made_for():
    names, lost = EvictedHashFilter(), np.arange(1, 5001, dtype=np.uint64)
    from kvplug.kernels import evicting, table

    for first in range(0, 5000, 500):
        some = lost[first : first + 500]
        slots = np.zeros(2 * 1000 + 2, dtype=np.uint64)
        gone = np.zeros(2 * 1000 + 2, dtype=np.uint64)
        table.put_many(slots, some, some)
        table.put_many(gone, some, np.ones(500, dtype=np.uint64))
        assert evicting.evict_engine_hashes(0, 1000, gone, slots, names.reserve(500, 2000)) == 500
        assert int(slots[-2]) == 0
    assert all(name in names for name in range(3001, 5001))
    num_mistaken = sum(name in names for name in range(10_000, 20_000))
    assert num_mistaken < 500


hashes = st.integers(0, 2**64 - 1)


@given(some=st.lists(hashes, max_size=50), others=st.lists(hashes, max_size=50))
def test_a_filter_knows_all_that_it_was_told_to_remember(some, others):
    names = EvictedHashFilter(max_nbytes=1024)
    names.remember(np.array(some, dtype=np.uint64))
    assert all(name in names for name in some)
    expected = bits_of(some, len(names.words))
    is_known = [bits_of([name], len(names.words)) <= expected for name in others]
    assert [name in names for name in others] == is_known


def bits_of(names, num_words):
    """The bits of a filter that these have: two each, by the halves of a mixed hash."""
    bits = set()
    for name in names:
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            name = (name ^ (name >> 33)) * factor % 2**64
        name ^= name >> 33
        bits |= {(half * 64 * num_words) >> 32 for half in (name % 2**32, name >> 32)}
    return bits


@pytest.mark.parametrize("bounds", [{"max_blocks": 0}, {"max_bytes": 1000}])
def test_senseless_bounds_are_rejected(bounds):
    with pytest.raises(ConfigError):
        Bounds(**bounds)
