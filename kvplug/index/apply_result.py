"""What became of a batch of events: blocks stored, removed, moved, cleared; refused, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

import msgspec


class RejectReason(StrEnum):
    """Why blocks of an understood event were not applied."""

    UNKNOWN_PARENT = "unknown_parent"  # an earlier event was lost: the rank's blocks are incomplete
    UNKNOWN_BLOCK = "unknown_block"  # removed or moved, and not there
    UNKNOWN_RANK = "unknown_rank"  # events of a worker that was removed or never added
    BLOCK_SIZE = "block_size"  # the engine's block size is not the index's
    GROUP_BLOCK_SIZE = "group_block_size"  # nor that of a group with a window or with states
    GROUP_TIER = "group_tier"  # in host memory or on disk, of a group with a window or with states
    CHUNKED_OFFLOAD = "chunked_offload"  # copies of chunks of blocks, found by their last one
    REFUSED_TIER = "refused_tier"  # the rank does not reuse what it says it has there
    PARENT_EVICTED = "parent_evicted"  # the index gave the parent up for its own bounds
    INDEX_FULL = "index_full"  # the bounds leave no room, and nothing else can go
    MISALIGNED = "misaligned"  # tokens do not make as many blocks as there are hashes
    BAD_VALUE = "bad_value"  # of an event made by hand: a hash, token or tier that is none
    CONFLICTING_HASH = "conflicting_hash"  # one engine hash for two contents, or the reverse
    ADAPTER_RELOADED = "adapter_reloaded"  # of a LoRA adapter's weights before; no more in use
    NO_TOKENS = "no_tokens"  # a copy of a block whose content no event has said
    BIGRAM_TOKENS = "bigram_tokens"  # by pairs of tokens, and the rank's others are not, or back
    UNKNOWN_POOL = "unknown_pool"  # in a CXL pool, but no event has said in which
    NO_ANNOTATION = "no_annotation"  # moved by an event that this index has no annotation for
    TOO_MANY_POOLS = "too_many_pools"  # of one rank at once, by pool and workers that can read it


class ApplyResult(msgspec.Struct):  # a struct is made in half the time of a dataclass
    """Counts of blocks, those refused by reason in `rejected`.

    num_moved: by an event of an annotation, as between CXL states; was_cleared: the rank dropped
    everything at some point; num_orphans: blocks refused since then (or at all) because their
    parents are unknown.
    """

    num_stored: int = 0
    num_removed: int = 0
    num_moved: int = 0
    num_cleared: int = 0
    was_cleared: bool = False
    num_orphans: int = 0
    _rejected: Counter[str] | None = None  # made late: most batches refuse nothing

    def __repr__(self) -> str:
        names = [name for name in self.__struct_fields__ if name != "_rejected"]
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"ApplyResult({values}, rejected={dict(self.rejected)})"

    @property
    def rejected(self) -> Counter[str]:
        """Blocks by reason."""
        return Counter() if self._rejected is None else self._rejected

    @property
    def is_plain(self) -> bool:
        """Whether nothing was refused, and no clear of everything was among it."""
        return self._rejected is None and not self.was_cleared

    @property
    def num_forgotten(self) -> int:
        """Blocks that the engine still has, and that are of no use any more."""
        return self._rejected[RejectReason.ADAPTER_RELOADED.value] if self._rejected else 0

    def reject(self, reason: RejectReason, num_blocks: int) -> None:
        """Count blocks that were not applied."""
        if num_blocks:
            self._count_rejected({reason.value: num_blocks})
        if reason is RejectReason.UNKNOWN_PARENT:
            self.num_orphans += num_blocks

    def add(self, more: ApplyResult) -> None:
        """Count what became of later events."""
        self.num_stored += more.num_stored
        self.num_removed += more.num_removed
        self.num_moved += more.num_moved
        self.num_cleared += more.num_cleared
        self.num_orphans = more.num_orphans + (0 if more.was_cleared else self.num_orphans)
        self.was_cleared |= more.was_cleared
        if more._rejected:
            self._count_rejected(more._rejected)

    def clear(self, num_blocks: int, *, everything: bool) -> None:
        """Count blocks that a clear took, in all tiers if it took `everything`."""
        self.num_cleared += num_blocks
        if everything:
            self.was_cleared, self.num_orphans = True, 0

    def _count_rejected(self, num_blocks: Mapping[str, int]) -> None:
        if self._rejected is None:
            self._rejected = Counter()
        self._rejected.update(num_blocks)
