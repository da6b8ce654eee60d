"""Many events of a rank applied in one call of a kernel: records, and packed events.

In:  events of one rank as arrays or bytes.   Out: the block store, the rank's hash space and the
speculative blocks changed; counts.

What a kernel cannot decide it leaves to SingleEvents, by way of BlockIndex; kernels/applying.py
says what that is. Annotations hear nothing of what is applied here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvplug.errors import DecodeError
from kvplug.events import Rank
from kvplug.index.apply_result import ApplyResult, RejectReason
from kvplug.index.bounds import CapacityGuard
from kvplug.index.expiring import ExpiringBlocks, mark_of
from kvplug.index.hash_spaces import HashSpace, HashSpaces
from kvplug.kernels import applying as kernels
from kvplug.kernels.applying import apply_packed
from kvplug.kernels.bundle import Bundle
from kvplug.kernels.msgpack import PADDING
from kvplug.records import Records

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Flag = npt.NDArray[np.uint8]

_MIN_SCRATCH = 256
_MIN_PAYLOAD = 2**16
LEAST_NBYTES = _MIN_PAYLOAD + PADDING + 3 * 8 * _MIN_SCRATCH
"""Of the buffers that events pass through, as large as usual events need them."""


class EventApplier:
    """apply_records, apply_packed; `needs_decision` and `num_over` tell how the first ended."""

    def __init__(
        self,
        block_size: int,
        hash_spaces: HashSpaces,
        capacity_guard: CapacityGuard,
        speculative: ExpiringBlocks,
        query_waiting: Flag,
    ) -> None:
        self._block_size = block_size
        self._hash_spaces, self._numbers = hash_spaces, hash_spaces.numbers
        self._capacity_guard, self._block_store = capacity_guard, capacity_guard.block_store
        self._speculative, self._query_waiting = speculative, query_waiting
        self._version = capacity_guard.block_store.version
        self._counts: I64 = np.zeros(kernels.NUM_COUNTS, dtype=np.int64)
        self._scratch: U64 = np.empty(3 * _MIN_SCRATCH, dtype=np.uint64)
        # What stays the same between calls, until an array grows or a rank comes or goes.
        self._bundles: dict[Rank, Bundle] = {}
        self._seen_version = 0
        self._make_payload(_MIN_PAYLOAD)

    @property
    def extra_nbytes(self) -> int:
        """Bytes of memory of the buffers that events pass through, beyond LEAST_NBYTES."""
        return int(self._scratch.nbytes) + len(self._payload) - LEAST_NBYTES

    @property
    def needs_decision(self) -> bool:
        """Whether the event at which the last call ended is one for SingleEvents."""
        return bool(self._counts[kernels.WHY] == kernels.NEEDS_DECISION)

    @property
    def num_over(self) -> int:
        """How many blocks the event at which the last call ended has, if the bounds forbid them."""
        is_over = self._counts[kernels.WHY] in (kernels.NEEDS_ROOM, kernels.OVER_LIMIT)
        return int(self._counts[kernels.NUM_WANTED]) if is_over else 0

    def apply_records(
        self, rank: Rank, hash_space: HashSpace, records: Records, first: int, max_blocks: int,
        applied: ApplyResult,
    ) -> int:  # fmt: skip
        """Apply from record `first` on; returns the number of the first that was not applied."""
        at, again = first, True
        while again:
            at = int(kernels.apply_records(
                at, records.num_events, max_blocks, self._block_size, records.bundle.words,
                self._bundle_for(rank, hash_space),
            ))  # fmt: skip
            again = self._count(rank, hash_space, applied)
        return at

    def apply_packed(
        self, rank: Rank, hash_space: HashSpace, payload: bytes
    ) -> tuple[ApplyResult, int]:
        """What became of a payload, and the number of the event that needs a decision; -1: none."""
        try:
            end = len(payload)
            if end > self._max_payload:
                self._make_payload(2 * end)
            self._payload[:end] = payload
        except TypeError as error:
            raise DecodeError(f"cannot read packed events: expected bytes: {error}") from error
        result = apply_packed(0, 0, end, self._bundle_for(rank, hash_space))
        if result >= 0:
            return ApplyResult(result & kernels.STORED_MASK, result >> kernels.REMOVED_SHIFT), -1
        return self._go_on(rank, hash_space, end, result)

    def _go_on(
        self, rank: Rank, hash_space: HashSpace, num_bytes: int, result: int
    ) -> tuple[ApplyResult, int]:
        applied = ApplyResult()
        while result < 0 and self._count(rank, hash_space, applied):
            first, at = -1 - result, int(self._counts[kernels.POSITION])
            result = apply_packed(first, at, num_bytes, self._bundle_for(rank, hash_space))
        if result < 0:
            is_done = self._counts[kernels.WHY] == kernels.DONE
            return applied, -1 if is_done else int(-1 - result)
        applied.num_stored += result & kernels.STORED_MASK
        applied.num_removed += result >> kernels.REMOVED_SHIFT
        return applied, -1

    def _make_payload(self, num_bytes: int) -> None:
        # A payload is copied: NumPy takes five times as long to look at bytes where they are.
        self._payload = bytearray(num_bytes + PADDING)
        self._max_payload = num_bytes
        self._bundles.clear()

    def _bundle_for(self, rank: Rank, hash_space: HashSpace) -> U64:
        if self._seen_version == self._version.count:
            bundle = self._bundles.get(rank)
            if bundle is not None:
                return bundle.words
        return self._collect_anew(rank, hash_space).words

    def _collect_anew(self, rank: Rank, hash_space: HashSpace) -> Bundle:
        # The rank may get its numbers only now, which changes the members of its hash space.
        holders = self._numbers.holder_of_tier(self._numbers.number_of(rank))
        if self._seen_version != self._version.count:
            self._bundles.clear()
            self._seen_version = self._version.count
        bundle = self._bundles[rank] = self._collect(rank, hash_space, holders)
        return bundle

    def _collect(self, rank: Rank, hash_space: HashSpace, holders: I64) -> Bundle:
        number = self._numbers.number_of(rank)
        space_slots, expected = hash_space.table.slots, self._speculative.table.slots
        of_rank = np.concatenate([[mark_of(number)], holders.astype(np.uint64)])
        return Bundle(
            *self._block_store.arrays,
            space_slots,
            self._hash_spaces.members_of(hash_space),
            expected,
            of_rank,
            self._scratch,
            np.frombuffer(self._payload, dtype=np.uint8),
            self._counts,
            self._query_waiting,
        )

    def _count(self, rank: Rank, hash_space: HashSpace, applied: ApplyResult) -> bool:
        """Add up what a call has done; whether arrays have grown, so that it can go on."""
        num_stored, num_removed, num_unknown, why, num_wanted, _ = self._counts.tolist()
        applied.num_stored += num_stored
        applied.num_removed += num_removed
        if num_unknown:
            applied.reject(RejectReason.UNKNOWN_BLOCK, num_unknown)
        return why in (kernels.NEEDS_ROOM, kernels.NEEDS_RUNS) and self._make_room(
            rank, hash_space, num_wanted, comes=why == kernels.NEEDS_ROOM
        )

    def _make_room(self, rank: Rank, hash_space: HashSpace, num_blocks: int, comes: bool) -> bool:
        """Have arrays grow for so many blocks; False if the bounds forbid it.

        Blocks that leave (`comes` is false) need room for runs, which is always given.
        """
        holder = int(self._numbers.holder_of_tier(self._numbers.number_of(rank)).max())
        if not comes:
            self._block_store.reserve_runs(holder, num_blocks)
        elif self._capacity_guard.is_over_bytes(hash_space, holder, num_blocks):
            return False
        else:
            hash_space.table.reserve(num_blocks)
            self._block_store.reserve(holder, num_blocks)
        if 3 * num_blocks > len(self._scratch):
            self._scratch = np.empty(6 * num_blocks, dtype=np.uint64)
        self._version.count += 1
        return True
