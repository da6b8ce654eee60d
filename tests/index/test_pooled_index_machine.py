"""As test_block_index_machine.py, with so few blocks that states and labels meet at every step."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from kvplug.events import BlockStored, CxlMetadata, CxlState, MoeLabel, Rank, Tier
from kvplug.hashing import as_tokens
from kvplug.index.moe_labels import MoeLabels
from tests.index.compared_index import AppliesPacked, AppliesRecords, ComparedIndexMachine

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


class PooledIndexMachine(ComparedIndexMachine):
    @initialize(max_blocks=st.sampled_from([None, 2]))
    def start(self, max_blocks):
        self.begin(1, RANKS, max_blocks=max_blocks)
        self.hashes = self.index.hasher.sequence_hashes(as_tokens(CONTENTS[-1]))

    def hash_of(self, content):
        return int(self.index.hasher.sequence_hashes(as_tokens(content))[-1])

    def parent_of(self, content):
        return content[:-1] or None

    @rule(rank=ranks, tier=tiers, num_blocks=st.integers(1, 3), cxl=st.none() | places,
          label=st.none() | st.sampled_from(LABELS))  # fmt: skip
    def store(self, rank, tier, num_blocks, cxl, label):
        contents = CONTENTS[:num_blocks]
        names = self.names_of(rank, contents)
        event = BlockStored(block_hashes=names, token_ids=contents[-1], block_size=1, tier=tier)
        self.store_in_both(rank, event, contents, cxl, label)

    @rule(rank=ranks, tier=tiers, contents=contents_lists)
    def copy(self, rank, tier, contents):
        self.copy_in_both(rank, tier, contents, known=self.held_by_any())

    @rule(rank=ranks, num_blocks=st.integers(1, 3))
    def expect(self, rank, num_blocks):
        self.expect_in_both(rank, CONTENTS[:num_blocks])

    @rule(rank=ranks, contents=contents_lists, said=places)
    def move(self, rank, contents, said):
        self.move_in_both(rank, contents, said, known=self.held_by_any())

    @rule(rank=ranks, tier=tiers, contents=contents_lists)
    def remove(self, rank, tier, contents):
        self.remove_in_both(rank, tier, contents)

    @rule(rank=ranks, tier=st.none() | tiers)
    def clear(self, rank, tier):
        self.clear_in_both(rank, tier)

    @rule(worker=st.sampled_from(["a", "b"]))
    def worker_leaves_or_returns(self, worker):
        if any(rank.worker == worker for rank in self.present):
            self.leave_both(worker)
        else:
            for rank in [rank for rank in RANKS if rank.worker == worker]:
                self.return_to_both(rank)

    @invariant()
    def equals_the_reference(self):
        self.index.check()
        self.check_size()
        self.index.overlap(self.hashes)  # the next one goes on what this one has found
        overlap = self.index.overlap(self.hashes)
        hits = self.hits(self.hashes, overlap, LABELS)
        self.compare(CONTENTS, self.hashes, overlap, hits)
        for rank in self.present:
            label_of = self.index.annotation(MoeLabels).label
            labels = [label_of(rank, hash_) for hash_ in self.hashes.tolist()]
            assert labels == [self.reference.labels.get(rank, {}).get(c) for c in CONTENTS]


class RecordedPooledIndexMachine(AppliesRecords, PooledIndexMachine):
    """The same, with the bytes of plain events read and applied by the kernels."""


class PackedPooledIndexMachine(AppliesPacked, PooledIndexMachine):
    """The same, with packed events, as kvplug's own stream has them."""


TestPooledIndexMachine = PooledIndexMachine.TestCase
TestPooledIndexMachine.settings = settings(stateful_step_count=30)
TestRecordedPooledIndexMachine = RecordedPooledIndexMachine.TestCase
TestRecordedPooledIndexMachine.settings = settings(stateful_step_count=30)
TestPackedPooledIndexMachine = pytest.mark.slow(PackedPooledIndexMachine.TestCase)
TestPackedPooledIndexMachine.settings = settings(stateful_step_count=30)
