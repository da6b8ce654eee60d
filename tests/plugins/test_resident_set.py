"""Whoever is told by a resident set knows what an index knows that has seen all events."""

from functools import lru_cache

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvplug import packed
from kvplug.engines.listing import packed_parts
from kvplug.engines.resident_set import ResidentSet
from kvplug.events import (
    AllBlocksCleared,
    BlockCopied,
    BlockRemoved,
    BlockStored,
    CxlMetadata,
    CxlState,
    CxlStateTransition,
    EventBatch,
    MoeLabel,
    Namespace,
    Rank,
    Tier,
)
from kvplug.hashing import BlockHasher, as_hashes, seed_of
from kvplug.index.block_copies import copies_of
from kvplug.index.block_index import BlockIndex
from kvplug.index.cxl import CxlBlocks
from kvplug.index.moe_labels import MoeLabels

RANK = Rank("a")
PLAIN, SALTED, ADAPTED = Namespace(), Namespace(salt="s"), Namespace(lora_name="l")
SEQUENCES = [(), (1,), (2,), (1, 1), (1, 2), (1, 1, 1), (1, 1, 2), (1, 2, 1)]
CONTENTS = [(space, tokens) for space in (PLAIN, SALTED, ADAPTED) for tokens in SEQUENCES[1:]]
LABELS = [MoeLabel(1, 2), MoeLabel(1, 3)]
KINDS = {
    0: ("full_attention", None),
    1: ("sliding_window", 3),
    2: ("mamba", None),
    3: ("mla", None),
}


@lru_cache
def name_of(content, algorithm=0):
    return xxhash.xxh3_64_intdigest(repr((content, algorithm)).encode())


@lru_cache
def hash_of(content):
    space, tokens = content
    return int(BlockHasher(1).sequence_hashes(list(tokens), seed_of(space))[-1])


@st.composite
def stores(draw, groups=(0,), *, pooled=False):
    space = draw(st.sampled_from([PLAIN, PLAIN, SALTED, ADAPTED]))
    start = draw(st.sampled_from(SEQUENCES))
    added = draw(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=3))
    algorithm = 0 if pooled else draw(st.sampled_from([0, 0, 0, 1]))
    group = draw(st.sampled_from(groups))
    tokens = [(*start, *added[: i + 1]) for i in range(len(added))]
    more = {}
    if pooled:
        more = {"cxl": draw(st.none() | places), "moe": draw(st.none() | st.sampled_from(LABELS))}
    return BlockStored(
        block_hashes=tuple(name_of((space, each), algorithm) for each in tokens),
        token_ids=tuple(added), block_size=1,
        parent=name_of((space, start), algorithm) if start else None,
        namespace=None if start else space, tier=draw(tiers), group=group,
        attention=KINDS[group][0], sliding_window=KINDS[group][1], **more,
    )  # fmt: skip


tiers = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK])
names = st.lists(
    st.builds(name_of, st.sampled_from(CONTENTS), st.sampled_from([0, 0, 0, 1])), max_size=5
).map(tuple)
places = st.builds(
    CxlMetadata,
    st.sampled_from(CxlState),
    st.sampled_from([None, None, 0, 1]),
    st.sampled_from([None, None, (), ("a",), ("b", "a")]),
)


def moved(names, said):
    return CxlStateTransition(
        block_hashes=names, new_state=said.state, pool_id=said.pool_id,
        accessible_workers=said.accessible_workers,
    )  # fmt: skip


def copied(names, tier, group):
    attention, window = KINDS[group]
    return BlockCopied(
        block_hashes=names, tier=tier, group=group, attention=attention, sliding_window=window
    )


def events_of(groups, *, pooled=False):
    group = st.sampled_from(groups)
    kinds = [
        stores(groups, pooled=pooled),
        stores(groups, pooled=pooled),
        stores(groups, pooled=pooled),
        st.builds(BlockRemoved, block_hashes=names, tier=tiers, group=group),
        st.builds(BlockRemoved, block_hashes=names, tier=tiers, group=group),
        st.builds(copied, names, tiers, group),
        st.builds(AllBlocksCleared, tier=st.none() | tiers),
    ]
    if pooled:
        kinds += [st.builds(moved, names, places)] * 2
    return st.lists(st.one_of(kinds), max_size=20)


def new_index():
    index = BlockIndex(1)
    for rank in (RANK, Rank("b")):
        index.add_rank(rank)
    return index


def known(index):
    """All that an index can be asked about the blocks of the rank."""
    hashes = [hash_of(content) for content in CONTENTS]
    labels, pools = index.annotation(MoeLabels), index.annotation(CxlBlocks)
    return (
        sorted(index.engine_hashes_of(RANK).tolist()),
        copies_of(as_hashes(hashes), index.block_store, index.numbers),
        [labels.label(RANK, each) for each in hashes],
        [pools.metadata(RANK, each) for each in hashes],
    )


def check(first, second):
    """By typed events, live, and as a newcomer between the two halves: the same."""
    typed, live, late, resident = new_index(), new_index(), new_index(), ResidentSet(1)
    for event in first:
        tell(event, typed, resident, [live])
    for part in packed_parts(resident.listing(), 300):
        late.apply_packed(RANK, part)
    late.check()
    assert known(late) == known(typed)
    for event in second:
        tell(event, typed, resident, [live, late])
        assert known(late) == known(typed)
    assert known(live) == known(typed)


def tell(event, typed, resident, others):
    typed.apply(RANK, EventBatch(events=(event,)))
    payload = packed.encode(resident.apply(event))
    resident.settle()
    for index in others:
        index.apply_packed(RANK, payload)


plain, grouped, pooled = events_of((0,)), events_of((0, 1, 2, 3)), events_of((0,), pooled=True)


@given(plain, plain)
def test_of_plain_events(first, second):
    check(first, second)


@st.composite
def first_groups(draw):
    """Which groups there are is known before anything is in a lower tier."""
    groups = draw(st.sampled_from([(0, 1), (1, 0), (3, 2), (1, 2), (2, 3, 0)]))
    return [copied((), Tier.DEVICE, group) for group in groups]


@given(first_groups(), grouped, grouped)
def test_of_hybrid_models(groups, first, second):
    check([*groups, *first], second)


@given(pooled, pooled)
def test_of_pools_and_experts(first, second):
    check(first, second)


@pytest.mark.parametrize("max_blocks", [1, 3, 4096])
def test_long_runs_are_divided(monkeypatch, max_blocks):
    monkeypatch.setattr("kvplug.engines.listing.MAX_BLOCKS", max_blocks)
    tokens = tuple(range(10))
    event = BlockStored(block_hashes=tokens, token_ids=tokens, block_size=1, namespace=PLAIN)
    check([event], [])


def test_slots_are_squeezed_and_all_stays(monkeypatch):
    monkeypatch.setattr("kvplug.engines.resident_blocks._MIN_GONE", 1)
    resident, index = ResidentSet(1), new_index()
    for i in range(50):
        event = BlockStored(
            block_hashes=(2 * i + 1, 2 * i + 2), token_ids=(i, i), block_size=1, namespace=PLAIN
        )
        for each in (event, BlockRemoved(block_hashes=(2 * i + 1,))):
            index.apply_packed(RANK, packed.encode(resident.apply(each)))
        if i % 2:
            gone = BlockRemoved(block_hashes=(2 * i, 2 * i + 2))
            index.apply_packed(RANK, packed.encode(resident.apply(gone)))
        resident.settle()
    assert set(resident._blocks.slot_of) == set(index.engine_hashes_of(RANK).tolist())
    late = new_index()
    for part in packed_parts(resident.listing(), 300):
        late.apply_packed(RANK, part)
    assert sorted(late.engine_hashes_of(RANK)) == sorted(index.engine_hashes_of(RANK))
