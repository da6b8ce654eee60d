"""Whatever happens, the entries are those of the plain reference implementation, and every
invariant is true.
"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvplug.index.expiring import ExpiringBlocks, mark_of
from tests.index.expiring_reference import ReferenceExpiring

TTL_S, CAPACITY, NUM_RANKS, MAX_MORE = 2.0, 12, 3, 2
ranks = st.integers(0, NUM_RANKS - 1)
block_lists = st.lists(st.integers(1, 6), max_size=6, unique=True)
times = st.sampled_from([0.25, 1.0, 1.75, 2.0, 5.0, -0.5])


def u64(numbers):
    return np.array(numbers, dtype=np.uint64)


class ExpiringMachine(RuleBasedStateMachine):
    @initialize(capacity=st.sampled_from([1, 2, CAPACITY]))
    def start(self, capacity):
        self.blocks = ExpiringBlocks(TTL_S, capacity, max_more_expired=MAX_MORE)
        self.reference, self.now_s = ReferenceExpiring(TTL_S, capacity, MAX_MORE), 100.0

    @rule(rank=ranks, blocks=block_lists)
    def insert(self, rank, blocks):
        self.blocks.insert(rank, u64(blocks), self.now_s)
        self.reference.insert(rank, blocks, self.now_s)

    @rule(rank=ranks, blocks=block_lists)
    def confirm(self, rank, blocks):
        self.blocks.confirm(rank, u64(blocks))
        self.reference.confirm(rank, blocks)

    @rule(rank=ranks, blocks=block_lists)
    def delete_from_the_table_alone(self, rank, blocks):
        """As kernels/applying.py does when an engine reports blocks."""
        self.blocks.table.erase(u64(blocks) ^ mark_of(rank))
        self.reference.confirm(rank, blocks)

    @rule(rank=ranks)
    def forget(self, rank):
        self.blocks.forget(rank)
        self.reference.forget(rank)

    @rule(seconds=times)
    def wait(self, seconds):
        self.now_s += seconds

    @rule(max_entries=st.integers(0, 5))
    def expire(self, max_entries):
        self.blocks.expire(self.now_s, max_entries)
        self.reference.expire(self.now_s, max_entries)

    @rule(blocks=block_lists, starts=st.lists(st.integers(0, 3), min_size=1, max_size=5))
    def ask(self, blocks, starts):
        depths = np.array(starts, dtype=np.int64)
        reached = self.blocks.extend(u64(blocks), depths, self.now_s)
        expected = [
            self.reference.depth(rank, blocks, start, self.now_s)
            for rank, start in enumerate(starts)
        ]
        assert reached.tolist() == expected
        assert depths.tolist() == starts

    @invariant()
    def holds_together(self):
        if hasattr(self, "blocks"):
            self.blocks.check()
            assert len(self.blocks) == self.reference.num_live
            assert self.blocks.num_lost == self.reference.num_lost


TestExpiringMachine = ExpiringMachine.TestCase
TestExpiringMachine.settings = settings(stateful_step_count=30)
