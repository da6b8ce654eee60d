"""Many blocks out of the index at once, a span of an array at a time: clears and evictions.

In:  holders that are cleared, or runs that were cut short.   Out: arrays without their blocks.

Taking a holder out of the sets of all runs, or cutting the tails off some, is quick; then the
tables are swept for blocks that no run claims any more. Between two calls the index is consistent
for queries, which do not find what no run claims; nothing else may come in between, as a removal
would move entries to slots that are done. Reference: removals one by one (tests/index/).
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels import holders, runs
from kvplug.kernels._jit import i8, inlined, kernel, reads, u8, void, writes
from kvplug.kernels.residency import Blocks, blocks_of, is_held_by, set_of
from kvplug.kernels.table import capacity_of, erase_slot, value_of

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Index = int | np.int64

_0, _1, _2, _32 = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(32)
NUM_COPIES, NUM_BLOCKS = 0, 1


@inlined
def _leave(blocks: Blocks, run: np.uint64, holder: Index) -> None:
    """The holder does not have the run any more."""
    before = set_of(blocks, run)
    without = holders.toggled(
        blocks.bits, blocks.meta, blocks.intern, blocks.header, before, holder
    )
    holders.retain(blocks.meta, without)
    runs.change_set(blocks.runs, run, without)
    holders.release(blocks.bits, blocks.meta, blocks.intern, blocks.header, before)


@kernel(i8(i8, i8, reads(i8), reads(u8), writes(i8)), releases_gil=True)
def cut_holders(first: Index, last: Index, cleared: I64, bundle: U64, out_counts: I64) -> Index:
    """Take the holders out of the sets of runs first..last; returns the next run to do.

    Less than `last` if the sets need room first. Adds copies gone to out_counts[NUM_COPIES], blocks
    that nobody has any more to out_counts[NUM_BLOCKS].
    """
    blocks = blocks_of(bundle)
    for at in range(first, last):
        run = np.uint64(at)
        if set_of(blocks, run) == 0:
            continue
        num_blocks = np.int64(runs.num_blocks(blocks.runs, run))
        for i in range(len(cleared)):
            if set_of(blocks, run) != 0 and is_held_by(blocks, run, cleared[i]):
                if not holders.has_room(blocks.meta, blocks.header, 0, 1):
                    return at
                _leave(blocks, run, cleared[i])
                blocks.header[holders.NUM_HELD + cleared[i]] -= num_blocks
                out_counts[NUM_COPIES] += num_blocks
        if set_of(blocks, run) == 0:
            out_counts[NUM_BLOCKS] += num_blocks
    return last


@kernel(i8(i8, i8, reads(u8), writes(u8)), releases_gil=True)
def sweep_blocks(first: Index, last: Index, run_words: U64, table: U64) -> Index:
    """Erase the blocks in slots first..last that no run claims; returns how many.

    An entry that moves into a slot is looked at, too.
    """
    at, num_erased, capacity = np.uint64(first), 0, capacity_of(table)
    while at < np.uint64(last):
        place = table[_2 * at + _1]
        if place != _0 and not runs.claims(run_words, place):
            erase_slot(table, at, capacity)
            num_erased += 1
        else:
            at += _1
    return num_erased


@inlined
def _is_held(blocks: Blocks, hash_: np.uint64, members: U64) -> bool:
    """Whether a holder in `members` (of length 0: any holder) has the block."""
    place = value_of(blocks.table, hash_)
    if place == _0 or not runs.claims(blocks.runs, place):
        return False
    set_id = set_of(blocks, runs.run_of(place))
    return bool(holders.has_any(blocks.bits, blocks.header[holders.WORDS], set_id, members))


@kernel(i8(i8, i8, writes(u8), reads(u8), reads(u8)), releases_gil=True)
def sweep_engine_hashes(
    first: Index, last: Index, space_slots: U64, members: U64, bundle: U64
) -> Index:
    """Erase the engine hashes in slots first..last of blocks that no rank of the hash space has;
    how many.
    """
    blocks = blocks_of(bundle)
    at, num_erased, capacity = np.uint64(first), 0, capacity_of(space_slots)
    while at < np.uint64(last):
        hash_ = space_slots[_2 * at + _1]
        if hash_ != _0 and not _is_held(blocks, hash_, members):
            erase_slot(space_slots, at, capacity)
            num_erased += 1
        else:
            at += _1
    return num_erased


@inlined
def _is_copy_held(blocks: Blocks, key: np.uint64, holder: Index) -> bool:
    """Whether the holder has the block whose copies are counted at this key."""
    place = value_of(blocks.table, key ^ holders.mark_of(holder))
    if place == _0 or not runs.claims(blocks.runs, place):
        return False
    return is_held_by(blocks, runs.run_of(place), holder)


@kernel(i8(i8, i8, reads(u8)), releases_gil=True)
def sweep_copies(first: Index, last: Index, bundle: U64) -> Index:
    """Erase counts in slots first..last of blocks that their holder has no more; how many."""
    blocks = blocks_of(bundle)
    copies, at, num_erased = blocks.copies, np.uint64(first), 0
    while at < np.uint64(last):
        key, value = copies[_2 * at], copies[_2 * at + _1]
        if value == _0 or _is_copy_held(blocks, key, np.int64(value >> _32)):
            at += _1
        else:
            erase_slot(copies, at, capacity_of(copies))
            num_erased += 1
    return num_erased


@kernel(void(writes(u8)))
def free_dead_runs(run_words: U64) -> None:
    """Runs that nobody has, once their blocks are swept: their numbers are free again."""
    for run in range(1, len(run_words) // runs.WIDTH):
        at = np.uint64(run)
        if runs.is_live(run_words, at) and runs.get(run_words, at, runs.SET) == _0:
            runs.free(run_words, at)
