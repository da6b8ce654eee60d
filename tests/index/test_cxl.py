"""Blocks on their way through a CXL pool: a prefill worker writes, decode workers read."""

import numpy as np
import pytest

from kvplug.errors import IndexCorruptError
from kvplug.events import (
    AllBlocksCleared,
    BlockRemoved,
    CxlMetadata,
    CxlState,
    CxlStateTransition,
    EventBatch,
    Rank,
    Tier,
)
from kvplug.index.cxl import CxlBlocks
from kvplug.index.cxl_states import MAX_PLACEMENTS, CxlStates, Placement, Placements
from kvplug.index.holder_numbers import HolderNumbers
from tests.index.four_blocks import apply, hashes_of, index_of, stored

PREFILL, DECODE_1, DECODE_2 = Rank("prefill"), Rank("decode-1"), Rank("decode-2")
DECODERS = ("decode-1", "decode-2")
LOCAL, POOLED, IN_TRANSIT, EVICTED = (
    CxlState.LOCAL_GPU,
    CxlState.CXL_POOLED,
    CxlState.IN_TRANSIT,
    CxlState.EVICTED,
)


@pytest.fixture
def index():
    with index_of(PREFILL, DECODE_1, DECODE_2) as index:
        yield index


def moved(state, *names, pool=None, workers=None):
    return CxlStateTransition(
        block_hashes=names, new_state=state, pool_id=pool, accessible_workers=workers
    )


def cxl_of(index):
    return index.annotation(CxlBlocks)


def overlap(index):
    return index.overlap(hashes_of(index))


def pool(index, *names, pool=0, workers=DECODERS):
    apply(index, PREFILL, moved(IN_TRANSIT, *names, pool=pool, workers=workers))
    return apply(index, PREFILL, moved(POOLED, *names))


def test_blocks_go_from_the_prefill_worker_into_the_pool(index):
    apply(index, PREFILL, stored(1, 2, 3, 4, cxl=CxlMetadata(LOCAL, None, ())))
    assert overlap(index).device.tolist() == [4, 0, 0]
    # On their way nobody else can read them.
    applied = apply(index, PREFILL, moved(IN_TRANSIT, 1, 2, 3, pool=0, workers=DECODERS))
    assert applied.num_moved == 3
    assert overlap(index).held.tolist() == [4, 0, 0]
    # The transition that ends the transfer names neither pool nor workers.
    apply(index, PREFILL, moved(POOLED, 1, 2, 3))
    found = overlap(index)
    assert found.device.tolist() == [0, 0, 0]
    assert found.cxl_accessible.tolist() == [4, 3, 3]
    np.testing.assert_allclose(found.credit, [3 * 0.9 + 1, 3 * 0.9, 3 * 0.9])


def test_a_decode_worker_extends_what_it_reads_in_the_pool(index):
    apply(index, PREFILL, stored(1, 2, 3))
    pool(index, 1, 2, 3, workers=("decode-1",))
    apply(index, DECODE_1, stored(4, start=3, parent=3))
    assert overlap(index).cxl_accessible.tolist() == [3, 4, 0]


def test_evicted_blocks_are_gone_and_what_is_known_of_them_is_kept(index):
    apply(index, PREFILL, stored(1, 2))
    pool(index, 1, 2, pool=7)
    applied = apply(index, PREFILL, moved(EVICTED, 1, 2))
    assert (applied.num_moved, applied.rejected) == (2, {})
    assert len(index) == 0
    first = int(hashes_of(index)[0])
    assert cxl_of(index).metadata(PREFILL, first) == CxlMetadata(EVICTED, 7, DECODERS)
    # Stored and pooled again: pool and workers are those of before.
    apply(index, PREFILL, stored(1, 2), moved(POOLED, 1, 2))
    assert cxl_of(index).metadata(PREFILL, first) == CxlMetadata(POOLED, 7, DECODERS)
    assert overlap(index).cxl_accessible.tolist() == [2, 2, 2]


def test_evicted_takes_the_copy_that_the_state_stood_for(index):
    apply(index, PREFILL, stored(1))
    pool(index, 1)
    apply(index, PREFILL, stored(1))  # on the device besides
    assert overlap(index).device.tolist() == [1, 0, 0]
    apply(index, PREFILL, moved(EVICTED, 1))
    assert overlap(index).held.tolist() == [1, 0, 0]
    apply(index, PREFILL, moved(EVICTED, 1))  # the pool has none any more: the one on the device
    assert overlap(index).held.tolist() == [0, 0, 0]


def test_evicted_takes_what_was_stored_since_the_last_eviction(index):
    for _ in range(2):
        apply(index, PREFILL, stored(1))
        assert overlap(index).device.tolist() == [1, 0, 0]
        assert apply(index, PREFILL, moved(EVICTED, 1)).num_moved == 1
        assert overlap(index).held.tolist() == [0, 0, 0]


def test_a_removal_is_of_the_device_and_not_of_the_pool(index):
    apply(index, PREFILL, stored(1), stored(1, tier=Tier.HOST))
    pool(index, 1)
    applied = apply(index, PREFILL, BlockRemoved(block_hashes=(1,)))
    assert applied.rejected == {"unknown_block": 1}
    apply(index, PREFILL, BlockRemoved(block_hashes=(1,), tier=Tier.HOST))
    assert overlap(index).cxl_accessible.tolist() == [1, 1, 1]


def test_a_pool_is_left_for_the_device_and_for_another_pool(index):
    apply(index, PREFILL, stored(1, 2))
    pool(index, 1, 2, workers=("decode-1",))
    apply(index, PREFILL, moved(POOLED, 1, 2, pool=1, workers=("decode-2",)))
    assert overlap(index).held.tolist() == [2, 0, 2]
    apply(index, PREFILL, moved(LOCAL, 1, 2))
    assert overlap(index).device.tolist() == overlap(index).held.tolist() == [2, 0, 0]


def test_blocks_may_be_stored_in_a_pool_at_once(index):
    said = CxlMetadata(POOLED, 3, ("decode-2",))
    applied = apply(index, PREFILL, stored(1, 2, cxl=said))
    assert applied.num_stored == 2
    apply(index, PREFILL, stored(1, 2, cxl=said))  # a second report is no second copy
    assert overlap(index).device.tolist() == [0, 0, 0]
    assert overlap(index).cxl_accessible.tolist() == [2, 0, 2]
    apply(index, PREFILL, stored(1, cxl=CxlMetadata(LOCAL)))  # adds a copy, takes none
    assert overlap(index).device.tolist() == [1, 0, 0]
    assert overlap(index).cxl_accessible.tolist() == [2, 0, 2]


def test_a_pool_that_nobody_named_is_rejected(index):
    apply(index, PREFILL, stored(1, 2))
    applied = apply(index, PREFILL, moved(POOLED, 1, 2, workers=DECODERS))
    assert (applied.num_moved, applied.rejected) == (0, {"unknown_pool": 2})
    applied = apply(index, PREFILL, stored(1, 2, 3, cxl=CxlMetadata(POOLED)))
    assert (applied.num_stored, applied.rejected) == (0, {"unknown_pool": 3})
    assert overlap(index).device.tolist() == [2, 0, 0]


def test_blocks_that_nobody_stored_are_rejected(index):
    apply(index, PREFILL, stored(1))
    applied = apply(index, PREFILL, moved(POOLED, 1, 5, 6, pool=0))
    assert (applied.num_moved, applied.rejected) == (1, {"unknown_block": 2})
    applied = apply(index, DECODE_1, moved(EVICTED, 1))  # it had nothing to evict
    assert (applied.num_moved, applied.rejected) == (0, {"unknown_block": 1})


def test_workers_read_a_pool_while_they_are_in_the_fleet(index):
    index.remove_worker("decode-2")
    apply(index, PREFILL, stored(1))
    pool(index, 1)
    assert overlap(index).held.tolist() == [1, 1, 0]
    index.add_rank(DECODE_2)
    index.add_rank(Rank("decode-2", 1))
    index.check()
    assert overlap(index).held.tolist() == [1, 1, 1, 1]
    index.remove_worker("decode-1")
    index.check()
    assert overlap(index).held.tolist() == [1, 0, 1, 1]
    index.remove_worker("prefill")  # its blocks in the pool go with it
    assert overlap(index).held.tolist() == [0, 0, 0, 0]


def test_a_clear_takes_pools_and_what_is_known(index):
    apply(index, PREFILL, stored(1, 2))
    pool(index, 1)
    apply(index, PREFILL, AllBlocksCleared(tier=Tier.DEVICE))
    assert overlap(index).held.tolist() == [1, 1, 1]
    apply(index, PREFILL, AllBlocksCleared())
    assert (len(index), len(cxl_of(index).states)) == (0, 0)


def test_a_rank_with_names_of_its_own_pools_blocks_for_all(index):
    apply(index, DECODE_1, stored(1, 2))
    apply(index, PREFILL, stored(101, 102))
    assert len(index.hash_spaces) == 2
    pool(index, 101, 102)
    assert overlap(index).cxl_accessible.tolist() == [2, 2, 2]
    apply(index, PREFILL, moved(EVICTED, 101, 102))
    assert overlap(index).held.tolist() == [0, 2, 0]


def test_placements_without_a_block_make_room_and_too_many_are_rejected(index):
    apply(index, PREFILL, stored(1, 2))
    for number in range(2 * MAX_PLACEMENTS):
        index.apply(PREFILL, EventBatch(events=(moved(POOLED, 1, pool=number),)))
    index.check()
    assert len(cxl_of(index).placements) <= MAX_PLACEMENTS
    placements = cxl_of(index).placements
    for number in range(MAX_PLACEMENTS):
        hash_ = np.array([1000 + number], dtype=np.uint64)
        placement = Placement(0, pool_id=10_000 + number)
        if not placements.is_full(0):
            cxl_of(index).states.put(0, hash_, IN_TRANSIT, placements.add(placement))
    for number in placements.numbers_of(0):
        cxl_of(index).states.put(0, np.array([5000 + number], dtype=np.uint64), IN_TRANSIT, number)
    applied = apply(index, PREFILL, moved(POOLED, 2, pool=99))
    assert applied.rejected == {"too_many_pools": 1}


def test_of_blocks_that_are_not_pooled_the_latest_are_kept():
    numbers = HolderNumbers()
    number = numbers.add(PREFILL)
    placements = Placements(numbers)
    states, place = CxlStates(placements, max_retained=4), placements.add(Placement(number, 1))
    hashes = np.arange(1, 11, dtype=np.uint64)
    states.put(number, hashes[:2], POOLED, place)
    for at in range(2, 10):
        states.put(number, hashes[at : at + 1], EVICTED, place)
        states.check()
    states.put(number, hashes[6:7], IN_TRANSIT, place)  # the oldest becomes the newest
    assert np.flatnonzero(states.find(number, hashes)).tolist() == [0, 1, 6, 7, 8, 9]
    states.put(number, hashes[2:4], EVICTED, place)
    assert np.flatnonzero(states.find(number, hashes)).tolist() == [0, 1, 2, 3, 6, 9]
    states.put(number, hashes, EVICTED, place)
    states.check()
    assert np.flatnonzero(states.find(number, hashes)).tolist() == [6, 7, 8, 9]
    states.forget(number)
    assert (len(states), states.unused(number)) == (0, [place])


def test_a_block_that_left_the_index_by_itself_is_in_no_pool(index):
    apply(index, PREFILL, stored(1, 2))
    pool(index, 1, 2)
    second, (holder,) = hashes_of(index)[1:2], cxl_of(index).placements.holders
    index.block_store.drop(holder, second)
    next(iter(index.hash_spaces)).table.erase(np.array([2], dtype=np.uint64))
    cxl_of(index).erase_gone()
    index.check()
    assert cxl_of(index).metadata(PREFILL, int(second[0])) is None
    assert overlap(index).cxl_accessible.tolist() == [1, 1, 1]


def test_check_sees_a_pooled_block_without_its_copy(index):
    apply(index, PREFILL, stored(1, 2))
    pool(index, 1)
    (placement,) = (n for n in cxl_of(index).placements.numbers_of(0))
    second = hashes_of(index)[1:2]
    cxl_of(index).states.put(0, second, POOLED, placement)
    with pytest.raises(IndexCorruptError):
        index.check()
    cxl_of(index).states.erase(0, second)
    index.check()
    cxl_of(index).states.erase(0, hashes_of(index)[:1])
    with pytest.raises(IndexCorruptError):
        index.check()
    cxl_of(index).states.put(0, hashes_of(index)[:1], POOLED, placement)
