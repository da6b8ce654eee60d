"""Many blocks out of the index at once, a span of an array at a time: clears and evictions.

In:  holders that are cleared, or runs that were cut short.   Out: arrays without their blocks.

Cutting a holder out of the sets of all runs, or the tails off some runs, is short; then the tables
are swept for blocks that no run claims any more. Between two calls the index is consistent for
queries, which do not find what a run does not claim; nothing else may come in between, as a removal
would move entries to slots that are done. Reference: removals one by one (tests/index/).
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels import holders, runs
from kvplug.kernels._jit import i8, inlined, kernel, reads, u4, u8, void, writes
from kvplug.kernels.table import capacity_of, erase_slot, value_of

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Index = int | np.int64

_0, _1, _2, _32 = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(32)
NUM_COPIES, NUM_BLOCKS = 0, 1


@inlined
def _move(
    run: np.uint64, new: Index, run_words: U64, bits: U64, meta: U64, intern: U32, header: I64
) -> None:
    old = np.int64(runs.get(run_words, run, runs.SET))
    holders.retain(meta, new)
    runs.change_set(run_words, run, new)
    holders.release(bits, meta, intern, header, old)


@kernel(
    i8(i8, i8, reads(i8), writes(u8), writes(u8), writes(u8), writes(u4), writes(i8), writes(i8)),
    releases_gil=True,
)
def cut_holders(
    first: Index, last: Index, cleared: I64,
    run_words: U64, bits: U64, meta: U64, intern: U32, header: I64, out_counts: I64,
) -> Index:  # fmt: skip
    """Take the holders out of the sets of runs first..last; returns the next run to do.

    Less than `last` if the sets need room first. Adds copies gone to out_counts[NUM_COPIES], blocks
    that nobody has any more to out_counts[NUM_BLOCKS].
    """
    for run in range(first, last):
        at = np.uint64(run)
        old = np.int64(runs.get(run_words, at, runs.SET))
        if old == 0:
            continue
        num_blocks = np.int64(runs.num_blocks(run_words, at))
        for i in range(len(cleared)):
            now = np.int64(runs.get(run_words, at, runs.SET))
            if now != 0 and holders.contains(bits, header[0], now, cleared[i]):
                if not holders.has_room(meta, header, 0, 1):
                    return run
                without = holders.toggled(bits, meta, intern, header, now, cleared[i])
                _move(at, without, run_words, bits, meta, intern, header)
                header[holders.NUM_HELD + cleared[i]] -= num_blocks
                out_counts[NUM_COPIES] += num_blocks
        if runs.get(run_words, at, runs.SET) == _0:
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
def _has_any(place: np.uint64, run_words: U64, bits: U64, header: I64, members: U64) -> bool:
    """Whether any holder of the hash space has the block; members is empty if there is one hash
    space.
    """
    if place == _0 or not runs.claims(run_words, place):
        return False
    set_id = np.int64(runs.get(run_words, runs.run_of(place), runs.SET))
    return bool(holders.has_any(bits, header[0], set_id, members))


@kernel(
    i8(i8, i8, reads(u8), reads(u8), reads(u8), reads(i8), reads(u8), writes(u8)),
    releases_gil=True,
)
def sweep_engine_hashes(
    first: Index, last: Index, table: U64, run_words: U64, bits: U64, header: I64, members: U64,
    space_slots: U64,
) -> Index:  # fmt: skip
    """Erase the engine hashes in slots first..last of blocks that no rank of the hash space has;
    how many.
    """
    at, num_erased, capacity = np.uint64(first), 0, capacity_of(space_slots)
    while at < np.uint64(last):
        hash_ = space_slots[_2 * at + _1]
        place = value_of(table, hash_) if hash_ != _0 else _0
        if hash_ != _0 and not _has_any(place, run_words, bits, header, members):
            erase_slot(space_slots, at, capacity)
            num_erased += 1
        else:
            at += _1
    return num_erased


@kernel(i8(i8, i8, reads(u8), reads(u8), reads(u8), reads(i8), writes(u8)), releases_gil=True)
def sweep_copies(
    first: Index, last: Index, table: U64, run_words: U64, bits: U64, header: I64, copies: U64
) -> Index:
    """Erase counts in slots first..last of blocks that their holder has no more; how many."""
    at, num_erased, capacity = np.uint64(first), 0, capacity_of(copies)
    while at < np.uint64(last):
        key, value = copies[_2 * at], copies[_2 * at + _1]
        holder, held = np.int64(value >> _32), value == _0
        if not held:
            place = value_of(table, key ^ holders.mark_of(holder))
            run = runs.run_of(place)
            held = place != _0 and runs.claims(run_words, place)
            held = held and holders.contains(
                bits, header[0], np.int64(runs.get(run_words, run, runs.SET)), holder
            )
        if held:
            at += _1
        else:
            erase_slot(copies, at, capacity)
            num_erased += 1
    return num_erased


@kernel(void(writes(u8)))
def free_dead_runs(run_words: U64) -> None:
    """Runs that nobody has, once their blocks are swept: their numbers are free again."""
    for run in range(1, len(run_words) // runs.WIDTH):
        at = np.uint64(run)
        if runs.is_live(run_words, at) and runs.get(run_words, at, runs.SET) == _0:
            runs.free(run_words, at)
