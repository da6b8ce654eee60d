"""The plain reference implementation of BlockIndex: dicts of contents, no hashes of ours, no
arrays.
"""

from collections import Counter
from functools import lru_cache

import xxhash

from kvplug.events import CxlMetadata, CxlState, Tier

CREDIT = {Tier.DEVICE: 1.0, Tier.HOST: 0.75, Tier.DISK: 0.25, "pool": 0.9}
SCOPES = [
    {Tier.DEVICE},
    {Tier.DEVICE, Tier.HOST},
    {Tier.DEVICE, Tier.HOST, Tier.DISK},
    {Tier.DEVICE, Tier.HOST, Tier.DISK, "pool"},
    {Tier.DEVICE, "pool"},
]


def engine_hash(algorithm, content):
    """What an engine calls a block: by content, and different with each algorithm or seed."""
    return xxhash.xxh3_64_intdigest(repr((algorithm, content)).encode())


@lru_cache(maxsize=10_000)
def _as_text(content):
    """What contents are sorted by: namespaces have no order."""
    return repr(content)


def depth_of(has):
    """How many leading blocks have something."""
    return [*map(bool, has), False].index(False)


class ReferenceIndex:
    """A content is (namespace, all tokens of the prefix); copies[rank, tier][content] = count.

    cxl[rank][content] = CxlMetadata; labels[rank][content] = MoeLabel. A rank has a copy in a pool
    if and only if the state says so. expected[rank]: blocks that it was sent.
    """

    def __init__(self):
        self.copies, self.cxl, self.labels, self.expected = {}, {}, {}, {}
        self.reporting = set()  # ranks that have told something again

    def of(self, rank, tier):
        copies = self.copies.get((rank, tier))
        if copies is None:
            copies = self.copies[rank, tier] = Counter()
        return copies

    def cxl_of(self, rank, content):
        return self.cxl.setdefault(rank, {}).get(content)

    def store(self, rank, tier, contents, *, from_start=False):
        """Blocks from the start of a prompt, all there already, bring no copies if there are two
        or more of them, and from then on in any case.
        """
        copies = self.of(rank, tier)
        is_told_again = tier is Tier.DEVICE and from_start and all(copies[c] for c in contents)
        if is_told_again and (len(contents) > 1 or rank in self.reporting):
            self.reporting.add(rank)
        else:
            copies.update(contents)

    def store_cxl(self, rank, tier, contents, said):
        """As `store`, with CXL metadata; returns how many copies came, and how many were refused.

        A stored event takes no copy out of a pool, but for one in another pool.
        """
        num_stored = num_rejected = 0
        for content in contents:
            now = self._inherit(rank, content, said)
            if said.state is CxlState.CXL_POOLED and now.pool_id is None:
                num_rejected += 1
                continue
            if said.state in (CxlState.LOCAL_GPU, CxlState.IN_TRANSIT):
                self.of(rank, tier)[content] += 1
            num_stored += said.state is not CxlState.EVICTED
            if said.state is CxlState.CXL_POOLED or not self._is_pooled(rank, content):
                self._note(rank, content, now)
        return num_stored, num_rejected

    def move(self, rank, contents, said, known):
        """`known`: contents that have a name. Returns how many blocks moved, how many are unknown,
        and how many are in no known pool.
        """
        counts = Counter()
        for content in dict.fromkeys(contents):
            what = self._move(rank, content, said) if content in known else "unknown"
            counts[what] += 1
        self.copies[rank, Tier.DEVICE] = +self.of(rank, Tier.DEVICE)
        self._drop_labels(rank)
        return counts["moved"], counts["unknown"], counts["no pool"]

    def _move(self, rank, content, said):
        was, now = self.cxl_of(rank, content), self._inherit(rank, content, said)
        on_device = self.of(rank, Tier.DEVICE)
        is_here = was is not None or on_device[content]
        if said.state is CxlState.EVICTED and not is_here:
            return "unknown"
        if said.state is CxlState.CXL_POOLED and now.pool_id is None:
            return "no pool"
        if said.state in (CxlState.LOCAL_GPU, CxlState.IN_TRANSIT):
            on_device[content] = max(1, on_device[content])
        elif said.state is CxlState.CXL_POOLED or not self._is_pooled(rank, content):
            on_device[content] = 0
        self._note(rank, content, now)
        return "moved"

    def _inherit(self, rank, content, said):
        was = self.cxl_of(rank, content) or CxlMetadata()
        workers = said.accessible_workers
        return CxlMetadata(
            said.state,
            was.pool_id if said.pool_id is None else said.pool_id,
            was.accessible_workers if workers is None else tuple(sorted(set(workers))),
        )

    def _note(self, rank, content, now):
        if now.state is CxlState.LOCAL_GPU and now.pool_id is None and not now.accessible_workers:
            self.cxl[rank].pop(content, None)
        else:
            self.cxl[rank][content] = now

    def _is_pooled(self, rank, content):
        state = self.cxl_of(rank, content)
        return state is not None and state.state is CxlState.CXL_POOLED

    def label(self, rank, contents, label):
        """The copies that the rank has of them carry the label."""
        held = set(self.held(rank))
        self.labels.setdefault(rank, {}).update({c: label for c in contents if c in held})

    def _drop_labels(self, rank):
        held = set(self.held(rank))
        labels = self.labels.get(rank, {})
        self.labels[rank] = {c: label for c, label in labels.items() if c in held}

    def remove(self, rank, tier, contents):
        """Returns how many copies there were to remove."""
        copies, num_removed = self.of(rank, tier), 0
        for content in contents:
            if copies[content]:
                copies[content] -= 1
                num_removed += 1
        self.copies[rank, tier] = +copies
        self._drop_labels(rank)
        return num_removed

    def copy(self, rank, tier, contents):
        self.of(rank, tier).update(contents)

    def evict(self, contents):
        """They leave the index, whoever has them. A state stays if it is no copy in a pool."""
        for copies in self.copies.values():
            for content in contents:
                copies.pop(content, None)
        for rank, states in self.cxl.items():
            for content in contents & states.keys():
                if self._is_pooled(rank, content):
                    del states[content]
        for rank in self.labels:
            self._drop_labels(rank)

    def expect(self, rank, contents):
        """The rank was sent a prompt with these blocks."""
        self.expected.setdefault(rank, set()).update(contents)

    def confirm(self, rank, contents):
        """An event has named these blocks."""
        self.expected.setdefault(rank, set()).difference_update(contents)

    def num_expected(self, rank, contents):
        """How many of the leading blocks are expected."""
        return depth_of(content in self.expected.get(rank, ()) for content in contents)

    def leave(self, rank):
        self.clear(rank)
        self.reporting.discard(rank)

    def clear(self, rank, tier=None):
        self.expected.pop(rank, None)
        for t in Tier if tier is None else [tier]:
            self.copies.pop((rank, t), None)
        if tier is None:
            self.cxl.pop(rank, None)
        self._drop_labels(rank)

    def pooled(self, rank):
        return [c for c in self.cxl.get(rank, {}) if self._is_pooled(rank, c)]

    def held(self, rank, tier=None):
        tiers = list(Tier) if tier is None else [tier]
        held = {c for t in tiers for c, num_copies in self.of(rank, t).items() if num_copies > 0}
        return sorted(held | set(self.pooled(rank) if tier is None else []), key=_as_text)

    def _has(self, rank, content, fleet):
        """The kinds of memory in which a rank finds a block: its own, and pools that it reads."""
        has = {tier for tier in Tier if self.of(rank, tier)[content]}
        for owner in fleet:
            if self._is_pooled(owner, content):
                workers = self.cxl_of(owner, content).accessible_workers or ()
                if owner == rank or rank.worker in workers:
                    has.add("pool")
        return has

    def overlap(self, rank, contents, fleet):
        """Depths by scope, and the credit."""
        has = [self._has(rank, content, fleet) for content in contents]
        depths = [depth_of(kinds & scope for kinds in has) for scope in SCOPES]
        credit = sum(max(CREDIT[kind] for kind in kinds) for kinds in has[: depths[3]])
        return depths, credit

    def moe_hits(self, rank, contents, label, fleet):
        depth = self.overlap(rank, contents, fleet)[0][3]
        return sum(label in self._labels_for(rank, content, fleet) for content in contents[:depth])

    def _labels_for(self, rank, content, fleet):
        """Of its own copies, and of those that it reads in pools."""
        owners = [
            owner
            for owner in fleet
            if self._is_pooled(owner, content)
            and rank.worker in (self.cxl_of(owner, content).accessible_workers or ())
        ]
        return {self.labels.get(owner, {}).get(content) for owner in (rank, *owners)}
