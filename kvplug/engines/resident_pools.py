"""CXL states of an engine's blocks, as an index takes them.

In:  what stored events and transitions say.   Out: copies moved, metadata by sequence hash.

The rules are those of kvplug/index/cxl.py, for one rank. Metadata of a block without copies is
kept for the last MAX_RETAINED of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from kvplug.engines.resident_blocks import DEVICE, POOL, ResidentBlocks
from kvplug.events import BlockStored, CxlMetadata, CxlState, CxlStateTransition

MAX_RETAINED: Final = 2**14
MAX_PLACEMENTS: Final = 256
"""Pools with their readers at once; an index refuses more of a rank."""

_ON_DEVICE: Final = frozenset({CxlState.LOCAL_GPU, CxlState.IN_TRANSIT})


class ResidentPools:
    """on_stored, move; metadata: by sequence hash. Set `blocks` first."""

    blocks: ResidentBlocks

    def __init__(self) -> None:
        self.metadata: dict[int, CxlMetadata] = {}
        self._retained: dict[int, None] = {}
        self._num_placed: Counter[tuple[int | None, tuple[str, ...] | None]] = Counter()

    def is_kept(self, hash_: int) -> bool:
        """Whether something is known of a block that has no copies."""
        return hash_ in self.metadata

    def on_gone(self, hash_: int) -> None:
        """A block has lost its last copy; what is known of it is kept, of the last ones."""
        if hash_ not in self.metadata:
            return
        self._retained.pop(hash_, None)
        self._retained[hash_] = None
        while len(self._retained) > MAX_RETAINED:
            oldest = next(iter(self._retained))
            del self._retained[oldest]
            if self.blocks.is_ghost(oldest):
                self.erase(oldest)
                self.blocks.forget_ghost(oldest)

    def clear(self) -> None:
        """Nothing is known of any block."""
        self.metadata.clear()
        self._retained.clear()
        self._num_placed.clear()

    def on_stored(self, slots: Sequence[int], event: BlockStored, said: CxlMetadata) -> None:
        """The blocks have a copy more, in this state."""
        is_pooled = said.state is CxlState.CXL_POOLED
        for slot in slots:
            if is_pooled or not self._is_pooled(self.blocks.hashes[slot]):
                self._place(slot, said, moves=False)
        if is_pooled or said.state is CxlState.EVICTED:
            counts = self.blocks.counts_of(int(event.tier))
            self.blocks.drop_copies([slot for slot in slots if counts[slot]], int(event.tier))

    def move(self, slots: Iterable[int], event: CxlStateTransition) -> None:
        """A transition of these blocks."""
        said = CxlMetadata(event.new_state, event.pool_id, event.accessible_workers)
        for slot in slots:
            if said.state is not CxlState.EVICTED or self._is_here(slot):
                self._place(slot, said, moves=True)

    def _place(self, slot: int, said: CxlMetadata, *, moves: bool) -> None:
        hash_ = self.blocks.hashes[slot]
        now = self._inherited(hash_, said)
        if said.state is CxlState.CXL_POOLED and now.pool_id is None:
            return
        place = now.pool_id, now.accessible_workers
        if place not in self._num_placed and len(self._num_placed) >= MAX_PLACEMENTS:
            return
        was_pooled = self._is_pooled(hash_)
        if said.state is CxlState.CXL_POOLED and not was_pooled:
            self.blocks.add_copies([slot], POOL)
        if moves and said.state in _ON_DEVICE and not self.blocks.counts_of(DEVICE)[slot]:
            self.blocks.add_copies([slot], DEVICE)
        # Before the copies go: whether the block stays without any depends on it.
        self._note(hash_, now)
        if moves and was_pooled and said.state is not CxlState.CXL_POOLED:
            self.blocks.drop_copies([slot], POOL)
        if moves and self._leaves_device(said.state, was_pooled):
            self.blocks.drop_all(slot, DEVICE)

    def _leaves_device(self, state: CxlState, was_pooled: bool) -> bool:
        return state is CxlState.CXL_POOLED or (state is CxlState.EVICTED and not was_pooled)

    def _inherited(self, hash_: int, said: CxlMetadata) -> CxlMetadata:
        was, workers = self.metadata.get(hash_, CxlMetadata()), said.accessible_workers
        return CxlMetadata(
            said.state,
            was.pool_id if said.pool_id is None else said.pool_id,
            was.accessible_workers if workers is None else tuple(sorted(set(workers))),
        )

    def _note(self, hash_: int, now: CxlMetadata) -> None:
        self.erase(hash_)
        is_unknown = now.pool_id is None and not now.accessible_workers
        if now.state is CxlState.LOCAL_GPU and is_unknown:
            return
        self.metadata[hash_] = now
        self._num_placed[now.pool_id, now.accessible_workers] += 1

    def erase(self, hash_: int) -> None:
        """Nothing is known of a block besides its copies on the device."""
        was = self.metadata.pop(hash_, None)
        if was is None:
            return
        place = was.pool_id, was.accessible_workers
        self._num_placed[place] -= 1
        if not self._num_placed[place]:
            del self._num_placed[place]

    def forget_pool(self, hash_: int) -> None:
        """The block is about to lose its copy in a pool, if it has one."""
        if self._is_pooled(hash_):
            self.erase(hash_)

    def _is_pooled(self, hash_: int) -> bool:
        known = self.metadata.get(hash_)
        return known is not None and known.state is CxlState.CXL_POOLED

    def _is_here(self, slot: int) -> bool:
        """Whether there is something to evict, or has been."""
        on_device = self.blocks.counts_of(DEVICE)[slot] > 0
        return on_device or self.blocks.hashes[slot] in self.metadata
