"""The pool against a reference implementation made of plain lists."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvplug.events import AllBlocksCleared, BlockRemoved
from kvplug.sim.pool import BlockPool
from kvplug.vllm_hashes import event_id

HASHES = [bytes([number]) * 32 for number in range(6)]


class TwinPool:
    """The same, said as plainly as possible."""

    def __init__(self, num_blocks):
        self.free = list(range(1, num_blocks))
        self.uses = dict.fromkeys(self.free, 0)
        self.cached = []  # (hash, block), as they were cached
        self.events = []

    def find(self, block_hash):
        return next((block for known, block in self.cached if known == block_hash), None)

    def take(self, num_blocks):
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        for block in taken:
            self.uses[block] = 1
            for entry in [entry for entry in self.cached if entry[1] == block]:
                self.cached.remove(entry)
                self.events.append(BlockRemoved(block_hashes=(event_id(entry[0]),)))
        return taken

    def touch(self, blocks):
        for block in blocks:
            self.uses[block] += 1
            if block in self.free:
                self.free.remove(block)

    def release(self, blocks):
        for block in blocks:
            self.uses[block] -= 1
        freed = [block for block in blocks if not self.uses[block]]
        holding = [block for block in freed if self.holds(block)]
        self.free = [b for b in freed if b not in holding] + self.free + holding

    def cache(self, block, block_hash):
        self.cached.append((block_hash, block))

    def holds(self, block):
        return any(known == block for _, known in self.cached)

    def reset(self):
        if any(self.uses.values()):
            return False
        self.cached = []
        self.events.append(AllBlocksCleared())
        return True


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks):
        self.pool, self.reference = BlockPool(num_blocks), TwinPool(num_blocks)
        self.users = []  # the blocks of each request
        self.events = []

    @rule(num_blocks=st.integers(0, 5))
    def take(self, num_blocks):
        num_blocks = min(num_blocks, self.pool.num_free)
        blocks = self.pool.take(num_blocks)
        assert blocks == self.reference.take(num_blocks)
        self.users.append(blocks)

    @rule(block_hash=st.sampled_from(HASHES))
    def hit(self, block_hash):
        block = self.pool.find(block_hash)
        assert block == self.reference.find(block_hash)
        if block is not None:
            self.pool.touch([block])
            self.reference.touch([block])
            self.users.append([block])

    @precondition(lambda self: self.users)
    @rule(data=st.data(), block_hash=st.sampled_from(HASHES))
    def fill(self, data, block_hash):
        blocks = data.draw(st.sampled_from(self.users))
        empty = [block for block in blocks if not self.reference.holds(block)][:1]
        self.pool.cache(empty, [block_hash][: len(empty)])
        for block in empty:
            self.reference.cache(block, block_hash)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.users) - 1))
        blocks = self.users.pop(index)[::-1]
        self.pool.release(blocks)
        self.reference.release(blocks)

    @rule()
    def reset(self):
        assert self.pool.reset() == self.reference.reset()

    @invariant()
    def both_are_the_same(self):
        blocks = range(1, self.pool.num_blocks)
        uses = {block: self.pool.num_references(block) for block in blocks}
        assert uses == self.reference.uses
        assert uses == {block: sum(user.count(block) for user in self.users) for block in blocks}
        assert self.pool.eviction_order() == self.reference.free
        assert self.pool.num_free + sum(map(bool, uses.values())) == len(blocks)
        assert self.pool.usage == pytest.approx(1 - self.pool.num_free / len(blocks))
        in_pool = self.pool.cached_hashes()
        assert in_pool == {
            known: [block for each, block in self.reference.cached if each == known]
            for known, _ in self.reference.cached
        }

    @invariant()
    def events_are_the_same(self):
        assert list(self.pool.take_events()) == self.reference.events
        self.reference.events = []


TestPool = PoolMachine.TestCase


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(4)
    assert pool.take(3) == [1, 2, 3]
    assert pool.num_free == 0


def test_of_two_copies_one_eviction_is_published_and_the_other_copy_is_found():
    pool = BlockPool(3)
    blocks = pool.take(2)
    pool.cache(blocks, [HASHES[0]] * 2)
    pool.release(blocks[:1])
    pool.take(1)
    assert pool.take_events() == (BlockRemoved(block_hashes=(event_id(HASHES[0]),)),)
    assert pool.find(HASHES[0]) == blocks[1]
