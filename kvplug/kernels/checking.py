"""What must be true of the arrays of an index, block by block.

In:  the tables and runs (kernels/residency.py).   Out: how many entries are as they must be.

Passes over all blocks, for `BlockIndex.check()`; what can be said per run or per set is said in
kvplug/index/block_store.py. `seen` is a bitmap that starts at 0.
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels import holders, runs
from kvplug.kernels._jit import i8, inlined, kernel, reads, u1, u8, writes
from kvplug.kernels.table import capacity_of, find_slot, value_of

Bytes = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Index = int | np.int64

_0, _1, _2, _32 = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(32)


@inlined
def _see(seen: Bytes, at: Index) -> bool:
    """Mark it as seen; whether this is the first time."""
    bit = np.uint8(1 << (at & 7))
    is_new = seen[at >> 3] & bit == 0
    seen[at >> 3] |= bit
    return bool(is_new)


@kernel(i8(reads(u8), reads(u8), reads(i8), writes(u1), writes(i8)))
def count_placed(
    table: U64, run_words: U64, first_of_run: I64, seen: Bytes, out_num_blocks: I64
) -> int:
    """How many blocks are alone at a depth between START and END of a live run.

    first_of_run: where in `seen` each run begins. out_num_blocks: how many of them each run has.
    """
    num_placed = 0
    for at in range(len(table) // 2 - 1):
        place = table[2 * at + 1]
        if place == _0:
            continue
        run, depth = runs.run_of(place), runs.depth_of(place)
        if np.int64(run) >= len(first_of_run) or not runs.is_live(run_words, run):
            continue
        start, end = runs.get(run_words, run, runs.START), runs.get(run_words, run, runs.END)
        if start <= depth and depth <= end:
            num_placed += _see(seen, first_of_run[run] + np.int64(depth - start))
            out_num_blocks[run] += 1
    return num_placed


@kernel(i8(reads(u8), reads(u8), reads(u8), reads(u8), i8, reads(u8), writes(u1)))
def count_engine_hashes(
    engine_hashes: U64, table: U64, run_words: U64, bits: U64, words: int, members: U64, seen: Bytes
) -> int:
    """How many engine hashes are the only one of a block that a holder in `members` has (of length
    0: any holder).
    """
    num_paired, capacity = 0, capacity_of(table)
    for at in range(len(engine_hashes) // 2 - 1):
        hash_ = engine_hashes[2 * at + 1]
        if hash_ == _0:
            continue
        slot = find_slot(table, hash_, capacity)
        place = table[_2 * slot + _1]
        set_id = runs.set_of(run_words, runs.run_of(place))
        if place != _0 and holders.has_any(bits, words, set_id, members):
            num_paired += _see(seen, np.int64(slot))
    return num_paired


@kernel(i8(reads(u8), reads(u8), reads(u8), i8, reads(u8)))
def count_held(table: U64, run_words: U64, bits: U64, words: int, members: U64) -> int:
    """How many blocks a holder in `members` has (of length 0: any holder)."""
    num_held = 0
    for at in range(len(table) // 2 - 1):
        place = table[2 * at + 1]
        if place != _0:
            set_id = runs.set_of(run_words, runs.run_of(place))
            num_held += holders.has_any(bits, words, set_id, members)
    return num_held


@kernel(i8(reads(u8), reads(u8), reads(u8), reads(u8), i8))
def count_copied(copies: U64, table: U64, run_words: U64, bits: U64, words: int) -> int:
    """How many counts of copies are of blocks that their holder has."""
    num_copied = 0
    for at in range(len(copies) // 2 - 1):
        holder = np.int64(copies[2 * at + 1] >> _32)
        place = value_of(table, copies[2 * at] ^ holders.mark_of(holder))
        if copies[2 * at + 1] != _0 and place != _0:
            set_id = runs.set_of(run_words, runs.run_of(place))
            num_copied += holders.contains(bits, words, set_id, holder)
    return num_copied
