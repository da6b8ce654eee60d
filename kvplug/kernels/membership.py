"""Blocks to and from a holder, for events that no kernel has read.

In:  hashes of one event's blocks, a holder, bundles of the arrays of kernels/residency.py.
Out: the arrays changed; how many blocks that were.

The caller has made room (store.can_store, remove.can_remove). Reference: tests/index/reference.py.
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels import holders, runs
from kvplug.kernels._jit import i8, kernel, reads, u1, u8, void, writes
from kvplug.kernels.bundle import u64_of
from kvplug.kernels.remove import GONE, NOT_HELD, nothing_left, remove_from_holder
from kvplug.kernels.residency import NUM_ARRAYS, SpaceArrays, blocks_of, hash_of, set_of
from kvplug.kernels.store import claim, hold
from kvplug.kernels.table import capacity_of, find_slot, value_of

Bytes = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
Index = int | np.int64

CONFLICT = -1
# Behind the arrays of the block store, the bundle has room for a word of each block of an event.
SCRATCH = NUM_ARRAYS
_0, _1, _2 = np.uint64(0), np.uint64(1), np.uint64(2)


@kernel(i8(i8, u8, u8, reads(u8), reads(u8), writes(u8), reads(u8), reads(u8)))
def store_blocks(
    holder: Index, parent: np.uint64, seed: np.uint64, engine_hashes: U64, hashes: U64,
    space_slots: U64, members: U64, bundle: U64,
) -> Index:  # fmt: skip
    """The holder has one more copy of consecutive blocks behind the block with hash `parent` (0: at
    the start of a sequence); returns how many it had none of, CONFLICT if nothing was done.
    """
    blocks, space = blocks_of(bundle), SpaceArrays(space_slots, members)
    at = u64_of(bundle, SCRATCH)[: len(hashes)]
    place = value_of(blocks.table, parent) if parent != _0 else _0
    if parent != _0 and place == _0:
        return CONFLICT
    depth = _0 if parent == _0 else runs.depth_of(place) + _1
    if not claim(blocks, space, engine_hashes, hashes, depth, at):
        return CONFLICT
    return hold(blocks, holder, hashes, at, depth, runs.run_of(place), parent, seed)


@kernel(i8(i8, reads(u8), reads(u8)))
def copy_blocks(holder: Index, hashes: U64, bundle: U64) -> Index:
    """The holder has one more copy of blocks that others have; returns how many it had none of."""
    blocks, scratch = blocks_of(bundle), u64_of(bundle, SCRATCH)
    num_new: Index = 0
    for i in range(len(hashes)):
        at = find_slot(blocks.table, hashes[i], capacity_of(blocks.table))
        place = blocks.table[_2 * at + _1]
        run, before, last = runs.run_of(place), _0, runs.NO_RUN
        if runs.get(blocks.runs, run, runs.START) == runs.depth_of(place):
            # Copies mostly come one by one, in order: go on with the run of the block before.
            before = runs.parent_of(blocks.runs, run)
            last = runs.run_of(value_of(blocks.table, before)) if before != _0 else runs.NO_RUN
        scratch[i] = at << _2
        seed = runs.get(blocks.runs, run, runs.SEED)
        one, slot = hashes[i : i + 1], scratch[i : i + 1]
        num_new += hold(blocks, holder, one, slot, runs.depth_of(place), last, before, seed)
    return num_new


@kernel(i8(i8, reads(u8), writes(u8), reads(u8), reads(u8)))
def drop_engine_hashes(
    holder: Index, engine_hashes: U64, space_slots: U64, members: U64, bundle: U64
) -> Index:
    """The holder has one copy less of each block; returns how many it had."""
    blocks, space, num_had = blocks_of(bundle), SpaceArrays(space_slots, members), 0
    last = nothing_left()
    for i in range(len(engine_hashes)):
        hash_, became = hash_of(space, engine_hashes[i]), NOT_HELD
        if hash_ != _0:
            became, last = remove_from_holder(blocks, space, engine_hashes[i], hash_, holder, last)
        num_had += became != NOT_HELD
    return num_had


@kernel(i8(i8, reads(u8), reads(u8)))
def drop_hashes(holder: Index, hashes: U64, bundle: U64) -> Index:
    """As drop_engine_hashes for blocks without engine hashes, the deepest first; returns how many
    the holder has no more.
    """
    blocks, num_gone = blocks_of(bundle), 0
    no_space = SpaceArrays(blocks.table[:0], blocks.table[:0])
    last = nothing_left()
    for i in range(len(hashes) - 1, -1, -1):
        became, last = remove_from_holder(blocks, no_space, _0, hashes[i], holder, last)
        num_gone += became == GONE
    return num_gone


@kernel(void(reads(u8), reads(u8), reads(u8), writes(u1)))
def which_held(hashes: U64, members: U64, bundle: U64, out_held: Bytes) -> None:
    """out_held[i]: whether a holder in `members`, which is a bit for each, has block i."""
    blocks = blocks_of(bundle)
    for i in range(len(hashes)):
        place, out_held[i] = value_of(blocks.table, hashes[i]), 0
        if place != _0:
            set_id = set_of(blocks, runs.run_of(place))
            words = blocks.header[holders.WORDS]
            out_held[i] = holders.has_any(blocks.bits, words, set_id, members)
