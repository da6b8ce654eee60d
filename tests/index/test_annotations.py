"""What an annotation is told, by one that is made here: BlockIndex knows none by name."""

from collections import Counter

import numpy as np
import pytest

from kvplug import codec, packed
from kvplug.errors import ConfigError, IndexCorruptError, SnapshotError
from kvplug.events import (
    AllBlocksCleared,
    BlockCopied,
    BlockRemoved,
    CxlState,
    CxlStateTransition,
    EventBatch,
    MoeLabel,
    Tier,
)
from kvplug.index import snapshot
from kvplug.index.annotations import ANNOTATIONS
from kvplug.index.apply_result import ApplyResult
from kvplug.index.block_annotation import AnnotationState, BlockAnnotation
from kvplug.index.block_index import BlockIndex
from kvplug.index.bounds import Bounds
from kvplug.records import read_payloads
from tests.index.four_blocks import A, B, apply, hashes_of, stored

MOVED = CxlStateTransition(block_hashes=(1, 2), new_state=CxlState.CXL_POOLED, pool_id=0)


class StoreCounts(BlockAnnotation):
    """How often each rank has stored each block, as long as it holds it."""

    name = "store_counts"
    array_names = ("ranks", "hashes", "counts")
    needs_all_events = True

    def __init__(self, numbers, block_store):
        super().__init__(numbers, block_store)
        self.counts, self.left = Counter(), []

    def concerns(self, event):
        return True

    def on_stored(self, blocks, event, applied):
        self.counts.update((blocks.rank_number, hash_) for hash_ in blocks.hashes.tolist())

    def on_removed(self, blocks):
        self._keep(lambda rank: self._numbers.holders(rank), blocks.rank_number)

    def on_clear(self, rank_number, tier):
        lost = self._numbers.holders(rank_number, tier)
        kept = [holder for holder in self._numbers.holders(rank_number) if holder not in lost]
        self._keep(lambda _: kept, rank_number)

    def on_rank_removed(self, rank_number):
        self.left.append(rank_number)

    def erase_gone(self):
        for rank_number in {rank_number for rank_number, _ in self.counts}:
            self._keep(lambda rank: self._numbers.holders(rank), rank_number)

    def _keep(self, holders_of, rank_number):
        for rank, hash_ in list(self.counts):
            of_block = np.array([hash_], dtype=np.uint64)
            if rank == rank_number and not self._block_store.which_held(of_block, holders_of(rank)):
                del self.counts[rank, hash_]

    def check(self):
        for rank, hash_ in self.counts:
            of_block = np.array([hash_], dtype=np.uint64)
            if not self._block_store.which_held(of_block, self._numbers.holders(rank)):
                raise IndexCorruptError("store counts: a block that is not held")

    def save(self):
        ranks, hashes = zip(*self.counts, strict=True) if self.counts else ((), ())
        columns = ranks, hashes, tuple(self.counts.values())
        arrays = [np.array(column, dtype=np.uint64) for column in columns]
        return AnnotationState(None, dict(zip(self.array_names, arrays, strict=True)))

    def load(self, state):
        ranks, hashes, counts = (state.arrays[name].tolist() for name in self.array_names)
        self.counts.update(dict(zip(zip(ranks, hashes, strict=True), counts, strict=True)))


def index_of(*kinds, **more):
    index = BlockIndex(4, annotations=kinds, **more)
    for rank in (A, B):
        index.add_rank(rank)
    return index


@pytest.fixture
def index():
    index = index_of(*ANNOTATIONS, StoreCounts)
    yield index
    index.check()


def counts(index, rank=A):
    found, number = index.annotation(StoreCounts).counts, index.numbers.number_of(rank)
    return [found[number, hash_] for hash_ in hashes_of(index).tolist()]


def apply_record(index, event):
    records = read_payloads([codec.encode(EventBatch(events=(event,)))])
    index.apply_records(A, records, 0, 100, ApplyResult())


def apply_packed(index, *events):
    index.apply_packed(A, packed.encode(events))


def test_every_way_in_tells_what_is_stored(index):
    apply(index, A, stored(1, 2))
    apply_record(index, stored(1, 2))
    apply_packed(index, packed.PackedStored([1], hashes_of(index)[:1]))
    apply(index, A, BlockCopied(block_hashes=(2, 77), tier=Tier.HOST))
    apply(index, B, stored(101, moe=MoeLabel(1, 2)))
    assert (counts(index), counts(index, B)) == ([3, 3, 0, 0], [1, 0, 0, 0])


def test_what_is_refused_was_not_stored(index):
    apply(index, A, stored(2, start=1, parent=99), stored(1, 2, tokens=range(4)))
    assert counts(index) == [0, 0, 0, 0]


@pytest.mark.parametrize("way", ["apply", "records", "packed"])
def test_every_way_in_tells_what_is_removed(index, way):
    apply(index, A, stored(1, 2), stored(2, start=1, parent=1, tier=Tier.HOST))
    remove = {
        "apply": lambda: apply(index, A, BlockRemoved(block_hashes=(1, 2, 88))),
        "records": lambda: apply_record(index, BlockRemoved(block_hashes=(1, 2, 88))),
        "packed": lambda: apply_packed(index, packed.PackedRemoved([1, 2, 88])),
    }[way]
    remove()
    assert counts(index) == [0, 2, 0, 0]


def test_what_another_annotation_moves_is_told_to_all(index):
    apply(index, A, stored(1, 2), MOVED)
    assert counts(index) == [1, 1, 0, 0]
    apply(index, A, CxlStateTransition(block_hashes=(1, 9), new_state=CxlState.EVICTED))
    assert counts(index) == [0, 1, 0, 0]


def test_clears_and_departures_are_told(index):
    apply(index, A, stored(1, 2), stored(2, start=1, parent=1, tier=Tier.HOST))
    apply(index, A, AllBlocksCleared(tier=Tier.DEVICE))
    assert counts(index) == [0, 2, 0, 0]
    apply(index, B, stored(1))
    apply_record(index, AllBlocksCleared())
    assert (counts(index), counts(index, B)) == ([0, 0, 0, 0], [1, 0, 0, 0])
    index.remove_worker("b")
    counted = index.annotation(StoreCounts)
    assert (counted.counts, counted.left) == ({}, [1])


def test_evictions_are_told():
    index = index_of(StoreCounts, bounds=Bounds(max_blocks=2))
    apply(index, A, stored(1, 2))
    apply(index, B, stored(11, 12, tokens=range(50, 66)))
    index.check()
    assert sum(index.annotation(StoreCounts).counts.values()) == len(index) == 2


def test_a_snapshot_has_it(index, tmp_path):
    apply(index, A, stored(1, 2), stored(1))
    snapshot.save(index, tmp_path / "index")
    kinds = (*ANNOTATIONS, StoreCounts)
    restored = snapshot.restore(tmp_path / "index", annotations=kinds)
    restored.check()
    assert counts(restored) == [2, 1, 0, 0]
    with pytest.raises(SnapshotError, match=r"among \['cxl', 'moe'\], got \['store_counts'\]"):
        snapshot.restore(tmp_path / "index")


def test_kernels_apply_events_unless_an_annotation_needs_all_of_them():
    assert not index_of(*ANNOTATIONS).annotations.need_all_events
    assert index_of(StoreCounts).annotations.need_all_events
    index = index_of(*ANNOTATIONS)
    apply(index, A, stored(1, 2), MOVED)
    assert not index.annotations.need_all_events
    apply(index, A, stored(1, moe=MoeLabel(1, 2)))
    assert index.annotations.need_all_events
    apply(index, A, BlockRemoved(block_hashes=(1,)), AllBlocksCleared())
    assert not index.annotations.need_all_events


def test_the_event_of_an_annotation_that_is_not_there_is_rejected():
    index = index_of()
    applied = apply(index, A, stored(1, 2, moe=MoeLabel(1, 2)), MOVED)
    assert (applied.num_stored, applied.rejected) == (2, {"no_annotation": 2})
    with pytest.raises(KeyError):
        index.annotation(StoreCounts)


def test_two_annotations_of_one_name_are_rejected():
    with pytest.raises(ConfigError, match="different names"):
        index_of(StoreCounts, StoreCounts)


def test_the_memory_of_an_annotation_counts():
    class Large(StoreCounts):
        nbytes = 10**6

    assert index_of(Large).nbytes == index_of().nbytes + 10**6


def test_what_an_annotation_finds_broken_breaks_the_index(index):
    apply(index, A, stored(1))
    counted = index.annotation(StoreCounts).counts
    counted[0, 5] = 1
    with pytest.raises(IndexCorruptError, match="store counts"):
        index.check()
    del counted[0, 5]
