"""The memory of an index is what it says, is given back at once, and stays within its bound."""

import gc
import weakref
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import codec
from kvplug.events import (
    AllBlocksCleared,
    BlockCopied,
    BlockRemoved,
    BlockStored,
    CxlMetadata,
    CxlState,
    EventBatch,
    MoeLabel,
    Rank,
    Tier,
)
from kvplug.index.apply_result import ApplyResult
from kvplug.index.block_index import BlockIndex
from kvplug.index.bounds import Bounds
from kvplug.records import read_payloads

A, B = Rank("a"), Rank("b")


def index_of(*ranks, **bounds):
    index = BlockIndex(1, bounds=Bounds(**bounds))
    for rank in ranks:
        index.add_rank(rank)
    return index


def store(index, rank, first, num_blocks):
    """A chain of blocks of one token, named and filled with the numbers from `first` on."""
    numbers = tuple(range(first, first + num_blocks))
    event = BlockStored(block_hashes=numbers, token_ids=numbers, block_size=1)
    return index.apply(rank, EventBatch(events=(event,)))


@pytest.fixture
def _no_collections():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collections")
@pytest.mark.parametrize("max_steps", [10, 10_000])
@pytest.mark.parametrize(
    "start",
    [lambda index: index.events.start_clear(A), lambda index: index.capacity_guard.eviction(50)],
    ids=["clear", "eviction"],
)
def test_a_sweep_that_is_done_gives_its_arrays_back_at_once(start, max_steps):
    """It once waited for the garbage collector, with ten times the memory of the index."""
    index = index_of(A, B)
    store(index, A, 0, 100)
    store(index, B, 0, 50)
    sweep = start(index)
    while not sweep.is_done:
        sweep.advance(max_steps)
    gone = weakref.ref(sweep)
    del sweep
    assert gone() is None


LEAST = 2**18
RANKS = [Rank(f"w{number}") for number in range(70)]  # their holders take more than a word of bits


def named(rank_number, tokens, seeds):
    """Engine hashes of a prefix; engines with another seed have others."""
    chained = accumulate(
        tokens, lambda parent, token: hash((parent, token)), initial=rank_number % seeds
    )
    return tuple(name % 2**64 for name in chained)[1:]


@st.composite
def events(draw, seeds):
    number = draw(st.integers(0, len(RANKS) - 1))
    first, num_blocks = draw(st.integers(0, 40)), draw(st.sampled_from([1, 7, 60, 700, 3000]))
    tokens = (first, *range(1000 * first, 1000 * first + num_blocks - 1))
    names = named(number, tokens, seeds)
    kind = draw(st.sampled_from(["store", "store", "host", "label", "pool", "remove", "clear"]))
    if kind == "remove":
        at = draw(st.integers(0, num_blocks - 1))
        return number, BlockRemoved(block_hashes=names[at::2], tier=Tier.DEVICE)
    if kind == "host":
        return number, BlockCopied(block_hashes=names[::3], tier=Tier.HOST)
    if kind == "clear":
        return number, AllBlocksCleared()
    label = MoeLabel(layer=0, expert=1, group=first) if kind == "label" else None
    pool = CxlMetadata(CxlState.CXL_POOLED, first, ("w1",)) if kind == "pool" else None
    return number, BlockStored(
        block_hashes=names, token_ids=tokens, block_size=1, moe=label, cxl=pool
    )


@pytest.mark.parametrize("way", ["typed", "recorded"])
@given(st.sampled_from([1, 70]).flatmap(lambda seeds: st.lists(events(seeds), max_size=60)))
def test_a_bound_by_bytes_is_kept_whatever_comes(way, steps):
    index = index_of(*RANKS, max_bytes=LEAST)
    for number, event in steps:
        apply(index, RANKS[number], event, way)
        assert index.nbytes <= LEAST
        index.speculative.insert(number, np.arange(1, 3000, dtype=np.uint64), 0.0)
        assert index.nbytes <= LEAST
    index.check()


def apply(index, rank, event, way):
    batch = EventBatch(events=(event,))
    records = read_payloads([codec.encode(batch)]) if way == "recorded" else None
    if records is None:  # labels and pools are no records
        return index.apply(rank, batch)
    applied, at = ApplyResult(), 0
    while at < records.num_events:
        at = index.apply_records(rank, records, at, 100, applied)
    return applied


@pytest.mark.parametrize("way", ["typed", "recorded"])
def test_engines_of_another_seed_do_not_push_everything_out(way):
    """The tables of a hash space that has become empty once kept their memory."""
    index = index_of(A, B, max_bytes=1_000_000)
    chains = [tuple(range(first, first + 64)) for first in range(0, 30_000, 64)]
    for rank_number, rank in enumerate((A, B)):
        fewest = len(index)
        for tokens in chains[:: 1 - 2 * rank_number]:
            names = named(rank_number, tokens, 2)
            event = BlockStored(block_hashes=names, token_ids=tokens, block_size=1)
            assert not apply(index, rank, event, way).rejected
            fewest = min(fewest, len(index))
    assert index.num_resident(B) > 5000
    assert fewest > 4500


@pytest.mark.parametrize("way", ["typed", "recorded"])
@pytest.mark.parametrize("bounds", [{"max_blocks": 50}, {"max_bytes": LEAST}])
def test_an_event_that_never_fits_takes_nothing_away(bounds, way):
    index = index_of(A, **bounds)
    store(index, A, 0, 40)
    tokens = tuple(range(1000, 6000))
    event = BlockStored(block_hashes=named(0, tokens, 1), token_ids=tokens, block_size=1)
    assert apply(index, A, event, way).rejected == {"index_full": 5000}
    assert len(index) == 40
