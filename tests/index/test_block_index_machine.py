"""Any sequence of events leaves the index equal to its plain twin, and every invariant true."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec import structs

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
LABELS = [MoeLabel(1, 2), MoeLabel(1, 3), MoeLabel(1, 2, 1)]

labels = st.sampled_from(LABELS)
places = st.builds(
    CxlMetadata,
    st.sampled_from(CxlState),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([None, (), ("a",), ("c", "b"), ("b", "c", "nobody")]),
)
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

    @rule(rank=ranks, tier=tiers, blocks=block_lists, cxl=st.none() | places,
          label=st.none() | labels, data=st.data())  # fmt: skip
    def store_pooled_or_labelled(self, rank, tier, blocks, cxl, label, data):
        parent = data.draw(st.none() | st.sampled_from(self.twin.held(rank) or [None]))
        event, contents = self.stored_event(rank, tier, parent, blocks, Namespace())
        applied = self.apply(rank, structs.replace(event, cxl=cxl, moe=label))
        if rank not in self.present:
            return
        num_stored, num_refused = len(blocks), 0
        if cxl is None:
            self.twin.store(rank, tier, contents)
        else:
            num_stored, num_refused = self.twin.store_cxl(rank, tier, contents, cxl)
        if label is not None:
            self.twin.label(rank, contents, label)
        assert applied.num_stored == num_stored
        assert applied.refused[Refusal.UNKNOWN_POOL.value] == num_refused

    @rule(rank=ranks, said=places, data=st.data())
    def move(self, rank, said, data):
        """Blocks of the rank, the same block twice, and blocks that only others have."""
        everything = sorted({c for r in RANKS for c in self.twin.held(r)}, key=repr)
        contents = (
            data.draw(st.lists(st.sampled_from(everything), max_size=5)) if everything else []
        )
        event = CxlStateTransition(
            block_hashes=tuple(self.name(rank, c) for c in contents),
            new_state=said.state,
            pool_id=said.pool_id,
            accessible_workers=said.accessible_workers,
        )
        known = {c for r in self.ranks_like(rank) for c in self.twin.held(r)}
        applied = self.apply(rank, event)
        if rank in self.present:
            num_moved, num_unknown, num_in_no_pool = self.twin.move(rank, contents, said, known)
            assert applied.num_moved == num_moved
            assert applied.refused[Refusal.UNKNOWN_BLOCK.value] == num_unknown
            assert applied.refused[Refusal.UNKNOWN_POOL.value] == num_in_no_pool

    def ranks_like(self, rank):
        """The ranks of its domain that call blocks as it does."""
        together = [domain.ranks for domain in self.index.domains if rank in domain.ranks]
        return [r for ranks in together for r in ranks if ALGORITHM.get(r) == ALGORITHM.get(rank)]

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

    @rule(blocks=block_lists, namespace=st.sampled_from(NAMESPACES), label=labels)
    def match(self, blocks, namespace, label):
        tokens = as_tokens([token for block in blocks for token in block])
        hashes = self.index.hasher.sequence_hashes(tokens, seed_of(namespace))
        overlap = self.index.overlap(hashes, now_s=0.0)
        prefixes = [(namespace, sum(blocks[: i + 1], ())) for i in range(len(blocks))]
        for rank in self.present:
            number = self.index.numbers.number_of(rank)
            depths, credit = self.twin.overlap(rank, prefixes, self.present)
            assert overlap.reach[:, number].tolist() == depths
            assert overlap.depth[number] == overlap.held[number]
            np.testing.assert_allclose(overlap.credit[number], credit)
            hits = self.index.moe_hits(hashes, label, overlap)
            assert hits[number] == self.twin.moe_hits(rank, prefixes, label, self.present)
            for content, hash_ in zip(prefixes, hashes.tolist(), strict=True):
                assert self.index.cxl_metadata(rank, hash_) == self.twin.cxl_of(rank, content)

    @invariant()
    def equals_the_twin(self):
        self.index.check()
        assert len(self.index) == len({c for r in RANKS for c in self.twin.held(r)})
        for rank in self.present:
            for tier in [*Tier, None]:
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
        cxl = self.index.cxl
        assert (len(cxl.states), len(cxl.placements), len(self.index.labels)) == (0, 0, 0)
        assert set(self.index.numbers.owner.tolist()) == {-1}
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
