"""Blocks leave a holder.

In:  the sequence hash and the engine hash of a block, a holder number.
Out: the arrays of kernels/residency.py, changed; what became of the block.

A block that others have moves to a run with their set: the run below, the run that the block before
moved to, or a new one. So a tail that leaves block by block stays in one run. Parts for
membership.py and applying.py. Reference: tests/index/reference.py.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.kernels import holders, runs
from kvplug.kernels._jit import inlined
from kvplug.kernels.residency import (
    Blocks,
    SpaceArrays,
    copy_key,
    follows,
    hang,
    has_engine_hash,
    is_held_by,
    new_run,
    set_of,
    take_out,
)
from kvplug.kernels.table import capacity_of, delete, erase_slot, find_slot, num_entries

U64 = npt.NDArray[np.uint64]
Index = int | np.int64

_0, _1, _2 = np.uint64(0), np.uint64(1), np.uint64(2)
_LOW = np.uint64(0xFFFFFFFF)
# What leave_holder did.
NOT_HELD, KEPT, GONE = 0, 1, 2


@inlined
def can_remove(blocks: Blocks, holder: Index, num_blocks: Index) -> bool:
    """Whether so many blocks may each move to a run of their own."""
    num_moved = min(num_blocks, np.int64(num_entries(blocks.table)))
    fits = runs.has_room(blocks.runs, num_moved)
    return fits and holders.has_room(blocks.meta, blocks.header, holder, num_moved)


@inlined
def _take_copy(copies: U64, key: np.uint64) -> bool:
    """Whether there was a copy above the first; then there is one less now."""
    capacity = capacity_of(copies)
    at = find_slot(copies, key, capacity)
    count = copies[_2 * at + _1] & _LOW
    if count == _1:
        erase_slot(copies, at, capacity)
    elif count != _0:
        copies[_2 * at + _1] -= _1
    return bool(count != _0)


@inlined
def _run_below(
    blocks: Blocks, run: np.uint64, set_id: Index, depth: np.uint64, family: np.uint64
) -> np.uint64:
    """The run that starts right behind the block, if it has this set and can be of this family;
    else 0.
    """
    if runs.get(blocks.runs, run, runs.END) != depth:
        return runs.NO_RUN
    other = runs.below(blocks.runs, run)
    is_next = other != runs.NO_RUN and runs.get(blocks.runs, other, runs.START) == depth + _1
    fits = is_next and set_of(blocks, other) == set_id
    return other if fits and runs.takes_family(blocks.runs, other, family) else runs.NO_RUN


@inlined
def _run_without(
    blocks: Blocks, run: np.uint64, set_id: Index, depth: np.uint64, hash_: np.uint64,
    family: np.uint64,
) -> np.uint64:  # fmt: skip
    """A new run for a block that leaves `run`, hung where the block hung."""
    seed = runs.get(blocks.runs, run, runs.SEED)
    created = new_run(blocks, set_id, depth, seed, _0)
    runs.append(blocks.runs, created, hash_, _0)
    runs.join_family(blocks.runs, created, family)
    hang(blocks, run, created, depth, hash_)
    return created


class Left(NamedTuple):
    """Of the last block that left a holder: the run that it is in, the one that it came from, their
    sets; and if it was the end of a run and nobody else had it, the place of the one before it.
    """

    run: np.uint64
    source: np.uint64
    before: np.int64
    wanted: np.int64
    next_end: np.uint64


@inlined
def nothing_left() -> Left:
    """No block has left yet."""
    return Left(runs.NO_RUN, runs.NO_RUN, np.int64(0), np.int64(0), _0)


@inlined
def _next_end(blocks: Blocks, run: np.uint64, depth: np.uint64) -> np.uint64:
    """The place before `depth` if that is the end of a whole run, and not its start; else 0."""
    is_end = runs.get(blocks.runs, run, runs.END) + _1 == depth
    if not is_end or runs.num_holes(blocks.runs, run) != _0:
        return _0
    is_start = runs.get(blocks.runs, run, runs.START) + _1 >= depth
    return _0 if is_start else runs.place(run, depth - _1)


@inlined
def _leave_end(
    blocks: Blocks, space: SpaceArrays, engine_hash: np.uint64, slot: np.uint64, last: Left
) -> Left:
    """The block at last.next_end leaves: what all but the first of a tail do."""
    run, depth = runs.run_of(last.next_end), runs.depth_of(last.next_end)
    if len(space.slots) > 0:
        delete(space.slots, engine_hash)
    runs.put(blocks.runs, run, runs.END, depth - _1)
    erase_slot(blocks.table, slot, capacity_of(blocks.table))
    return Left(runs.NO_RUN, run, last.before, last.wanted, _next_end(blocks, run, depth))


@inlined
def _leave_run(
    blocks: Blocks, space: SpaceArrays, engine_hash: np.uint64, hash_: np.uint64, holder: Index,
    slot: np.uint64, last: Left,
) -> Left:  # fmt: skip
    """The holder has no copy of the block any more."""
    place = blocks.table[_2 * slot + _1]
    run, depth = runs.run_of(place), runs.depth_of(place)
    # The same set is wanted for a block of the same set. It is alive, as a run has got it; and the
    # number of one that has the holder goes to no other while the holder only leaves.
    before, wanted = set_of(blocks, run), last.wanted
    if before != last.before:
        wanted = np.int64(
            holders.toggled(blocks.bits, blocks.meta, blocks.intern, blocks.header, before, holder)
        )
    if len(space.slots) > 0 and not has_engine_hash(blocks, space, wanted):
        delete(space.slots, engine_hash)
    if wanted == 0:
        take_out(blocks, run, depth, hash_)
        erase_slot(blocks.table, slot, capacity_of(blocks.table))
        return Left(runs.NO_RUN, run, before, wanted, _next_end(blocks, run, depth))
    family = runs.family_to_leave(blocks.runs, run, depth, hash_)
    other = _run_below(blocks, run, wanted, depth, family)
    if other != runs.NO_RUN:
        runs.prepend(blocks.runs, other)
        runs.join_family(blocks.runs, other, family)
    elif last.source == run and follows(blocks, last.run, wanted, depth, family):
        other = last.run
        runs.append(blocks.runs, other, hash_, _0)
    else:
        other = _run_without(blocks, run, wanted, depth, hash_, family)
    blocks.table[_2 * slot + _1] = runs.place(other, depth)
    take_out(blocks, run, depth, hash_)
    return Left(other, run, before, wanted, _0)


@inlined
def remove_from_holder(
    blocks: Blocks,
    space: SpaceArrays,
    engine_hash: np.uint64,
    hash_: np.uint64,
    holder: Index,
    last: Left,
) -> tuple[int, Left]:
    """The holder has one copy less: what became of the block, and Left for the event's next one."""
    slot = find_slot(blocks.table, hash_, capacity_of(blocks.table))
    place = blocks.table[_2 * slot + _1]
    if place == _0:
        return NOT_HELD, last
    has_copies = num_entries(blocks.copies) != _0
    if place == last.next_end and not has_copies:
        blocks.header[holders.NUM_HELD + holder] -= 1
        return GONE, _leave_end(blocks, space, engine_hash, slot, last)
    if not is_held_by(blocks, runs.run_of(place), holder):
        return NOT_HELD, last
    if has_copies and _take_copy(blocks.copies, copy_key(hash_, holder)):
        return KEPT, last
    blocks.header[holders.NUM_HELD + holder] -= 1
    return GONE, _leave_run(blocks, space, engine_hash, hash_, holder, slot, last)
