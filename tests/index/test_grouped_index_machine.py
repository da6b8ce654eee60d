"""Ranks of hybrid and of plain models in one index: any events of their KV cache groups leave it
equal to plain counters, and a prefix counts if every group has what it needs.
"""

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvplug import codec
from kvplug.events import (
    AllBlocksCleared,
    BlockCopied,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Namespace,
    Rank,
    Tier,
)
from kvplug.hashing import as_tokens
from kvplug.index import snapshot
from kvplug.index.apply_result import RejectReason
from kvplug.index.block_index import BlockIndex
from kvplug.index.bounds import Bounds
from tests.index.compared_index import FOR_WANT_OF_ROOM, AppliesPacked
from tests.index.four_blocks import check_all_leave
from tests.index.reference import engine_hash
from tests.index.watched_evictions import WatchedEvictions

BLOCK_SIZE = 2
ALL = 1000
FULL, STATES = ("full_attention", None), ("mamba", None)
# Of each rank its groups by number: kind, window, and how many blocks a prefix needs. A window of 4
# tokens needs 2 blocks of 2; one of 3 or 2 needs 1.
GROUPS = {
    Rank("hybrid"): {0: (("sliding_window", 4), 2), 1: (FULL, ALL), 2: (STATES, 1)},
    Rank("hybrid", 1): {0: (FULL, ALL), 1: (("sliding_window_mla", 3), 1), 2: (FULL, ALL)},
    Rank("windows"): {0: (("sliding_window", 4), 2), 1: (("sliding_window", 2), 1)},
    Rank("plain"): {0: (FULL, ALL)},
}
MAIN = {Rank("hybrid"): 1, Rank("hybrid", 1): 0, Rank("plain"): 0}
ranks = st.sampled_from(list(GROUPS))
block_lists = st.lists(st.sampled_from([(1, 1), (1, 2)]), min_size=1, max_size=6)


def prefixes(blocks):
    return [sum(blocks[: i + 1], ()) for i in range(len(blocks))]


def names_of(contents):
    return tuple(engine_hash("common", content) for content in contents)


class GroupedIndexMachine(RuleBasedStateMachine):
    tells_reports = True

    @initialize(max_blocks=st.sampled_from([None, 8]))
    def start(self, max_blocks):
        self.bounds = Bounds(max_blocks=max_blocks)
        self.index = BlockIndex(BLOCK_SIZE, bounds=self.bounds)
        self.watch_evictions()
        self.copies = {(rank, group): Counter() for rank in GROUPS for group in GROUPS[rank]}
        self.in_host = {rank: Counter() for rank in GROUPS}
        self.reporting = set()  # ranks that have told something again
        self.offloading = set()  # ranks that have named copies in host memory
        for rank in GROUPS:
            self.index.add_rank(rank)
            self.learn(rank)

    def watch_evictions(self):
        contents = self.evictions.contents if hasattr(self, "evictions") else {}
        self.evictions = WatchedEvictions(self.index, self.parent_of, self.evict)
        self.evictions.contents = contents

    def parent_of(self, content):
        return content[:-BLOCK_SIZE] or None

    def evict(self, contents):
        for counted in [*self.copies.values(), *self.in_host.values()]:
            for content in contents:
                counted.pop(content, None)

    def learn(self, rank):
        """Every engine stores in all groups at once; the order of the events is that of groups."""
        for group in GROUPS[rank]:
            self.store(rank, [(9, 9)], group, 0)
        for group in GROUPS[rank]:
            self.remove_contents(rank, group, [(9, 9)])

    def apply(self, rank, event):
        """Through the bytes of the wire."""
        batch = codec.decode(codec.encode(EventBatch(events=(event,))))
        assert not batch.skipped
        return self.index.apply(rank, batch)

    def held_by(self, rank):
        """What anybody can name as a parent: a block that the rank holds in some group."""
        mine = [c for (each, _), copies in self.copies.items() if each == rank for c in +copies]
        return sorted({*mine, *(+self.in_host[rank])})

    def named(self):
        return {content for rank in GROUPS for content in self.held_by(rank)}

    def store(self, rank, blocks, group, start):
        contents = prefixes(blocks)
        (attention, window), _ = GROUPS[rank][group]
        applied = self.apply(rank, BlockStored(
            block_hashes=names_of(contents[start:]),
            token_ids=tuple(token for block in blocks[start:] for token in block),
            block_size=BLOCK_SIZE,
            parent=names_of(contents[start - 1 : start])[0] if start else None,
            namespace=None if start else Namespace(),
            group=group,
            attention=attention,
            sliding_window=window,
        ))  # fmt: skip
        if applied.rejected.keys() & FOR_WANT_OF_ROOM:
            assert self.bounds.max_blocks is not None
            assert sum(applied.rejected.values()) == len(contents) - start
            return
        assert applied.num_stored == len(contents) - start
        tokens = as_tokens([token for block in blocks for token in block])
        hashes = self.index.hasher.sequence_hashes(tokens).tolist()
        self.evictions.contents.update(zip(hashes, contents, strict=True))
        copies = self.copies[rank, group]
        is_told_again = (
            self.tells_reports
            and not start
            and len(GROUPS[rank]) == 1
            and all(copies[c] for c in contents)
        )
        if is_told_again and (len(contents) > 1 or rank in self.reporting):
            self.reporting.add(rank)
        else:
            copies.update(contents[start:])

    @rule(rank=ranks, blocks=block_lists, data=st.data())
    def store_in_groups(self, rank, blocks, data):
        known = self.named()
        most = next((i for i, c in enumerate(prefixes(blocks)) if c not in known), len(blocks))
        start = data.draw(st.integers(0, min(most, len(blocks) - 1)))
        for group in data.draw(st.lists(st.sampled_from(list(GROUPS[rank])), max_size=4)):
            self.store(rank, blocks, group, start)

    @rule(rank=ranks, blocks=block_lists, data=st.data())
    def store_by_name(self, rank, blocks, data):
        """A window leaves out blocks: those that are left are known by their hashes, or not."""
        partial = [g for g, (kind, _) in GROUPS[rank].items() if kind != FULL]
        if not partial:
            return
        group, contents = data.draw(st.sampled_from(partial)), prefixes(blocks)
        (attention, window), _ = GROUPS[rank][group]
        known = [c for c in contents if c in self.named()]
        applied = self.apply(rank, BlockCopied(
            block_hashes=names_of(contents), group=group, attention=attention,
            sliding_window=window,
        ))  # fmt: skip
        assert applied.num_stored == len(known)
        self.copies[rank, group].update(known)

    @rule(rank=ranks, blocks=block_lists)
    def offload(self, rank, blocks):
        if rank in MAIN:
            known = [c for c in prefixes(blocks) if c in self.named()]
            names = names_of(prefixes(blocks))
            event = BlockCopied(block_hashes=names, tier=Tier.HOST, group=MAIN[rank])
            applied = self.apply(rank, event)
            if known:
                self.offloading.add(rank)
            if applied.rejected[RejectReason.CHUNKED_OFFLOAD]:
                self.in_host[rank].clear()
            else:
                self.in_host[rank].update(known)

    def remove_contents(self, rank, group, contents):
        applied = self.apply(rank, BlockRemoved(block_hashes=names_of(contents), group=group))
        held = [content for content in contents if self.copies[rank, group][content]]
        assert applied.num_removed == len(held)
        self.copies[rank, group].subtract(held)

    @rule(rank=ranks, data=st.data())
    def remove(self, rank, data):
        everything = self.held_by(rank)
        if everything:
            group = data.draw(st.sampled_from(list(GROUPS[rank])))
            chosen = st.lists(st.sampled_from(everything), min_size=1, max_size=4, unique=True)
            self.remove_contents(rank, group, data.draw(chosen))

    @rule(rank=ranks, tier=st.sampled_from([None, Tier.DEVICE, Tier.HOST]))
    def clear(self, rank, tier):
        self.apply(rank, AllBlocksCleared(tier=tier))
        if tier is None and rank in self.offloading:
            tier = Tier.DEVICE
        if tier is not Tier.HOST:
            for group in GROUPS[rank]:
                self.copies[rank, group].clear()
        if tier is not Tier.DEVICE:
            self.in_host[rank].clear()

    @rule(rank=ranks)
    def worker_comes_back(self, rank):
        self.index.remove_worker(rank.worker)
        for each in [each for each in GROUPS if each.worker == rank.worker]:
            self.index.add_rank(each)
            for group in GROUPS[each]:
                self.copies[each, group].clear()
            self.in_host[each].clear()
            self.reporting.discard(each)
            self.offloading.discard(each)
            self.learn(each)

    @rule()
    def save_and_restore(self):
        with tempfile.TemporaryDirectory() as folder:
            snapshot.save(self.index, Path(folder) / "index")
            self.index = snapshot.restore(Path(folder) / "index", bounds=self.bounds)
        self.watch_evictions()
        self.reporting.clear()

    def compare(self, content):
        """What each rank can reuse of the prompt with these tokens."""
        contents = [content[:end] for end in range(BLOCK_SIZE, len(content) + 1, BLOCK_SIZE)]
        overlap = self.index.overlap(self.index.hasher.sequence_hashes(as_tokens(content)))
        for rank in GROUPS:
            number = self.index.numbers.number_of(rank)
            assert overlap.held[number] == self.longest(rank, contents)

    def longest(self, rank, contents):
        main = MAIN.get(rank)
        return max(
            length
            for length in range(len(contents) + 1)
            if all(
                self.allows(rank, group, needed, contents[:length], has_host=group == main)
                for group, (_, needed) in GROUPS[rank].items()
            )
        )

    def allows(self, rank, group, needed, prefix, *, has_host):
        last = prefix[max(0, len(prefix) - needed) :]
        return all(
            self.copies[rank, group][content] or (has_host and self.in_host[rank][content])
            for content in last
        )

    @invariant()
    def equals_the_counters(self):
        self.index.check()
        named = self.named()
        self.evictions.note(named)
        assert len(self.index) == len(named) <= (self.bounds.max_blocks or len(named))
        for rank in GROUPS:
            assert sorted(self.index.engine_hashes_of(rank).tolist()) == sorted(
                names_of(self.held_by(rank))
            )
            for group in GROUPS[rank]:
                held = +self.copies[rank, group]
                names = self.index.engine_hashes_of(rank, Tier.DEVICE, group=group).tolist()
                assert sorted(names) == sorted(names_of(held))

    @invariant()
    def matches_as_much_as_every_group_allows(self):
        deepest = sorted(self.named(), key=len)[-6:]
        for content in [*deepest, (1, 1, 1, 2)]:
            self.compare(content)

    def teardown(self):
        if hasattr(self, "index"):
            check_all_leave(self.index, {rank.worker for rank in GROUPS})


class PackedGroupedIndexMachine(AppliesPacked, GroupedIndexMachine):
    """The same, with packed events, as kvplug's own stream has them."""


TestGroupedIndexMachine = pytest.mark.slow(GroupedIndexMachine.TestCase)
TestGroupedIndexMachine.settings = settings(stateful_step_count=30)
TestPackedGroupedIndexMachine = pytest.mark.slow(PackedGroupedIndexMachine.TestCase)
TestPackedGroupedIndexMachine.settings = settings(stateful_step_count=30)
