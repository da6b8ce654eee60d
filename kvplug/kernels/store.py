"""Blocks come to a holder.

In:  sequence hashes and engine hashes of consecutive blocks, a holder number.
Out: the arrays of kernels/residency.py, changed.

An event is claimed first: its slots are found and filled, or everything is taken back if an engine
hash and a sequence hash conflict. Then it is held: a block that is new to a holder leaves its run
for one whose set has the holder, too, at best the run of the block before. Parts for membership.py
and applying.py. Reference: tests/index/reference.py.
"""

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
from kvplug.kernels.table import (
    capacity_of,
    count_up,
    delete,
    fill_slot,
    find_slot,
    has_room,
    prefetch_first,
    prefetch_next,
)

U64 = npt.NDArray[np.uint64]
Index = int | np.int64

_0, _1, _2, _32 = (np.uint64(n) for n in (0, 1, 2, 32))
_CLAIMED = np.uint64(0xFFFFFFFF)  # the run of a block that has none yet
_NOTHING = ~_0


@inlined
def can_store(blocks: Blocks, space: SpaceArrays, holder: Index, num_blocks: Index) -> bool:
    """Whether so many blocks, all of them new, fit in every array."""
    fits = has_room(blocks.table, num_blocks) and has_room(blocks.copies, num_blocks)
    if len(space.slots) > 0:
        fits = fits and has_room(space.slots, num_blocks)
    fits = fits and runs.has_room(blocks.runs, num_blocks)
    return fits and holders.has_room(blocks.meta, blocks.header, holder, num_blocks)


@inlined
def _fits_content(value: np.uint64, hash_: np.uint64, depth: np.uint64) -> bool:
    """Whether the table has the block at this depth of a sequence, or not at all."""
    if value == _0:
        return bool(hash_ != _0)
    return bool(runs.depth_of(value) == depth and runs.run_of(value) != _CLAIMED)


@inlined
def _claim_engine_hash(
    blocks: Blocks, space: SpaceArrays, engine_hash: np.uint64, hash_: np.uint64, value: np.uint64
) -> int:
    """1 if the engine hash is new, 0 if it is there, -1 if it conflicts with the sequence hash."""
    at = find_slot(space.slots, engine_hash, capacity_of(space.slots))
    known = space.slots[_2 * at + _1]
    if known != _0:
        return 0 if known == hash_ and value != _0 else -1
    if value != _0 and has_engine_hash(blocks, space, set_of(blocks, runs.run_of(value))):
        return -1  # under another engine hash
    fill_slot(space.slots, at, engine_hash, hash_)
    return 1


@inlined
def _give_back(
    blocks: Blocks, space: SpaceArrays, engine_hashes: U64, hashes: U64, at: U64
) -> None:
    for i in range(len(at) - 1, -1, -1):
        if at[i] & _1 != _0:
            delete(space.slots, engine_hashes[i])
        if at[i] & _2 != _0:
            delete(blocks.table, hashes[i])


@inlined
def claim(
    blocks: Blocks,
    space: SpaceArrays,
    engine_hashes: U64,
    hashes: U64,
    depth: np.uint64,
    out_at: U64,
) -> bool:
    """Find or fill the slot of each block; False, and nothing done, if there is a conflict.

    out_at[i]: the slot, times 4, plus 2 if the block is new to the table, plus 1 if its engine
    hash is new to the hash space.
    """
    capacity = capacity_of(blocks.table)
    prefetch_first(blocks.table, hashes)
    if len(space.slots) > 0:
        prefetch_first(space.slots, engine_hashes)
    for i in range(len(hashes)):
        prefetch_next(blocks.table, hashes, i, capacity)
        if len(space.slots) > 0:
            prefetch_next(space.slots, engine_hashes, i, capacity_of(space.slots))
        slot = find_slot(blocks.table, hashes[i], capacity)
        value, claimed = blocks.table[_2 * slot + _1], 0
        fits = _fits_content(value, hashes[i], depth)
        if fits and len(space.slots) > 0:
            claimed = _claim_engine_hash(blocks, space, engine_hashes[i], hashes[i], value)
        if not fits or claimed < 0:
            _give_back(blocks, space, engine_hashes, hashes, out_at[:i])
            return False
        out_at[i] = (slot << _2) | (_2 if value == _0 else _0) | np.uint64(claimed)
        if value == _0:
            fill_slot(blocks.table, slot, hashes[i], runs.place(_CLAIMED, depth))
        depth += _1
    return True


@inlined
def _run_with(
    blocks: Blocks, holder: Index, source: np.uint64, last: np.uint64,
    depth: np.uint64, hash_: np.uint64, seed: np.uint64, before: np.uint64,
) -> np.uint64:  # fmt: skip
    """The run for a block that leaves `source` (0: a new block) as the holder gets it, too."""
    set_id = np.int64(0) if source == runs.NO_RUN else set_of(blocks, source)
    wanted = holders.toggled(blocks.bits, blocks.meta, blocks.intern, blocks.header, set_id, holder)
    family = runs.family_to_leave(blocks.runs, source, depth, hash_)
    if follows(blocks, last, wanted, depth, family):
        return last
    created = new_run(blocks, wanted, depth, seed, before)
    runs.join_family(blocks.runs, created, family)
    if before == _0 and source != runs.NO_RUN:
        hang(blocks, source, created, depth, hash_)
    is_next = last != runs.NO_RUN and runs.get(blocks.runs, last, runs.END) + _1 == depth
    if is_next and runs.below(blocks.runs, last) == runs.NO_RUN:
        runs.link(blocks.runs, last, created, before)
    return created


@inlined
def _link_rest(
    blocks: Blocks, run: np.uint64, rest: np.uint64, depth: np.uint64, hash_: np.uint64
) -> None:
    """The rest of a run follows the one that took its head: a match need not look it up."""
    is_next = runs.get(blocks.runs, rest, runs.START) == depth + _1
    if is_next and runs.is_live(blocks.runs, rest):
        runs.link(blocks.runs, run, rest, hash_)


@inlined
def has_all(blocks: Blocks, holder: Index, at: U64) -> bool:
    """Whether the holder has every one of the claimed blocks."""
    for i in range(len(at)):
        run = runs.run_of(blocks.table[_2 * (at[i] >> _2) + _1])
        if run == _CLAIMED or run == runs.NO_RUN or not is_held_by(blocks, run, holder):
            return False
    return True


@inlined
def hold(
    blocks: Blocks, holder: Index, hashes: U64, at: U64, depth: np.uint64,
    last: np.uint64, before: np.uint64, seed: np.uint64,
) -> Index:  # fmt: skip
    """The holder has one more copy of each claimed block; returns how many it had none of.

    `depth` of the first one, `last` and `before`: the run and the hash of the block before it.
    """
    last_source, num_new = _NOTHING, 0
    for i in range(len(hashes)):
        slot = at[i] >> _2
        source = runs.run_of(blocks.table[_2 * slot + _1])
        if source == _CLAIMED:
            source = runs.NO_RUN
        if source != runs.NO_RUN and is_held_by(blocks, source, holder):
            count_up(blocks.copies, copy_key(hashes[i], holder), np.uint64(holder) << _32)
            last, last_source = source, _NOTHING
        else:
            # A span of one run stays together: no set to look for after its first block.
            if source != last_source:
                last = _run_with(blocks, holder, source, last, depth, hashes[i], seed, before)
            runs.append(blocks.runs, last, hashes[i], before)
            if source != runs.NO_RUN:
                take_out(blocks, source, depth, hashes[i])
                if i == len(hashes) - 1:
                    _link_rest(blocks, last, source, depth, hashes[i])
            blocks.table[_2 * slot + _1] = runs.place(last, depth)
            last_source = source
            num_new += 1
        before = hashes[i]
        depth += _1
    runs.mark_used(blocks.runs, last)
    blocks.header[holders.NUM_HELD + holder] += num_new
    return num_new
