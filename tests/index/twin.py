"""The plain twin of BlockIndex: dicts of contents, no hashes of ours, no arrays."""

from collections import Counter

import xxhash

from kvplug.events import Tier

CREDIT = {Tier.DEVICE: 1.0, Tier.HOST: 0.75, Tier.DISK: 0.25}


def engine_hash(algorithm, content):
    """What an engine calls a block: by content, and different with each algorithm or seed."""
    return xxhash.xxh3_64_intdigest(repr((algorithm, content)).encode())


class TwinIndex:
    """A content is (namespace, all tokens of the prefix); copies[rank, tier][content] = count."""

    def __init__(self):
        self.copies = {}

    def of(self, rank, tier):
        return self.copies.setdefault((rank, tier), Counter())

    def store(self, rank, tier, contents):
        self.of(rank, tier).update(contents)

    def remove(self, rank, tier, contents):
        """Returns how many copies there were to remove."""
        copies, num_removed = self.of(rank, tier), 0
        for content in contents:
            if copies[content]:
                copies[content] -= 1
                num_removed += 1
        self.copies[rank, tier] = +copies
        return num_removed

    def clear(self, rank, tier=None):
        for t in Tier if tier is None else [tier]:
            self.copies.pop((rank, t), None)

    def held(self, rank, tier=None):
        tiers = list(Tier) if tier is None else [tier]
        return sorted({content for t in tiers for content in +self.of(rank, t)}, key=repr)

    def overlap(self, rank, contents):
        depth, credit = 0, 0.0
        for content in contents:
            credits = [CREDIT[t] for t in Tier if self.of(rank, t)[content]]
            if not credits:
                break
            depth, credit = depth + 1, credit + max(credits)
        return depth, credit
