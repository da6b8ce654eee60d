"""Blocks join a holder and leave it: the relation block x holder, in arrays.

In:  sequence hashes of consecutive blocks, what the engine calls them, a holder number.
Out: the arrays of kvplug/index/holdings.py and a table of names, changed.

    table    sequence hash -> place (run and depth, kernels/runs.py)
    names    engine hash -> sequence hash, for the ranks of one domain; none where nobody names
    copies   hash xor mark of the holder -> (holder, copies above the first one)
    runs     kernels/runs.py           bits, meta, intern, header   kernels/holders.py

An event is claimed first (its slots found and filled, or everything taken back if a name and a
content do not go together), then held. A block that is new to a holder leaves its run for one whose
set has the holder, too: at best the run of the block before. Parts for storing.py, applying.py and
sweeping.py, made of parts of the files that they name. Twin: tests/index/twin.py.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.kernels import holders, runs
from kvplug.kernels._jit import inlined, prefetch
from kvplug.kernels.table import (
    capacity_of,
    count_up,
    delete,
    erase_slot,
    fill_slot,
    find_slot,
    home_of,
    num_entries,
    value_of,
)
from kvplug.kernels.table import has_room as table_has_room

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Index = int | np.int64

_0, _1, _2, _4, _32 = (np.uint64(n) for n in (0, 1, 2, 4, 32))
_LOW = np.uint64(0xFFFFFFFF)
# Of each of two tables at once. What is asked for while a core has some dozens of loads under way
# is forgotten: 8 MiB looked at in random order took 51 ns each with 128 at once, 12 with 64 and 6
# with 16.
NUM_TOUCHED = 12
_CLAIMED = _LOW  # the run of a block that has none yet
_NOTHING = ~_0
# What leave_holder did.
NOT_HELD, KEPT, GONE = 0, 1, 2


class Blocks(NamedTuple):
    """The arrays of kvplug/index/holdings.py."""

    table: U64
    copies: U64
    runs: U64
    bits: U64
    meta: U64
    intern: U32
    header: I64


class Names(NamedTuple):
    """A domain: engine hash -> sequence hash (empty array: blocks have no names), and the bits of
    its holders (empty: every holder is in it).
    """

    slots: U64
    members: U64


@inlined
def copy_key(hash_: np.uint64, holder: Index) -> np.uint64:
    """Where the copies of a block by a holder are counted."""
    return hash_ ^ holders.mark_of(holder)


@inlined
def set_of(blocks: Blocks, run: np.uint64) -> np.int64:
    """The set of a run."""
    return np.int64(runs.get(blocks.runs, run, runs.SET))


@inlined
def is_held_by(blocks: Blocks, run: np.uint64, holder: Index) -> bool:
    """Whether the holder has the blocks of the run."""
    return bool(holders.contains(blocks.bits, blocks.header[0], set_of(blocks, run), holder))


@inlined
def is_named(blocks: Blocks, names: Names, set_id: Index) -> bool:
    """Whether any rank of the domain is in the set, so that its blocks have names there."""
    return bool(holders.has_any(blocks.bits, blocks.header[0], set_id, names.members))


@inlined
def can_leave(blocks: Blocks, holder: Index, num_blocks: Index) -> bool:
    """Whether as many blocks may each leave for a run of their own."""
    num_moved = min(num_blocks, np.int64(num_entries(blocks.table)))
    fits = runs.has_room(blocks.runs, num_moved)
    return fits and holders.has_room(blocks.meta, blocks.header, holder, num_moved)


@inlined
def can_join(blocks: Blocks, names: Names, holder: Index, num_blocks: Index) -> bool:
    """Whether as many blocks, new ones all of them, fit in every array."""
    fits = table_has_room(blocks.table, num_blocks) and table_has_room(blocks.copies, num_blocks)
    if len(names.slots) > 0:
        fits = fits and table_has_room(names.slots, num_blocks)
    fits = fits and runs.has_room(blocks.runs, num_blocks)
    return fits and holders.has_room(blocks.meta, blocks.header, holder, num_blocks)


@inlined
def _touch(slots: U64, at: np.uint64) -> None:
    """A slot and the two behind it, as every second look goes on to the next slot."""
    prefetch(slots, at)
    prefetch(slots, at + _4)


@inlined
def touch_slots(slots: U64, keys: U64) -> None:
    """Have the slots of the first keys on their way from memory at once, not one after the other;
    touch_next goes on with the others.
    """
    capacity = capacity_of(slots)
    for i in range(min(NUM_TOUCHED, len(keys))):
        _touch(slots, _2 * home_of(keys[i], capacity))


@inlined
def touch_next(slots: U64, keys: U64, i: Index, capacity: np.uint64) -> None:
    """As key i is looked at, have the slot of a later one on its way."""
    if i + NUM_TOUCHED < len(keys):
        _touch(slots, _2 * home_of(keys[i + NUM_TOUCHED], capacity))


@inlined
def _fits_content(value: np.uint64, hash_: np.uint64, depth: np.uint64) -> bool:
    """Whether the table has the block at this depth of a sequence, or not at all."""
    if value == _0:
        return bool(hash_ != _0)
    return bool(runs.depth_of(value) == depth and runs.run_of(value) != _CLAIMED)


@inlined
def _claim_name(
    blocks: Blocks, names: Names, name: np.uint64, hash_: np.uint64, value: np.uint64
) -> int:
    """1 if the name is new, 0 if it is there, -1 if the two do not go together."""
    at = find_slot(names.slots, name, capacity_of(names.slots))
    known = names.slots[_2 * at + _1]
    if known != _0:
        return 0 if known == hash_ and value != _0 else -1
    if value != _0 and is_named(blocks, names, set_of(blocks, runs.run_of(value))):
        return -1  # under another name
    fill_slot(names.slots, at, name, hash_)
    return 1


@inlined
def _give_back(blocks: Blocks, names: Names, event_names: U64, hashes: U64, at: U64) -> None:
    for i in range(len(at) - 1, -1, -1):
        if at[i] & _1 != _0:
            delete(names.slots, event_names[i])
        if at[i] & _2 != _0:
            delete(blocks.table, hashes[i])


@inlined
def claim(
    blocks: Blocks, names: Names, event_names: U64, hashes: U64, depth: np.uint64, out_at: U64
) -> bool:
    """Find or fill the slot of each block; False, and nothing done, if there is a conflict.

    out_at[i]: the slot, times 4, plus 2 if the block is new to the table, plus 1 if its name is.
    """
    capacity = capacity_of(blocks.table)
    touch_slots(blocks.table, hashes)
    if len(names.slots) > 0:
        touch_slots(names.slots, event_names)
    for i in range(len(hashes)):
        touch_next(blocks.table, hashes, i, capacity)
        if len(names.slots) > 0:
            touch_next(names.slots, event_names, i, capacity_of(names.slots))
        slot = find_slot(blocks.table, hashes[i], capacity)
        value, named = blocks.table[_2 * slot + _1], 0
        fits = _fits_content(value, hashes[i], depth)
        if fits and len(names.slots) > 0:
            named = _claim_name(blocks, names, event_names[i], hashes[i], value)
        if not fits or named < 0:
            _give_back(blocks, names, event_names, hashes, out_at[:i])
            return False
        out_at[i] = (slot << _2) | (_2 if value == _0 else _0) | np.uint64(named)
        if value == _0:
            fill_slot(blocks.table, slot, hashes[i], runs.place(_CLAIMED, depth))
        depth += _1
    return True


@inlined
def _new_run(
    blocks: Blocks, set_id: Index, depth: np.uint64, seed: np.uint64, parent: np.uint64
) -> np.uint64:
    run = runs.create(blocks.runs, np.uint64(set_id), depth, seed)
    holders.retain(blocks.meta, set_id)
    runs.put(blocks.runs, run, runs.PARENT, parent)
    return run


@inlined
def _take_out(blocks: Blocks, run: np.uint64, depth: np.uint64, hash_: np.uint64) -> None:
    """The block leaves its run; an empty run is freed."""
    runs.take_out(blocks.runs, run, depth, hash_)
    if runs.num_blocks(blocks.runs, run) == _0:
        set_id = set_of(blocks, run)
        runs.free(blocks.runs, run)
        holders.release(blocks.bits, blocks.meta, blocks.intern, blocks.header, set_id)


@inlined
def _follows(blocks: Blocks, run: np.uint64, set_id: Index, depth: np.uint64) -> bool:
    """Whether the run ends right before the depth, with this set."""
    if run == runs.NO_RUN or set_of(blocks, run) != set_id:
        return False
    return bool(runs.get(blocks.runs, run, runs.END) + _1 == depth)


@inlined
def _run_with(
    blocks: Blocks, holder: Index, source: np.uint64, last: np.uint64,
    depth: np.uint64, seed: np.uint64, before: np.uint64,
) -> np.uint64:  # fmt: skip
    """The run for a block that leaves `source` (0: a new block) as the holder gets it, too."""
    set_id = _0 if source == runs.NO_RUN else runs.get(blocks.runs, source, runs.SET)
    wanted = holders.toggled(
        blocks.bits, blocks.meta, blocks.intern, blocks.header, np.int64(set_id), holder
    )
    if _follows(blocks, last, wanted, depth):
        return last
    created = _new_run(blocks, wanted, depth, seed, before)
    is_next = last != runs.NO_RUN and runs.get(blocks.runs, last, runs.END) + _1 == depth
    if is_next and runs.below(blocks.runs, last) == runs.NO_RUN:
        runs.link(blocks.runs, last, created, before)
    return created


@inlined
def _link_rest(
    blocks: Blocks, run: np.uint64, rest: np.uint64, depth: np.uint64, hash_: np.uint64
) -> None:
    """What `rest` still has follows the run that took its head: a match need not look for it."""
    is_next = runs.get(blocks.runs, rest, runs.START) == depth + _1
    if is_next and runs.is_live(blocks.runs, rest):
        runs.link(blocks.runs, run, rest, hash_)


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
            # A stretch of one run stays together: no set to look for after its first block.
            if source != last_source:
                last = _run_with(blocks, holder, source, last, depth, seed, before)
            runs.append(blocks.runs, last, hashes[i], before)
            if source != runs.NO_RUN:
                _take_out(blocks, source, depth, hashes[i])
                if i == len(hashes) - 1:
                    _link_rest(blocks, last, source, depth, hashes[i])
            blocks.table[_2 * slot + _1] = runs.place(last, depth)
            last_source = source
            num_new += 1
        before = hashes[i]
        depth += _1
    runs.touch(blocks.runs, last)
    return num_new


@inlined
def _take_copy(copies: U64, key: np.uint64) -> bool:
    """Whether there was a copy above the first, which is one less now."""
    capacity = capacity_of(copies)
    at = find_slot(copies, key, capacity)
    count = copies[_2 * at + _1] & _LOW
    if count == _1:
        erase_slot(copies, at, capacity)
    elif count != _0:
        copies[_2 * at + _1] -= _1
    return bool(count != _0)


@inlined
def _run_below(blocks: Blocks, run: np.uint64, set_id: Index, depth: np.uint64) -> np.uint64:
    """The run that starts right behind the block, if it has this set; else 0."""
    if runs.get(blocks.runs, run, runs.END) != depth:
        return runs.NO_RUN
    other = runs.below(blocks.runs, run)
    is_next = other != runs.NO_RUN and runs.get(blocks.runs, other, runs.START) == depth + _1
    return other if is_next and set_of(blocks, other) == set_id else runs.NO_RUN


@inlined
def _run_without(
    blocks: Blocks, run: np.uint64, set_id: Index, depth: np.uint64, hash_: np.uint64
) -> np.uint64:
    """A new run for a block that leaves `run`, hung where the block hung."""
    seed = runs.get(blocks.runs, run, runs.SEED)
    created = _new_run(blocks, set_id, depth, seed, _0)
    runs.append(blocks.runs, created, hash_, _0)
    if depth == runs.get(blocks.runs, run, runs.START):
        runs.inherit_parent(blocks.runs, run, created)
    elif depth == runs.get(blocks.runs, run, runs.END):
        runs.link(blocks.runs, run, created, hash_)
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
def _leave_end(blocks: Blocks, names: Names, name: np.uint64, slot: np.uint64, last: Left) -> Left:
    """The block at last.next_end leaves: what all but the first of a tail do."""
    run, depth = runs.run_of(last.next_end), runs.depth_of(last.next_end)
    if len(names.slots) > 0:
        delete(names.slots, name)
    runs.put(blocks.runs, run, runs.END, depth - _1)
    erase_slot(blocks.table, slot, capacity_of(blocks.table))
    return Left(runs.NO_RUN, run, last.before, last.wanted, _next_end(blocks, run, depth))


@inlined
def _leave_run(
    blocks: Blocks, names: Names, name: np.uint64, hash_: np.uint64, holder: Index,
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
    if len(names.slots) > 0 and not is_named(blocks, names, wanted):
        delete(names.slots, name)
    if wanted == 0:
        _take_out(blocks, run, depth, hash_)
        erase_slot(blocks.table, slot, capacity_of(blocks.table))
        return Left(runs.NO_RUN, run, before, wanted, _next_end(blocks, run, depth))
    other = _run_below(blocks, run, wanted, depth)
    if other != runs.NO_RUN:
        runs.prepend(blocks.runs, other)
    elif last.source == run and _follows(blocks, last.run, wanted, depth):
        other = last.run
        runs.append(blocks.runs, other, hash_, _0)
    else:
        other = _run_without(blocks, run, wanted, depth, hash_)
    blocks.table[_2 * slot + _1] = runs.place(other, depth)
    _take_out(blocks, run, depth, hash_)
    return Left(other, run, before, wanted, _0)


@inlined
def leave_holder(
    blocks: Blocks, names: Names, name: np.uint64, hash_: np.uint64, holder: Index, last: Left
) -> tuple[int, Left]:
    """One copy less of a block: what became of it, and Left for the next block of the event."""
    slot = find_slot(blocks.table, hash_, capacity_of(blocks.table))
    place = blocks.table[_2 * slot + _1]
    if place == _0:
        return NOT_HELD, last
    has_copies = num_entries(blocks.copies) != _0
    if place == last.next_end and not has_copies:
        return GONE, _leave_end(blocks, names, name, slot, last)
    if not is_held_by(blocks, runs.run_of(place), holder):
        return NOT_HELD, last
    if has_copies and _take_copy(blocks.copies, copy_key(hash_, holder)):
        return KEPT, last
    return GONE, _leave_run(blocks, names, name, hash_, holder, slot, last)


@inlined
def hash_of_name(names: Names, name: np.uint64) -> np.uint64:
    """The sequence hash behind an engine hash, 0 if the domain has no such name."""
    return value_of(names.slots, name)
