"""As test_block_index_machine.py, with so few blocks that states and labels meet at every step."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvplug import codec
from kvplug.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CxlMetadata,
    CxlState,
    CxlStateTransition,
    EventBatch,
    MoeLabel,
    Rank,
    Tier,
)
from kvplug.hashing import as_tokens
from kvplug.index.applied import Applied, Refusal
from kvplug.index.block_index import BlockIndex
from kvplug.records import read_payloads
from tests.index.twin import TwinIndex, engine_hash

RANKS = [Rank("a"), Rank("a", 1), Rank("b")]
# Three blocks in a row; a content is the tokens up to its end.
CONTENTS = [(1,), (1, 2), (1, 2, 3)]
LABELS = [MoeLabel(1, 2), MoeLabel(1, 3)]

ranks = st.sampled_from(RANKS)
tiers = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST])
contents_lists = st.lists(st.sampled_from(CONTENTS), min_size=1, max_size=4)
places = st.builds(
    CxlMetadata,
    st.sampled_from(CxlState),
    st.sampled_from([None, None, 0, 1]),
    st.sampled_from([None, None, (), ("a",), ("b", "a"), ("b",)]),
)


def names_of(contents):
    return tuple(engine_hash("common", content) for content in contents)


class PooledIndexMachine(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.index, self.twin, self.present = BlockIndex(1), TwinIndex(), set(RANKS)
        self.hashes = self.index.hasher.sequence_hashes(as_tokens(CONTENTS[-1]))
        for rank in RANKS:
            self.index.add_rank(rank)

    def apply(self, rank, event):
        return self.index.apply(rank, EventBatch(events=(event,)))

    @rule(rank=ranks, tier=tiers, num_blocks=st.integers(1, 3), cxl=st.none() | places,
          label=st.none() | st.sampled_from(LABELS))  # fmt: skip
    def store(self, rank, tier, num_blocks, cxl, label):
        contents, num_stored, num_refused = CONTENTS[:num_blocks], num_blocks, 0
        event = BlockStored(
            block_hashes=names_of(contents), token_ids=contents[-1], block_size=1, tier=tier,
            cxl=cxl, moe=label,
        )  # fmt: skip
        applied = self.apply(rank, event)
        if rank not in self.present:
            return
        if cxl is None:
            self.twin.store(rank, tier, contents)
        else:
            num_stored, num_refused = self.twin.store_cxl(rank, tier, contents, cxl)
        if label is not None:
            self.twin.label(rank, contents, label)
        assert applied.num_stored == num_stored
        assert applied.refused[Refusal.UNKNOWN_POOL.value] == num_refused

    @rule(rank=ranks, contents=contents_lists, said=places)
    def move(self, rank, contents, said):
        event = CxlStateTransition(
            block_hashes=names_of(contents),
            new_state=said.state,
            pool_id=said.pool_id,
            accessible_workers=said.accessible_workers,
        )
        known = {content for r in RANKS for content in self.twin.held(r)}
        applied = self.apply(rank, event)
        if rank in self.present:
            num_moved, num_unknown, num_in_no_pool = self.twin.move(rank, contents, said, known)
            assert applied.num_moved == num_moved
            assert applied.refused[Refusal.UNKNOWN_BLOCK.value] == num_unknown
            assert applied.refused[Refusal.UNKNOWN_POOL.value] == num_in_no_pool

    @rule(rank=ranks, tier=tiers, contents=contents_lists)
    def remove(self, rank, tier, contents):
        applied = self.apply(rank, BlockRemoved(block_hashes=names_of(contents), tier=tier))
        if rank in self.present:
            assert applied.num_removed == self.twin.remove(rank, tier, contents)

    @rule(rank=ranks, tier=st.none() | tiers)
    def clear(self, rank, tier):
        self.apply(rank, AllBlocksCleared(tier=tier))
        self.twin.clear(rank, tier)

    @rule(worker=st.sampled_from(["a", "b"]))
    def worker_leaves_or_returns(self, worker):
        for rank in [r for r in RANKS if r.worker == worker]:
            if rank in self.present:
                self.index.remove_worker(worker)
                self.twin.clear(rank)
            else:
                self.index.add_rank(rank)
            self.present ^= {rank}

    @invariant()
    def equals_the_twin(self):
        self.index.check()
        overlap = self.index.overlap(self.hashes)
        hits = [self.index.moe_hits(self.hashes, label) for label in LABELS]
        for rank in self.present:
            number = self.index.numbers.number_of(rank)
            depths, credit = self.twin.overlap(rank, CONTENTS, self.present)
            assert overlap.reach[:, number].tolist() == depths
            np.testing.assert_allclose(overlap.credit[number], credit)
            expected = [self.twin.moe_hits(rank, CONTENTS, x, self.present) for x in LABELS]
            assert [each[number] for each in hits] == expected
            metadata = [self.index.cxl_metadata(rank, hash_) for hash_ in self.hashes.tolist()]
            assert metadata == [self.twin.cxl_of(rank, content) for content in CONTENTS]
            labels = [self.index.labels.label(number, hash_) for hash_ in self.hashes.tolist()]
            assert labels == [self.twin.labels.get(rank, {}).get(c) for c in CONTENTS]

    def teardown(self):
        if not hasattr(self, "index"):
            return
        for worker in ("a", "b"):
            self.index.remove_worker(worker)
        self.index.check()
        cxl = self.index.cxl
        sizes = len(self.index), len(cxl.states), len(cxl.placements), len(self.index.labels)
        assert sizes == (0, 0, 0, 0)
        assert set(self.index.numbers.owner.tolist()) == {-1}


class RecordedPooledIndexMachine(PooledIndexMachine):
    """The same, with the bytes of plain events read and applied by the kernels."""

    def apply(self, rank, event):
        records = read_payloads([codec.encode(EventBatch(events=(event,)))])
        if records is None:
            return super().apply(rank, event)
        applied, at = Applied(), 0
        while at < records.num_events:
            at = self.index.apply_records(rank, records, at, 1, applied)
        return applied


TestPooledIndexMachine = PooledIndexMachine.TestCase
TestPooledIndexMachine.settings = settings(stateful_step_count=30)
TestRecordedPooledIndexMachine = RecordedPooledIndexMachine.TestCase
TestRecordedPooledIndexMachine.settings = settings(stateful_step_count=30)
