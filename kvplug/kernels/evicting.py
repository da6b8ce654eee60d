"""Tails out of a full index, and a filter that remembers their engine hashes.

In:  runs and where they end from now on; then the tables, a span at a time.
Out: the tables without the blocks behind those ends; how many each run had there; a filter with
their engine hashes.

The filter has two bits for each engine hash among `uint64[words]`, found by two halves of a mixed
hash (Bloom 1970): it forgets no hash before it is emptied, and when it is full takes one of some
dozens of unknown hashes for a known one. Reference: tests/index/test_evicting.py.
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels import holders, runs
from kvplug.kernels._jit import b1, i8, inlined, kernel, reads, u8, void, writes
from kvplug.kernels.residency import blocks_of
from kvplug.kernels.table import (
    capacity_of,
    erase_slot,
    fill_slot,
    find_slot,
    has_room,
    value_of,
)

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Index = int | np.int64

_0, _1, _2, _6, _32, _63 = (np.uint64(n) for n in (0, 1, 2, 6, 32, 63))
_LOW = np.uint64(0xFFFFFFFF)
# 64-bit finaliser of MurmurHash3 (Appleby 2011).
_MIX_1, _MIX_2, _33 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53), np.uint64(33)


@inlined
def _mixed(engine_hash: np.uint64) -> np.uint64:
    engine_hash = (engine_hash ^ (engine_hash >> _33)) * _MIX_1
    engine_hash = (engine_hash ^ (engine_hash >> _33)) * _MIX_2
    return engine_hash ^ (engine_hash >> _33)


@inlined
def _bit(half: np.uint64, words: U64) -> np.uint64:
    """A bit of the filter, by 32 bits of a hash."""
    return (half * (np.uint64(len(words)) << _6)) >> _32


@inlined
def _remember(words: U64, engine_hash: np.uint64) -> None:
    mixed = _mixed(engine_hash)
    for half in (mixed & _LOW, mixed >> _32):
        bit = _bit(half, words)
        words[bit >> _6] |= _1 << (bit & _63)


@kernel(void(writes(u8), reads(u8)))
def remember(words: U64, engine_hashes: U64) -> None:
    """The engine hashes are in the filter from now on."""
    for engine_hash in engine_hashes:
        _remember(words, np.uint64(engine_hash))


@kernel(b1(reads(u8), u8))
def is_remembered(words: U64, engine_hash: np.uint64) -> bool:
    """Whether the engine hash is in the filter."""
    mixed, found = _mixed(engine_hash), True
    for half in (mixed & _LOW, mixed >> _32):
        bit = _bit(half, words)
        found = found and (words[bit >> _6] >> (bit & _63)) & _1 != _0
    return found


@kernel(void(reads(i8), reads(i8), reads(u8)))
def cut_runs(chosen: I64, ends: I64, bundle: U64) -> None:
    """Run chosen[i] ends with depth ends[i]; one that has nothing left belongs to nobody.

    What it has behind that end is still counted, until `settle_runs`.
    """
    blocks = blocks_of(bundle)
    for i in range(len(chosen)):
        run = np.uint64(chosen[i])
        if ends[i] < np.int64(runs.get(blocks.runs, run, runs.START)):
            runs.put(blocks.runs, run, runs.SET, _0)
        else:
            runs.put(blocks.runs, run, runs.END, np.uint64(ends[i]))
            runs.put(blocks.runs, run, runs.TAIL, _0)


@kernel(i8(i8, i8, reads(u8), writes(u8), writes(u8), writes(i8), writes(i8)), releases_gil=True)
def evict_blocks(
    first: Index, last: Index, run_words: U64, table: U64, gone: U64, out_num_gone: I64,
    out_ends: I64,
) -> Index:  # fmt: skip
    """Erase the blocks in slots first..last that their runs do not reach; returns how many.

    Their hashes go to the table `gone`, which has room for all; out_num_gone[run] counts them.
    out_ends[run] is raised to the depth of the last block that stays, for runs with holes.
    """
    at, num_erased, capacity = np.uint64(first), 0, capacity_of(table)
    while at < np.uint64(last):
        hash_, place = table[_2 * at], table[_2 * at + _1]
        if place == _0 or runs.claims(run_words, place):
            run, depth = runs.run_of(place), np.int64(runs.depth_of(place))
            if place != _0 and runs.num_holes(run_words, run) != _0 and out_ends[run] < depth:
                out_ends[run] = depth
            at += _1
            continue
        erase_slot(table, at, capacity)
        num_erased += 1
        out_num_gone[runs.run_of(place)] += 1
        if has_room(gone, 1):
            slot = find_slot(gone, hash_, capacity_of(gone))
            if gone[_2 * slot + _1] == _0:
                fill_slot(gone, slot, hash_, _1)
    return num_erased


@kernel(void(reads(i8), reads(i8), reads(i8), reads(i8), reads(u8)))
def settle_runs(chosen: I64, sets: I64, depths: I64, num_gone: I64, bundle: U64) -> None:
    """Run chosen[i], of set sets[i], was cut by so many depths and had so many blocks there: the
    others were holes. One that has nothing left is released from its set, and free.
    """
    blocks = blocks_of(bundle)
    for i in range(len(chosen)):
        run = np.uint64(chosen[i])
        if runs.get(blocks.runs, run, runs.SET) != _0:
            num_holes = np.uint64(depths[i] - num_gone[i])
            used = runs.get(blocks.runs, run, runs.USED) - num_holes
            runs.put(blocks.runs, run, runs.USED, used)
        if runs.num_blocks(blocks.runs, run) == _0:
            runs.put(blocks.runs, run, runs.SET, _0)
        if runs.get(blocks.runs, run, runs.SET) == _0:
            runs.free(blocks.runs, run)
            holders.release(blocks.bits, blocks.meta, blocks.intern, blocks.header, sets[i])


@kernel(void(reads(i8), reads(u8)))
def trim_runs(ends: I64, bundle: U64) -> None:
    """Run i, if it has holes, ends with depth ends[i], where it has a block."""
    words = blocks_of(bundle).runs
    for i in range(1, len(ends)):
        run, end = np.uint64(i), np.uint64(ends[i])
        if runs.num_holes(words, run) != _0 and end < runs.get(words, run, runs.END):
            num_holes = runs.get(words, run, runs.END) - end
            runs.put(words, run, runs.USED, runs.get(words, run, runs.USED) - num_holes)
            runs.cut_below(words, run, _0)
            runs.put(words, run, runs.END, end)
            runs.put(words, run, runs.TAIL, _0)


@kernel(i8(i8, i8, reads(u8), writes(u8), writes(u8)), releases_gil=True)
def evict_engine_hashes(
    first: Index, last: Index, gone: U64, space_slots: U64, remembered: U64
) -> Index:
    """Erase the engine hashes in slots first..last of blocks that are gone, and remember them; how
    many.
    """
    at, num_erased, capacity = np.uint64(first), 0, capacity_of(space_slots)
    while at < np.uint64(last):
        engine_hash, hash_ = space_slots[_2 * at], space_slots[_2 * at + _1]
        if hash_ != _0 and value_of(gone, hash_) != _0:
            erase_slot(space_slots, at, capacity)
            _remember(remembered, engine_hash)
            num_erased += 1
        else:
            at += _1
    return num_erased
