"""Any sequence of events leaves the index equal to its plain reference implementation, and every
invariant true.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from kvplug.events import (
    BlockStored,
    CxlMetadata,
    CxlState,
    MoeLabel,
    Namespace,
    Rank,
    Tier,
)
from kvplug.hashing import as_tokens, seed_of
from kvplug.index.apply_result import RejectReason
from tests.index.compared_index import AppliesPacked, AppliesRecords, ComparedIndexMachine

BLOCK_SIZE = 2
# Two ranks of one worker; c hashes otherwise than the rest, as another engine kind would.
RANKS = [Rank("a"), Rank("a", 1), Rank("b"), Rank("c")]
ALGORITHMS = {Rank("c"): "other"}
NAMESPACES = [Namespace(), Namespace(salt="s"), Namespace(lora_name="l", salt="s")]

ranks, tiers = st.sampled_from(RANKS), st.sampled_from(list(Tier))
LABELS = [MoeLabel(1, 2), MoeLabel(1, 3), MoeLabel(1, 2, 1)]

labels = st.sampled_from(LABELS)
places = st.builds(
    CxlMetadata,
    st.sampled_from(CxlState),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([None, (), ("a",), ("c", "b"), ("b", "c", "nobody")]),
)
block_lists = st.lists(st.sampled_from([(1, 1), (1, 2), (2, 1)]), min_size=1, max_size=6)


class IndexMachine(ComparedIndexMachine):
    @initialize(max_blocks=st.sampled_from([None, 6, 12]))
    def start(self, max_blocks):
        self.begin(BLOCK_SIZE, RANKS, ALGORITHMS, max_blocks)

    def hash_of(self, content):
        namespace, tokens = content
        hashes = self.index.hasher.sequence_hashes(as_tokens(tokens), seed_of(namespace))
        return int(hashes[-1])

    def parent_of(self, content):
        namespace, tokens = content
        return (namespace, tokens[:-BLOCK_SIZE]) if len(tokens) > BLOCK_SIZE else None

    @rule(rank=ranks, tier=tiers, blocks=block_lists, namespace=st.sampled_from(NAMESPACES),
          data=st.data())  # fmt: skip
    def store(self, rank, tier, blocks, namespace, data):
        parent = data.draw(st.none() | st.sampled_from(self.reference.held(rank) or [None]))
        event, contents = self.stored_event(rank, tier, parent, blocks, namespace)
        self.store_in_both(rank, event, contents)

    @rule(rank=ranks, tier=tiers, blocks=block_lists, cxl=st.none() | places,
          label=st.none() | labels, data=st.data())  # fmt: skip
    def store_pooled_or_labelled(self, rank, tier, blocks, cxl, label, data):
        parent = data.draw(st.none() | st.sampled_from(self.reference.held(rank) or [None]))
        event, contents = self.stored_event(rank, tier, parent, blocks, Namespace())
        self.store_in_both(rank, event, contents, cxl, label)

    @rule(rank=ranks, said=places, data=st.data())
    def move(self, rank, said, data):
        """Blocks of the rank, the same block twice, and blocks that only others have."""
        self.move_in_both(rank, self.some_held(data), said, self.known_to(rank))

    @rule(rank=ranks, tier=tiers, data=st.data())
    def copy(self, rank, tier, data):
        self.copy_in_both(rank, tier, self.some_held(data), self.known_to(rank))

    @rule(rank=ranks, blocks=block_lists, namespace=st.sampled_from(NAMESPACES))
    def expect(self, rank, blocks, namespace):
        contents = [(namespace, sum(blocks[: i + 1], ())) for i in range(len(blocks))]
        self.expect_in_both(rank, contents)

    def known_to(self, rank):
        """What the rank's hash space has engine hashes of."""
        return {c for r in self.ranks_like(rank) for c in self.reference.held(r)}

    def some_held(self, data):
        everything = sorted(self.held_by_any(), key=repr)
        return data.draw(st.lists(st.sampled_from(everything), max_size=5)) if everything else []

    def ranks_like(self, rank):
        """The ranks of its hash space that call blocks as it does."""
        together = [
            hash_space.ranks for hash_space in self.index.hash_spaces if rank in hash_space.ranks
        ]
        algorithm = self.algorithms.get(rank)
        return [r for ranks in together for r in ranks if self.algorithms.get(r) == algorithm]

    def stored_event(self, rank, tier, parent, blocks, namespace):
        # A continuation says nothing of its namespace, as in real vLLM: the parent's holds.
        contents, content = [], parent or (namespace, ())
        for block in blocks:
            content = (content[0], content[1] + block)
            contents.append(content)
        event = BlockStored(
            block_hashes=self.names_of(rank, contents),
            token_ids=tuple(token for block in blocks for token in block),
            block_size=BLOCK_SIZE,
            parent=self.names_of(rank, [parent])[0] if parent else None,
            namespace=None if parent else namespace,
            tier=tier,
        )
        return event, contents

    @rule(rank=ranks, tier=tiers, data=st.data())
    def remove(self, rank, tier, data):
        """Tails, middles, the same block twice, and blocks that the rank does not have."""
        self.remove_in_both(rank, tier, self.some_held(data))

    @rule(rank=ranks, tier=st.none() | tiers)
    def clear(self, rank, tier):
        self.clear_in_both(rank, tier)

    @rule(worker=st.sampled_from(["a", "b", "c"]))
    def worker_leaves(self, worker):
        self.leave_both(worker)

    @rule(rank=ranks)
    def worker_returns(self, rank):
        self.return_to_both(rank)

    @rule(rank=ranks, blocks=block_lists)
    def store_with_an_unknown_parent(self, rank, blocks):
        event = BlockStored(
            block_hashes=tuple(range(1, len(blocks) + 1)),
            token_ids=(7, 7) * len(blocks),
            block_size=BLOCK_SIZE,
            parent=12345,
        )
        applied = self.apply(rank, event)
        if rank in self.present:
            assert applied.rejected == {RejectReason.UNKNOWN_PARENT.value: len(blocks)}

    @rule(blocks=block_lists, namespace=st.sampled_from(NAMESPACES), label=labels)
    def match(self, blocks, namespace, label):
        tokens = as_tokens([token for block in blocks for token in block])
        hashes = self.index.hasher.sequence_hashes(tokens, seed_of(namespace))
        self.index.overlap(hashes, now_s=0.0)  # the next one goes on what this one has found
        overlap = self.index.overlap(hashes, now_s=0.0)
        prefixes = [(namespace, sum(blocks[: i + 1], ())) for i in range(len(blocks))]
        self.compare(prefixes, hashes, overlap, self.hits(hashes, overlap, [label]))

    @invariant()
    def equals_the_reference(self):
        self.index.check()
        self.check_size()
        for rank in self.present:
            for tier in [*Tier, None]:
                names = sorted(self.names_of(rank, self.reference.held(rank, tier)))
                assert sorted(self.index.engine_hashes_of(rank, tier).tolist()) == names


class RecordedIndexMachine(AppliesRecords, IndexMachine):
    """The same, with the bytes of every event read and applied by the kernels where they can."""


class PackedIndexMachine(AppliesPacked, IndexMachine):
    """The same, with packed events, as kvplug's own stream has them."""


TestIndexMachine = pytest.mark.slow(IndexMachine.TestCase)
TestIndexMachine.settings = settings(stateful_step_count=30)
TestRecordedIndexMachine = RecordedIndexMachine.TestCase
TestRecordedIndexMachine.settings = settings(stateful_step_count=30)
TestPackedIndexMachine = pytest.mark.slow(PackedIndexMachine.TestCase)
TestPackedIndexMachine.settings = settings(stateful_step_count=30)
