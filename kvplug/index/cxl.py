"""Blocks between GPUs and CXL pools: what a state means for the copies that a rank has.

In:  stored events with CXL metadata, and transitions.   Out: the block store and the states
(kvplug/index/cxl_states.py) changed.

    local_gpu    a copy on the rank's device
    in_transit   the same: nobody else can read the block yet
    cxl_pooled   a copy in a pool, which the rank and all ranks of the accessible workers can read
    evicted      the copy that the last state stood for is gone; where it was is kept. If that was
                 evicted, too, a copy on the device has been stored since, and is gone now

A transition moves: into a pool means off the device, however often it was stored there. A stored
event adds, and takes nothing: a block that is in a pool stays there when it is stored on the
device besides. Pool and workers that an event leaves out are the block's last ones on this rank; if
no event has named workers, those can read the pool that say so themselves
(HolderNumbers.set_pools_read_by).
Copies in host memory and on disk have nothing to do with it.

A copy in a pool is a holder's, so the kernels that store, remove and match blocks need not know of
it, and apply events while there are pools, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvplug.errors import IndexCorruptError
from kvplug.events import BlockCopied, CxlMetadata, CxlState, CxlStateTransition, Rank, Tier
from kvplug.index.apply_result import ApplyResult, RejectReason
from kvplug.index.block_annotation import (
    AnnotationState,
    BlockAnnotation,
    EventBlocks,
    NamesBlocks,
    Stored,
)
from kvplug.index.block_store import BlockStore
from kvplug.index.cxl_states import (
    POOLED,
    STATES,
    CxlStates,
    Placement,
    Placements,
    PlacementState,
    placement_of,
    state_of,
)
from kvplug.index.holder_numbers import HolderNumbers

U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


class CxlBlocks(BlockAnnotation):
    """`metadata` tells what is known of a block."""

    name = "cxl"
    event_type = CxlStateTransition
    array_names: ClassVar[tuple[str, ...]] = ("table", "ring")

    def __init__(self, numbers: HolderNumbers, block_store: BlockStore) -> None:
        super().__init__(numbers, block_store)
        self.placements = Placements(numbers)
        self.states = CxlStates(self.placements)

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the states."""
        return self.states.nbytes

    def shrink(self) -> bool:
        """Make the table as small as its states."""
        return self.states.table.shrink()

    def metadata(self, rank: Rank, sequence_hash: int) -> CxlMetadata | None:
        """The last state of a rank's block, and where it is or was; None if nothing is known."""
        number = self._numbers.number_of(rank)
        entry = self.states.find(number, np.array([sequence_hash], dtype=np.uint64))
        if not entry[0]:
            return None
        placement = self.placements.placement(int(placement_of(entry)[0]))
        return CxlMetadata(STATES[state_of(entry)[0]], placement.pool_id, placement.workers)

    def concerns(self, event: Stored) -> bool:
        """Those with CXL metadata."""
        return not isinstance(event, BlockCopied) and event.cxl is not None

    def on_stored(self, blocks: EventBlocks, event: Stored, applied: ApplyResult) -> None:
        """Add what the metadata of the event says, and no copy beside one that is in a pool."""
        assert not isinstance(event, BlockCopied)
        assert event.cxl is not None
        said = event.cxl
        is_pooled, num_noted = said.state is CxlState.CXL_POOLED, 0
        # What is in a pool stays there.
        concerned = blocks if is_pooled else blocks.only(~self._is_pooled(blocks))
        for placement, chosen in self._placed(concerned, said, applied):
            if is_pooled:
                self._enter_pool(chosen, placement)
            self._note(chosen, said.state, placement)
            num_noted += len(chosen.hashes)
        if is_pooled or said.state is CxlState.EVICTED:
            holder = self._numbers.holder(blocks.rank_number, event.tier)
            self._block_store.drop_engine_hashes(holder, blocks.engine_hashes, blocks.hash_space())
            applied.num_stored -= len(blocks.hashes) - is_pooled * num_noted

    def on_event(self, blocks: EventBlocks, event: NamesBlocks, applied: ApplyResult) -> None:
        """A transition: the blocks are in another state now."""
        assert isinstance(event, CxlStateTransition)
        said = CxlMetadata(event.new_state, event.pool_id, event.accessible_workers)
        if said.state is CxlState.EVICTED:
            is_here = self._is_here(blocks)
            applied.reject(RejectReason.UNKNOWN_BLOCK, int((~is_here).sum()))
            blocks = blocks.only(is_here)
        for placement, chosen in self._placed(blocks, said, applied):
            self._move_copies(chosen, said.state, placement)
            self._note(chosen, said.state, placement)
            applied.num_moved += len(chosen.hashes)

    def on_clear(self, rank_number: int, tier: Tier | None) -> None:
        """Forget the rank's states; a clear of one tier leaves pools alone."""
        if tier is None:
            self.states.forget(rank_number)

    def on_rank_removed(self, rank_number: int) -> None:
        """Free the rank's placements."""
        self.placements.free(self.placements.numbers_of(rank_number))

    def erase_gone(self) -> None:
        """Forget the pooled blocks that have no copy in their pool any more."""
        for state, placement, hashes in self.states.items():
            if state is CxlState.CXL_POOLED:
                held = self._numbers.holders(placement.rank_number)
                gone = hashes[~self._block_store.which_held(hashes, held)]
                self.states.erase(placement.rank_number, gone)

    def save(self) -> AnnotationState:
        """Placements by number, and the states."""
        table, ring = self.states.arrays
        return AnnotationState(self.placements.state(), {"table": table, "ring": ring})

    def load(self, state: AnnotationState) -> None:
        """Be what other placements and states were; their holders are loaded."""
        placements = msgspec.convert(state.settings, list[PlacementState | None])
        num_ranks = len(self._numbers.ranks)
        if not all(0 <= each[0].rank_number < num_ranks for each in placements if each):
            raise IndexCorruptError("cxl: a placement is nobody's")
        self.placements.load(placements)
        self.states.load(state.arrays["table"], state.arrays["ring"])

    def _move_copies(self, blocks: EventBlocks, state: CxlState, placement: int) -> None:
        device = self._numbers.holder(blocks.rank_number, Tier.DEVICE)
        match state:
            case CxlState.CXL_POOLED:
                self._enter_pool(blocks, placement)
                self._drop(device, blocks)
            case CxlState.LOCAL_GPU | CxlState.IN_TRANSIT:
                self._hold(device, blocks)
                self._leave_pools(blocks)
            case CxlState.EVICTED:
                states = state_of(self.states.find(blocks.rank_number, blocks.hashes))
                self._leave_pools(blocks)
                self._drop(device, blocks.only(states != POOLED))

    def _enter_pool(self, blocks: EventBlocks, placement: int) -> None:
        self._hold(self.placements.holder(placement), blocks)
        self._leave_pools(blocks, but=placement)

    def _leave_pools(self, blocks: EventBlocks, *, but: int = -1) -> None:
        entries = self.states.find(blocks.rank_number, blocks.hashes)
        placements = np.where(state_of(entries) == POOLED, placement_of(entries), -1)
        for placement in set(np.unique(placements).tolist()) - {-1, but}:
            self._drop(self.placements.holder(placement), blocks.only(placements == placement))

    def _hold(self, holder: int, blocks: EventBlocks) -> None:
        """The holder has a copy of each block, if it had none."""
        held = self._block_store.which_held(blocks.hashes, [holder])
        self._block_store.copy(holder, blocks.hashes[~held])

    def _drop(self, holder: int, blocks: EventBlocks) -> None:
        """The holder has no copy any more, however many it had."""
        num_had = len(blocks.engine_hashes)
        while num_had:
            blocks = blocks.only(self._block_store.which_held(blocks.hashes, [holder]))
            num_had = self._block_store.drop_engine_hashes(
                holder, blocks.engine_hashes, blocks.hash_space()
            )

    def _note(self, blocks: EventBlocks, state: CxlState, placement: int) -> None:
        if state is CxlState.LOCAL_GPU and self.placements.placement(placement).is_unknown:
            self.states.erase(blocks.rank_number, blocks.hashes)
        else:
            self.states.put(blocks.rank_number, blocks.hashes, state, placement)

    def _is_pooled(self, blocks: EventBlocks) -> Mask:
        return np.asarray(state_of(self.states.find(blocks.rank_number, blocks.hashes)) == POOLED)

    def _is_here(self, blocks: EventBlocks) -> Mask:
        """Whether the rank has something to evict, or has had it."""
        device = self._numbers.holder(blocks.rank_number, Tier.DEVICE)
        held = self._block_store.which_held(blocks.hashes, [device])
        return np.asarray(held | (self.states.find(blocks.rank_number, blocks.hashes) != 0))

    def _placed(
        self, blocks: EventBlocks, said: CxlMetadata, applied: ApplyResult
    ) -> Iterator[tuple[int, EventBlocks]]:
        """The blocks by where they are now; those of which that is not known are refused."""
        before = placement_of(self.states.find(blocks.rank_number, blocks.hashes))
        for number in np.unique(before).tolist():
            chosen = blocks.only(before == number)
            last = Placement(blocks.rank_number)
            last = last if number < 0 else self.placements.placement(number)
            placement = last.moved(said.pool_id, said.accessible_workers)
            if said.state is CxlState.CXL_POOLED and placement.pool_id is None:
                applied.reject(RejectReason.UNKNOWN_POOL, len(chosen.hashes))
                continue
            now = self._number_of(placement)
            if now is None:
                applied.reject(RejectReason.TOO_MANY_POOLS, len(chosen.hashes))
            else:
                yield now, chosen

    def _number_of(self, placement: Placement) -> int | None:
        number = self.placements.find(placement)
        if number is None and self.placements.is_full(placement.rank_number):
            self.placements.free(self.states.unused(placement.rank_number))
        if number is None and not self.placements.is_full(placement.rank_number):
            number = self.placements.add(placement)
        return number

    def check(self) -> None:
        """A rank has a copy in a pool where its state says so, and no other."""
        self.states.check()
        self._check_pools()
        num_pooled = dict.fromkeys(self.placements.holders, 0)
        for state, placement, hashes in self.states.items():
            if state is CxlState.CXL_POOLED:
                number = self.placements.find(placement)
                holder = -1 if number is None else self.placements.holder(number)
                num_pooled[holder] = len(hashes)
                if not self._block_store.which_held(hashes, [holder]).all():
                    raise IndexCorruptError("cxl: a pooled block without a copy in its pool")
        counted = self._block_store.copies.items()[1] >> np.uint64(32)
        if np.isin(counted, list(num_pooled)).any():
            raise IndexCorruptError("cxl: two copies of a block in one pool")
        if any(self._block_store.num_held(h) != number for h, number in num_pooled.items()):
            raise IndexCorruptError("cxl: a copy in a pool of a block that is not pooled")

    def _readers_of(self, placement: Placement) -> tuple[str, ...]:
        if placement.workers is None and placement.pool_id is not None:
            return self._numbers.workers_that_read(placement.pool_id)
        return placement.workers or ()

    def _check_pools(self) -> None:
        """Each pool of a rank is behind one placement, as only this annotation makes pools."""
        expected = {
            holder: (placement.rank_number, self._readers_of(placement))
            for placement, holder in filter(None, self.placements.state())
            if holder is not None
        }
        if expected != self._numbers.pools:
            raise IndexCorruptError("cxl: pools and placements do not pair up")
