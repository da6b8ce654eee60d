"""Any sequence of events leaves the index equal to its plain twin, and every invariant true."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvplug import codec
from kvplug.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Namespace,
    Rank,
    Tier,
)
from kvplug.hashing import as_tokens, seed_of
from kvplug.index.applied import Applied, Refusal
from kvplug.index.block_index import BlockIndex
from kvplug.records import read_payloads
from tests.index.twin import TwinIndex, engine_hash

BLOCK_SIZE = 2
# Two ranks of one worker; c hashes otherwise than the rest, as another engine kind would.
RANKS = [Rank("a"), Rank("a", 1), Rank("b"), Rank("c")]
ALGORITHM = {Rank("c"): "other"}
NAMESPACES = [Namespace(), Namespace(salt="s"), Namespace(lora_name="l", salt="s")]

ranks, tiers = st.sampled_from(RANKS), st.sampled_from(list(Tier))
block_lists = st.lists(st.sampled_from([(1, 1), (1, 2), (2, 1)]), min_size=1, max_size=6)


class IndexMachine(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.index, self.twin = BlockIndex(BLOCK_SIZE), TwinIndex()
        self.present = set(RANKS)
        for rank in RANKS:
            self.index.add_rank(rank)

    def apply(self, rank, *events):
        return self.index.apply(rank, EventBatch(events=events))

    def name(self, rank, content):
        return engine_hash(ALGORITHM.get(rank, "common"), content)

    @rule(rank=ranks, tier=tiers, blocks=block_lists, namespace=st.sampled_from(NAMESPACES),
          data=st.data())  # fmt: skip
    def store(self, rank, tier, blocks, namespace, data):
        parent = data.draw(st.none() | st.sampled_from(self.twin.held(rank) or [None]))
        event, contents = self.stored_event(rank, tier, parent, blocks, namespace)
        applied = self.apply(rank, event)
        if rank in self.present:
            self.twin.store(rank, tier, contents)
            assert applied.num_stored == len(blocks)
        else:
            assert applied.refused == {Refusal.UNKNOWN_RANK.value: 1}

    def stored_event(self, rank, tier, parent, blocks, namespace):
        # A continuation says nothing of its namespace, as in real vLLM: the parent's holds.
        contents, content = [], parent or (namespace, ())
        for block in blocks:
            content = (content[0], content[1] + block)
            contents.append(content)
        event = BlockStored(
            block_hashes=tuple(self.name(rank, c) for c in contents),
            token_ids=tuple(token for block in blocks for token in block),
            block_size=BLOCK_SIZE,
            parent=self.name(rank, parent) if parent else None,
            namespace=None if parent else namespace,
            tier=tier,
        )
        return event, contents

    @rule(rank=ranks, tier=tiers, data=st.data())
    def remove(self, rank, tier, data):
        """Tails, middles, the same block twice, and blocks that the rank does not have."""
        everything = sorted({c for r in RANKS for c in self.twin.held(r)}, key=repr)
        contents = (
            data.draw(st.lists(st.sampled_from(everything), max_size=5)) if everything else []
        )
        names = tuple(self.name(rank, c) for c in contents)
        applied = self.apply(rank, BlockRemoved(block_hashes=names, tier=tier))
        if rank in self.present:
            num_removed = self.twin.remove(rank, tier, contents)
            assert applied.num_removed == num_removed
            assert applied.refused[Refusal.UNKNOWN_BLOCK.value] == len(contents) - num_removed

    @rule(rank=ranks, tier=st.none() | tiers)
    def clear(self, rank, tier):
        self.apply(rank, AllBlocksCleared(tier=tier))
        self.twin.clear(rank, tier)

    @rule(worker=st.sampled_from(["a", "b", "c"]))
    def worker_leaves(self, worker):
        self.index.remove_worker(worker)
        for rank in [r for r in RANKS if r.worker == worker]:
            self.present.discard(rank)
            self.twin.clear(rank)

    @rule(rank=ranks)
    def worker_returns(self, rank):
        self.index.add_rank(rank)
        self.present.add(rank)

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
            assert applied.refused == {Refusal.UNKNOWN_PARENT.value: len(blocks)}

    @rule(blocks=block_lists, namespace=st.sampled_from(NAMESPACES))
    def match(self, blocks, namespace):
        tokens = as_tokens([token for block in blocks for token in block])
        hashes = self.index.hasher.sequence_hashes(tokens, seed_of(namespace))
        overlap = self.index.overlap(hashes, now_s=0.0)
        prefixes = [(namespace, sum(blocks[: i + 1], ())) for i in range(len(blocks))]
        for rank in self.present:
            number = self.index.numbers.number_of(rank)
            depth, credit = self.twin.overlap(rank, prefixes)
            assert overlap.depth[number] == depth
            np.testing.assert_allclose(overlap.credit[number], credit)

    @invariant()
    def equals_the_twin(self):
        self.index.check()
        assert len(self.index) == len({c for r in RANKS for c in self.twin.held(r)})
        for rank in self.present:
            for tier in Tier:
                names = sorted(self.name(rank, c) for c in self.twin.held(rank, tier))
                assert sorted(self.index.engine_hashes_of(rank, tier).tolist()) == names

    def teardown(self):
        """After the last worker has gone, no table holds anything."""
        if not hasattr(self, "index"):
            return
        for worker in ("a", "b", "c"):
            self.index.remove_worker(worker)
        self.index.check()
        holdings = self.index.holdings
        sizes = len(self.index), len(holdings.copies), len(holdings.sets), len(holdings.runs)
        assert sizes == (0, 0, 0, 0)
        assert not self.index.domains


class RecordedIndexMachine(IndexMachine):
    """The same, with the bytes of every event read and applied by the kernels where they can."""

    def apply(self, rank, *events):
        records = read_payloads([codec.encode(EventBatch(events=events))])
        if records is None:
            return super().apply(rank, *events)
        applied, at = Applied(), 0
        while at < records.num_events:
            at = self.index.apply_records(rank, records, at, 1, applied)
        return applied


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(stateful_step_count=30)
TestRecordedIndexMachine = RecordedIndexMachine.TestCase
TestRecordedIndexMachine.settings = settings(stateful_step_count=30)
