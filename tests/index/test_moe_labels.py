"""Labels of experts: they come with a stored block and go with the rank's last copy of it."""

import numpy as np
import pytest

from kvplug import packed
from kvplug.errors import IndexCorruptError
from kvplug.events import (
    AllBlocksCleared,
    BlockRemoved,
    CxlState,
    CxlStateTransition,
    EventBatch,
    MoeLabel,
    Tier,
)
from kvplug.index.moe_labels import MoeLabels
from tests.index.four_blocks import A, B, apply, apply_record, hashes_of, index_of, stored

EXPERT, OTHER = MoeLabel(3, 7), MoeLabel(3, 8)


@pytest.fixture
def index():
    with index_of(A, B) as index:
        yield index


def labels_of(index):
    return index.annotation(MoeLabels)


def hits(index, label=EXPERT):
    held = index.overlap(hashes_of(index)).held
    return labels_of(index).num_aligned(hashes_of(index), label, held).tolist()


def test_leading_blocks_of_each_rank_are_counted_by_label(index):
    apply(index, A, stored(1, 2, moe=EXPERT), stored(3, start=2, parent=2, moe=OTHER))
    apply(index, B, stored(1, 2), stored(3, start=2, parent=2, moe=EXPERT))
    assert (hits(index), hits(index, OTHER)) == ([2, 1], [1, 0])
    assert hits(index, MoeLabel(3, 7, 1)) == [0, 0]
    first = int(hashes_of(index)[0])
    labels = labels_of(index)
    assert (labels.label(A, first), labels.label(B, first)) == (EXPERT, None)


def test_a_label_behind_a_hole_does_not_count(index):
    apply(index, A, stored(1, 2, 3, moe=EXPERT), BlockRemoved(block_hashes=(2,)))
    assert hits(index) == [1, 0]
    assert len(labels_of(index)) == 2


@pytest.mark.parametrize("way", ["apply", "records", "packed"])
def test_a_label_goes_with_the_last_copy_however_it_is_removed(index, way):
    apply(
        index,
        A,
        stored(1, 2, moe=EXPERT),
        stored(1),
        stored(2, start=1, parent=1),
        stored(2, start=1, parent=1, tier=Tier.HOST),
    )
    remove = {
        "apply": lambda: apply(index, A, BlockRemoved(block_hashes=(1, 2))),
        "records": lambda: apply_record(index, A, BlockRemoved(block_hashes=(1, 2))),
        "packed": lambda: index.apply_packed(A, packed.encode([packed.PackedRemoved([1, 2])])),
    }[way]
    remove()
    assert hits(index) == [2, 0]
    remove()
    index.check()
    assert len(labels_of(index)) == 1  # the second block is in host memory still
    apply(index, A, AllBlocksCleared(tier=Tier.HOST))
    assert len(labels_of(index)) == 0


def test_a_plain_store_leaves_the_label(index):
    apply(index, A, stored(1, moe=EXPERT), stored(1))
    apply_record(index, A, stored(1))
    assert hits(index) == [1, 0]
    apply(index, A, stored(1, moe=OTHER))  # the last one holds
    assert (hits(index), hits(index, OTHER)) == ([0, 0], [1, 0])


def test_a_block_in_a_pool_keeps_its_label_until_it_is_evicted(index):
    apply(index, A, stored(1, moe=EXPERT))
    pooled = CxlStateTransition(block_hashes=(1,), new_state=CxlState.CXL_POOLED, pool_id=0)
    apply(index, A, pooled)
    assert hits(index) == [1, 0]
    evicted = CxlStateTransition(block_hashes=(1,), new_state=CxlState.EVICTED)
    apply(index, A, evicted)
    assert len(labels_of(index)) == 0


def test_who_reads_a_pool_reads_the_labels_of_whoever_filled_it(index):
    apply(index, A, stored(1, 2, moe=EXPERT), stored(3, start=2, parent=2, moe=OTHER))
    pooled = CxlStateTransition(
        block_hashes=(1, 3), new_state=CxlState.CXL_POOLED, pool_id=0, accessible_workers=("b",)
    )
    apply(index, B, stored(2, start=1, parent=1), stored(3, start=2, parent=2, moe=OTHER))
    apply(index, A, pooled)
    assert index.overlap(hashes_of(index)).held.tolist() == [3, 3]
    assert hits(index) == [2, 1]  # the second block is not in the pool
    assert hits(index, OTHER) == [1, 1]  # and the third counts once


def test_clears_and_departures_take_labels(index):
    apply(index, A, stored(1, moe=EXPERT))
    apply(index, B, stored(1, moe=EXPERT))
    apply(index, A, AllBlocksCleared())
    assert hits(index) == [0, 1]
    index.remove_worker("b")
    assert len(labels_of(index)) == 0


def test_labels_that_no_block_has_any_more_are_given_up(index):
    for expert in range(5000):
        index.apply(A, EventBatch(events=(stored(1, moe=MoeLabel(0, expert)),)))
    index.check()
    assert hits(index, MoeLabel(0, 4999)) == [1, 0]
    assert labels_of(index).num_labels <= 1024


def test_the_label_of_a_block_that_left_the_index_by_itself_goes(index):
    apply(index, A, stored(1, 2, moe=EXPERT))
    hashes = hashes_of(index)
    index.block_store.drop(index.numbers.holder(0, Tier.DEVICE), hashes[1:2])
    next(iter(index.hash_spaces)).table.erase(np.array([2], dtype=np.uint64))
    labels_of(index).erase_gone()
    assert (hits(index), len(labels_of(index))) == ([1, 0], 1)


def test_check_sees_a_label_of_a_block_that_is_not_there(index):
    apply(index, A, stored(1, moe=EXPERT))
    hashes = hashes_of(index)
    values = labels_of(index).table.items()[1]
    labels_of(index).table.put(hashes[3:4], values)
    with pytest.raises(IndexCorruptError):
        index.check()
    labels_of(index).table.erase(hashes[3:4])
