"""Blocks in and out of the index, for events that a kernel has not read.

In:  hashes and names of one event's blocks, a holder, the arrays of kernels/residency.py.
Out: the arrays changed; how many blocks that were.

The caller has made room (joining.can_join, leaving.can_leave). Reference: tests/index/reference.py.
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels import holders, runs
from kvplug.kernels._jit import i8, kernel, reads, u1, u4, u8, void, writes
from kvplug.kernels.remove import GONE, NOT_HELD, nothing_left, remove_from_holder
from kvplug.kernels.residency import Blocks, SpaceArrays, hash_of
from kvplug.kernels.store import claim, hold
from kvplug.kernels.table import capacity_of, find_slot, value_of

Bytes = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Index = int | np.int64

CONFLICT = -1
_0, _1, _2 = np.uint64(0), np.uint64(1), np.uint64(2)
_BLOCKS = (writes(u8), writes(u8), writes(u8), writes(u8), writes(u8), writes(u4), writes(i8))
_NAMES = (writes(u8), reads(u8))


@kernel(i8(i8, u8, u8, reads(u8), reads(u8), writes(u8), *_NAMES, *_BLOCKS))
def store_blocks(
    holder: Index, parent: np.uint64, seed: np.uint64, engine_hashes: U64, hashes: U64, out_at: U64,
    space_slots: U64, members: U64,
    table: U64, copies: U64, run_words: U64, bits: U64, meta: U64, intern: U32, header: I64,
) -> Index:  # fmt: skip
    """The holder has one more copy of consecutive blocks behind the block with hash `parent` (0: at
    the start of a sequence); returns how many it had none of, CONFLICT if nothing was done.
    """
    blocks = Blocks(table, copies, run_words, bits, meta, intern, header)
    space = SpaceArrays(space_slots, members)
    place = value_of(table, parent) if parent != _0 else _0
    if parent != _0 and place == _0:
        return CONFLICT
    depth = _0 if parent == _0 else runs.depth_of(place) + _1
    if not claim(blocks, space, engine_hashes, hashes, depth, out_at):
        return CONFLICT
    at = out_at[: len(hashes)]
    return hold(blocks, holder, hashes, at, depth, runs.run_of(place), parent, seed)


@kernel(i8(i8, reads(u8), writes(u8), *_BLOCKS))
def copy_blocks(
    holder: Index, hashes: U64, out_at: U64,
    table: U64, copies: U64, run_words: U64, bits: U64, meta: U64, intern: U32, header: I64,
) -> Index:  # fmt: skip
    """The holder has one more copy of blocks that others have; returns how many it had none of."""
    blocks = Blocks(table, copies, run_words, bits, meta, intern, header)
    num_new: Index = 0
    for i in range(len(hashes)):
        at = find_slot(table, hashes[i], capacity_of(table))
        place = table[_2 * at + _1]
        run, before, last = runs.run_of(place), _0, runs.NO_RUN
        if runs.get(run_words, run, runs.START) == runs.depth_of(place):
            # Copies mostly come one by one, in order: go on with the run of the block before.
            before = runs.parent_of(run_words, run)
            last = runs.run_of(value_of(table, before)) if before != _0 else runs.NO_RUN
        out_at[i] = at << _2
        seed = runs.get(run_words, run, runs.SEED)
        one, slot = hashes[i : i + 1], out_at[i : i + 1]
        num_new += hold(blocks, holder, one, slot, runs.depth_of(place), last, before, seed)
    return num_new


@kernel(i8(i8, reads(u8), *_NAMES, *_BLOCKS))
def drop_engine_hashes(
    holder: Index, engine_hashes: U64, space_slots: U64, members: U64,
    table: U64, copies: U64, run_words: U64, bits: U64, meta: U64, intern: U32, header: I64,
) -> Index:  # fmt: skip
    """The holder has one copy less of each block; returns how many it had."""
    blocks = Blocks(table, copies, run_words, bits, meta, intern, header)
    space, num_had = SpaceArrays(space_slots, members), 0
    last = nothing_left()
    for i in range(len(engine_hashes)):
        hash_, became = hash_of(space, engine_hashes[i]), NOT_HELD
        if hash_ != _0:
            became, last = remove_from_holder(blocks, space, engine_hashes[i], hash_, holder, last)
        num_had += became != NOT_HELD
    return num_had


@kernel(i8(i8, reads(u8), *_BLOCKS))
def drop_hashes(
    holder: Index, hashes: U64,
    table: U64, copies: U64, run_words: U64, bits: U64, meta: U64, intern: U32, header: I64,
) -> Index:  # fmt: skip
    """As drop_engine_hashes for blocks without names, deepest first; returns how many the holder
    has no more.
    """
    blocks = Blocks(table, copies, run_words, bits, meta, intern, header)
    no_space, num_gone = SpaceArrays(table[:0], table[:0]), 0
    last = nothing_left()
    for i in range(len(hashes) - 1, -1, -1):
        became, last = remove_from_holder(blocks, no_space, _0, hashes[i], holder, last)
        num_gone += became == GONE
    return num_gone


@kernel(void(reads(u8), reads(u8), i8, reads(u8), reads(u8), reads(u8), writes(u1)))
def which_held(
    hashes: U64, mask: U64, words: Index, table: U64, run_words: U64, bits: U64, out_held: Bytes
) -> None:
    """out_held[i]: whether any holder in the mask has block i; one bit per holder, in `words`."""
    for i in range(len(hashes)):
        place, out_held[i] = value_of(table, hashes[i]), 0
        if place != _0:
            set_id = np.int64(runs.get(run_words, runs.run_of(place), runs.SET))
            out_held[i] = holders.has_any(bits, words, set_id, mask)
