"""ExpiringBlocks as a child could check it: a list of everything that was entered, oldest first."""

from dataclasses import dataclass


@dataclass
class Entry:
    rank: int
    block: int
    deadline_s: float
    has_ended: bool = False


class ReferenceExpiring:
    def __init__(self, ttl_s, capacity, max_more_expired):
        self.ttl_s, self.capacity, self.max_more_expired = ttl_s, capacity, max_more_expired
        self.entries, self.num_lost, self.last_s = [], 0, float("-inf")

    def find(self, rank, block):
        for entry in self.entries:
            if (entry.rank, entry.block, entry.has_ended) == (rank, block, False):
                return entry
        return None

    def insert(self, rank, blocks, now_s):
        if not blocks:
            return
        self.last_s = max(self.last_s, now_s + self.ttl_s)
        self.num_lost += len(blocks[self.capacity :])
        self.expire(now_s, len(blocks[: self.capacity]) + self.max_more_expired)
        for block in reversed(blocks[: self.capacity]):
            if entry := self.find(rank, block):
                self.entries.remove(entry)
            elif len(self.entries) == self.capacity:
                oldest = self.entries.pop(0)
                self.num_lost += not oldest.has_ended and oldest.deadline_s > now_s
            self.entries.append(Entry(rank, block, self.last_s))

    def confirm(self, rank, blocks):
        for block in blocks:
            if entry := self.find(rank, block):
                entry.has_ended = True

    def forget(self, rank):
        for entry in self.entries:
            entry.has_ended |= entry.rank == rank

    def expire(self, now_s, max_entries):
        num_due = sum(entry.deadline_s <= now_s for entry in self.entries)
        del self.entries[: min(num_due, max_entries)]

    def depth(self, rank, blocks, depth, now_s):
        while depth < len(blocks):
            entry = self.find(rank, blocks[depth])
            if entry is None or entry.deadline_s <= now_s:
                break
            depth += 1
        return depth

    @property
    def num_live(self):
        return sum(not entry.has_ended for entry in self.entries)
