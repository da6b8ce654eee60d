"""Payloads of packed events leave the index as typed events would, or as it was."""

from array import array

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import packed
from kvplug.errors import DecodeError
from kvplug.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Namespace,
    Rank,
    Tier,
)
from kvplug.hashing import as_tokens
from kvplug.index.apply_result import ApplyResult
from kvplug.index.block_index import BlockIndex

A, B = Rank("a"), Rank("b")
SIZE = 4
NAMES = range(1, 9)  # block n follows block n - 1; 5 begins a second sequence
STARTS = {1, 5}


def start_of(name):
    return max(start for start in STARTS if start <= name)


def new_index():
    index = BlockIndex(SIZE)
    for rank in (A, B):
        index.add_rank(rank)
    return index


def tokens_of(name):
    return range(SIZE * name, SIZE * name + SIZE)


def stored(first, num_blocks, tier):
    own = [name for name in NAMES if start_of(name) == start_of(first)]
    names = [name for name in own if first <= name < first + num_blocks]
    ids = tuple(token for name in names for token in tokens_of(name))
    parent = None if first in STARTS else first - 1
    return BlockStored(
        block_hashes=tuple(names), token_ids=ids, block_size=SIZE, parent=parent, tier=tier,
        namespace=None if parent else Namespace(),
    )  # fmt: skip


def as_packed(event):
    """The hash of a block is that of its sequence: from the start that it belongs to."""
    match event:
        case BlockRemoved():
            return packed.PackedRemoved(event.block_hashes, event.tier)
        case AllBlocksCleared():
            return packed.PackedCleared(event.tier)
        case BlockStored():
            first, last = event.block_hashes[0], event.block_hashes[-1]
            start = start_of(first)
            ids = [token for name in range(start, last + 1) for token in tokens_of(name)]
            hashes = BlockIndex(SIZE).hasher.sequence_hashes(as_tokens(ids))
            return packed.PackedStored(
                event.block_hashes, hashes[first - start :], event.parent, event.tier
            )


tiers = st.sampled_from(Tier)
stores = st.builds(stored, st.sampled_from(NAMES), st.integers(1, 8), tiers)
names = st.lists(st.sampled_from(NAMES), max_size=8, unique=True).map(tuple)
events = st.one_of(
    stores,
    stores,
    st.builds(BlockRemoved, block_hashes=names, tier=tiers),
    st.builds(AllBlocksCleared, tier=st.none() | tiers),
)
batches = st.lists(st.tuples(st.sampled_from([A, B]), st.lists(events, max_size=6)), max_size=4)


def contents(index):
    return {
        (rank, tier): sorted(index.engine_hashes_of(rank, tier).tolist())
        for rank in (A, B)
        for tier in Tier
    }


def is_report(index, rank, event):
    """Whether a typed event may be one that brings no copies; packed stores always bring them."""
    if not isinstance(event, BlockStored) or event.parent or event.tier is not Tier.DEVICE:
        return False
    return set(event.block_hashes) <= set(index.engine_hashes_of(rank).tolist())


@given(batches)
def test_as_typed_events(some):
    index, reference = new_index(), new_index()
    for rank, batch in some:
        expected, same = ApplyResult(), []
        for event in batch:
            if not is_report(reference, rank, event):
                same.append(event)
                expected.add(reference.apply(rank, EventBatch(events=(event,))))
        assert index.apply_packed(rank, packed.encode(map(as_packed, same))) == expected
        assert contents(index) == contents(reference)
        index.check()


def test_every_store_brings_copies():
    """Unlike a typed one that says a reused prefix again: what packs events knows what it has."""
    index, store = new_index(), packed.encode([as_packed(stored(1, 2, Tier.DEVICE))])
    for payload in (store, store, packed.encode([packed.PackedRemoved([1, 2])])):
        index.apply_packed(A, payload)
    assert sorted(index.engine_hashes_of(A).tolist()) == [1, 2]


PAYLOAD = packed.encode(
    map(as_packed, [
        stored(1, 4, Tier.DEVICE), stored(5, 3, Tier.HOST),
        BlockRemoved(block_hashes=(2,), tier=Tier.DEVICE), stored(2, 1, Tier.DEVICE),
    ])
)  # fmt: skip


@pytest.mark.parametrize("end", range(len(PAYLOAD)))
def test_of_a_payload_that_is_cut_short_nothing_is_done(end):
    index = new_index()
    with pytest.raises(DecodeError, match="cannot read packed events"):
        index.apply_packed(A, PAYLOAD[:end])
    assert len(index) == 0
    index.check()


@pytest.mark.parametrize("more", [b"\x00", b"\xc0", PAYLOAD])
def test_of_a_payload_with_bytes_behind_its_end_nothing_is_done(more):
    index = new_index()
    with pytest.raises(DecodeError, match="cannot read packed events"):
        index.apply_packed(A, PAYLOAD + more)
    assert len(index) == 0


@given(st.integers(0, len(PAYLOAD) - 1), st.integers(0, 255))
def test_a_damaged_byte_is_read_as_the_decoder_reads_it(at, byte):
    """Whatever that is: nothing is done of what the decoder does not read."""
    damaged = PAYLOAD[:at] + bytes([byte]) + PAYLOAD[at + 1 :]
    index, reference = new_index(), new_index()
    try:
        decoded = packed.decode(damaged)
    except DecodeError:
        with pytest.raises(DecodeError):
            index.apply_packed(A, damaged)
        assert len(index) == 0
        return
    applied = index.apply_packed(A, damaged)
    one_by_one = [reference.apply_packed(A, packed.encode([event])) for event in decoded]
    assert applied.num_stored == sum(one.num_stored for one in one_by_one)
    assert contents(index) == contents(reference)
    index.check()


NO_BYTES = [None, "text", 7, [PAYLOAD], array("I", [1]), memoryview(PAYLOAD)[1::2]]


@pytest.mark.parametrize("payload", NO_BYTES)
@pytest.mark.parametrize("rank", [A, Rank("unknown")])
def test_what_is_no_bytes_is_rejected(payload, rank):
    with pytest.raises(DecodeError, match="cannot read packed events: "):
        new_index().apply_packed(rank, payload)


def test_events_before_a_clear_are_done_before_it():
    index = new_index()
    payload = packed.encode([*packed.decode(PAYLOAD), packed.PackedCleared(Tier.DEVICE)])
    applied = index.apply_packed(A, payload)
    assert (applied.num_stored, len(index)) == (8, 3)


def test_names_without_hashes_are_counted():
    applied = new_index().apply_packed(A, packed.encode([packed.PackedStored([1, 2], [7])]))
    assert applied.rejected == {"misaligned": 2}


def test_a_header_of_another_form_is_read():
    """A version in two bytes is a version."""
    assert msgspec.msgpack.decode(b"\x91\xcc\x02") == [2]
    index = new_index()
    index.apply_packed(A, b"\x91\xcc\x02")
    assert len(index) == 0


def test_a_rank_that_never_stored_clears_nobody_else():
    """It has a number that no set has room for yet."""
    index = BlockIndex(SIZE)
    ranks = [Rank(f"w{number}") for number in range(65)]
    for rank in ranks:
        index.add_rank(rank)
    for rank in ranks[:64]:
        index.apply_packed(rank, packed.encode([packed.PackedRemoved([5])]))
    for rank, name in ((1, 11), (0, 12), (2, 13), (3, 14)):
        payload = packed.encode([packed.PackedStored([name], [1000 + name])])
        index.apply_packed(ranks[rank], payload)
    index.apply_packed(ranks[2], packed.encode([packed.PackedRemoved([13])]))
    cleared = index.apply_packed(ranks[64], packed.encode([packed.PackedCleared()]))
    assert cleared.num_cleared == 0
    held = {
        name: np.flatnonzero(index.overlap([1000 + name]).depth).tolist() for name in (11, 12, 14)
    }
    assert held == {11: [1], 12: [0], 14: [3]}
    index.check()


def test_a_rank_that_comes_late_keeps_its_names():
    """Of blocks that another rank of its hash space removes; a third one calls blocks otherwise."""
    index = BlockIndex(SIZE)
    a, b, other = A, B, Rank("other")
    for rank in (a, b, other):
        index.add_rank(rank)
    hashes = index.hasher.sequence_hashes(as_tokens(range(3 * SIZE)))
    store = packed.encode([packed.PackedStored([11, 12, 13], hashes)])
    remove = packed.encode([packed.PackedRemoved([13, 12, 11])])
    index.apply_packed(a, store)
    index.apply_packed(other, packed.encode([packed.PackedStored([21, 22, 23], hashes)]))
    for rank, payload in ((a, store), (a, remove), (b, store), (a, remove)):
        index.apply_packed(rank, payload)
    assert sorted(index.engine_hashes_of(b).tolist()) == [11, 12, 13]
    index.check()


def test_a_block_that_comes_back_at_another_depth_is_taken():
    """A payload may contradict itself: its hashes are taken as they come."""
    index = new_index()
    index.apply_packed(A, packed.encode([packed.PackedStored([1, 2], [17, 11])]))
    index.apply_packed(A, packed.encode([packed.PackedRemoved([1])]))
    index.apply_packed(A, packed.encode([packed.PackedStored([3, 4], [3, 17])]))
    index.check()
    assert index.overlap([3, 17]).depth.tolist() == [2, 0]
    assert index.overlap([17, 11]).depth.tolist() == [0, 0]
