"""An index beside its plain reference implementation: both are told the same, and what they answer
is compared.
"""

from functools import lru_cache
from types import MappingProxyType

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine
from msgspec import structs

from kvplug import codec, packed
from kvplug.events import (
    AllBlocksCleared,
    BlockCopied,
    BlockRemoved,
    CxlStateTransition,
    EventBatch,
    Tier,
)
from kvplug.index.apply_result import ApplyResult, RejectReason
from kvplug.index.block_index import BlockIndex
from kvplug.index.bounds import Bounds
from kvplug.index.cxl import CxlBlocks
from kvplug.index.moe_labels import MoeLabels
from kvplug.index.packed_run import PackedRun
from kvplug.records import read_payloads
from tests.index.four_blocks import check_all_leave
from tests.index.packing import as_packed
from tests.index.reference import ReferenceIndex, engine_hash
from tests.index.watched_evictions import WatchedEvictions

FOR_WANT_OF_ROOM = {RejectReason.INDEX_FULL, RejectReason.PARENT_EVICTED}
known_engine_hash = lru_cache(maxsize=10_000)(engine_hash)


class ComparedIndexMachine(RuleBasedStateMachine):
    """Call `begin` first; the rules are those of the machines that are made of it.

    They have `hash_of`, the sequence hash of a content, and `parent_of`, the content before it.
    tells_reports: whether a store of what is there may be a report that brings no copies.
    """

    tells_reports = True

    def begin(self, block_size, ranks, algorithms=MappingProxyType({}), max_blocks=None):
        """`algorithms`: of ranks that name blocks otherwise, as another engine kind would."""
        self.index = BlockIndex(block_size, bounds=Bounds(max_blocks=max_blocks))
        self.reference, self.max_blocks = ReferenceIndex(), max_blocks
        self.evictions = WatchedEvictions(self.index, self.parent_of, self.reference.evict)
        self.ranks, self.present, self.algorithms = ranks, set(ranks), algorithms
        self.offloading = set()  # ranks that have named copies in lower tiers
        for rank in ranks:
            self.index.add_rank(rank)

    def apply(self, rank, *events):
        return self.index.apply(rank, EventBatch(events=events))

    def names_of(self, rank, contents):
        algorithm = self.algorithms.get(rank, "common")
        return tuple(known_engine_hash(algorithm, content) for content in contents)

    def held_by_any(self):
        return {content for rank in self.ranks for content in self.reference.held(rank)}

    def store_in_both(self, rank, event, contents, cxl=None, label=None):
        applied = self.apply(rank, structs.replace(event, cxl=cxl, moe=label))
        if rank not in self.present:
            assert applied.rejected == {RejectReason.UNKNOWN_RANK.value: 1}
            return
        if applied.rejected.keys() & FOR_WANT_OF_ROOM:
            assert self.max_blocks is not None
            assert sum(applied.rejected.values()) == len(contents)
            return
        self.evictions.contents.update({self.hash_of(content): content for content in contents})
        self.reference.confirm(rank, contents)
        num_stored, num_rejected = len(contents), 0
        if cxl is None:
            from_start = self.tells_reports and event.parent is None and label is None
            self.reference.store(rank, event.tier, contents, from_start=from_start)
        else:
            num_stored, num_rejected = self.reference.store_cxl(rank, event.tier, contents, cxl)
        if label is not None:
            self.reference.label(rank, contents, label)
        assert applied.num_stored == num_stored
        assert applied.rejected[RejectReason.UNKNOWN_POOL.value] == num_rejected

    def copy_in_both(self, rank, tier, contents, known):
        names = self.names_of(rank, contents)
        applied = self.apply(rank, BlockCopied(block_hashes=names, tier=tier))
        if rank not in self.present:
            return
        copied = [content for content in contents if content in known]
        if copied and tier is not Tier.DEVICE:
            self.offloading.add(rank)
        if applied.rejected[RejectReason.CHUNKED_OFFLOAD]:
            if self.reference.held(rank, tier):
                self.reference.clear(rank, tier)
            return
        self.reference.copy(rank, tier, copied)
        assert applied.num_stored == len(copied)
        assert applied.rejected[RejectReason.NO_TOKENS] == len(contents) - len(copied)

    def expect_in_both(self, rank, contents):
        if rank in self.present:
            hashes = np.array([self.hash_of(content) for content in contents], dtype=np.uint64)
            self.index.speculative.insert(self.index.numbers.number_of(rank), hashes, 0.0)
            self.reference.expect(rank, contents)

    def move_in_both(self, rank, contents, said, known):
        event = CxlStateTransition(
            block_hashes=self.names_of(rank, contents),
            new_state=said.state,
            pool_id=said.pool_id,
            accessible_workers=said.accessible_workers,
        )
        applied = self.apply(rank, event)
        if rank in self.present:
            num_moved, num_unknown, num_in_no_pool = self.reference.move(
                rank, contents, said, known
            )
            self.reference.confirm(rank, [content for content in contents if content in known])
            assert applied.num_moved == num_moved
            assert applied.rejected[RejectReason.UNKNOWN_BLOCK.value] == num_unknown
            assert applied.rejected[RejectReason.UNKNOWN_POOL.value] == num_in_no_pool

    def remove_in_both(self, rank, tier, contents):
        names = self.names_of(rank, contents)
        applied = self.apply(rank, BlockRemoved(block_hashes=names, tier=tier))
        if rank in self.present:
            num_removed = self.reference.remove(rank, tier, contents)
            assert applied.num_removed == num_removed
            assert applied.rejected[RejectReason.UNKNOWN_BLOCK.value] == len(contents) - num_removed

    def clear_in_both(self, rank, tier):
        self.apply(rank, AllBlocksCleared(tier=tier))
        if rank in self.present:
            is_of_device = tier is None and rank in self.offloading
            self.reference.clear(rank, Tier.DEVICE if is_of_device else tier)

    def leave_both(self, worker):
        self.index.remove_worker(worker)
        for rank in [rank for rank in self.present if rank.worker == worker]:
            self.present.discard(rank)
            self.offloading.discard(rank)
            self.reference.leave(rank)

    def return_to_both(self, rank):
        self.index.add_rank(rank)
        self.present.add(rank)

    def check_size(self):
        held = self.held_by_any()
        self.evictions.note(held)
        assert len(self.index) == len(held) <= (self.max_blocks or len(held))

    def hits(self, hashes, overlap, labels):
        """By label, how many of the leading blocks of each rank carry it."""
        count = self.index.annotation(MoeLabels).num_aligned
        return {label: count(hashes, label, overlap.held) for label in labels}

    def compare(self, contents, hashes, overlap, hits):
        """`hits`: by label, what the index counts; the contents are the prefixes of one prompt."""
        for rank in self.present:
            number = self.index.numbers.number_of(rank)
            depths, credit = self.reference.overlap(rank, contents, self.present)
            assert overlap.prefix_lengths[:, number].tolist() == depths
            num_expected = self.reference.num_expected(rank, contents[depths[3] :])
            assert overlap.depth[number] == overlap.held[number] + num_expected
            np.testing.assert_allclose(overlap.credit[number], credit + num_expected)
            for label, counted in hits.items():
                expected = self.reference.moe_hits(rank, contents, label, self.present)
                assert counted[number] == expected
            metadata = [
                self.index.annotation(CxlBlocks).metadata(rank, hash_) for hash_ in hashes.tolist()
            ]
            assert metadata == [self.reference.cxl_of(rank, content) for content in contents]

    def teardown(self):
        if hasattr(self, "index"):
            check_all_leave(self.index, {rank.worker for rank in self.ranks})


class AppliesRecords:
    """A machine's `apply`, with the bytes of every event read and applied by the kernels."""

    def apply(self, rank, *events):
        records = read_payloads([codec.encode(EventBatch(events=events))])
        if records is None:  # not plain, so none for the kernels
            return super().apply(rank, *events)
        applied, at = ApplyResult(), 0
        while at < records.num_events:
            at = self.index.apply_records(rank, records, at, 1, applied)
        return applied


class AppliesPacked:
    """A machine's `apply`, with packed events, a few blocks in each slice."""

    tells_reports = False

    def apply(self, rank, *events):
        packed_events = [each for event in events for each in as_packed(self.index, rank, event)]
        run, applied = PackedRun(packed.encode(packed_events)), ApplyResult()
        while not run.is_done:
            self.index.events.apply_packed_run(rank, run, run.num_events, 1, applied)
        if rank not in self.index.numbers:
            applied.reject(RejectReason.UNKNOWN_RANK, len(events) - len(packed_events))
        return applied
