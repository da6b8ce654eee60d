"""Records of events to changed arrays of the index: the plain events of a run, in one call.

In:  records of one rank (kernels/wire.py), and every array of the index.
Out: the arrays changed as kvplug/index/block_index.py changes them event by event, and how far it
came. An event that needs a decision (an unknown parent, names that conflict, a clear, another
block size) or more room is not begun: the caller does what it takes and calls again.

Made of parts of other kernel files: a step per file would pass over the blocks of an event five
times and cross from Python as often. Twin: BlockIndex.apply.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.kernels import wire
from kvplug.kernels._jit import i8, inlined, kernel, prefetch, reads, u1, u4, u8, writes
from kvplug.kernels.blocks import Rows, Sets, copy_key, drop_row, is_held_in_domain
from kvplug.kernels.hashing import chain, fill_block_hashes
from kvplug.kernels.holders import change, contains
from kvplug.kernels.table import (
    Table,
    capacity_of,
    delete,
    find_slot,
    home_of,
    insert,
    put_slot,
    value_of,
)

Bytes = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Index = int | np.int64

# Why a call ended.
DONE, NEEDS_ROOM, NEEDS_DECISION = 0, 1, 2
# out_counts
NUM_STORED, NUM_REMOVED, NUM_UNKNOWN = 0, 1, 2
NUM_COUNTS = 3
_BASE_SEED = np.uint64(1337)  # kvplug/hashing.py
_0, _1, _2 = np.uint64(0), np.uint64(1), np.uint64(2)
_NO_ROW = np.uint64(0)
_ROWED, _NAMED = np.uint8(1), np.uint8(2)  # what _name_rows did for a block


class _Scratch(NamedTuple):
    """Room for the blocks of one event."""

    hashes: U64
    rows: U64
    flags: Bytes


@inlined
def _count_copy(copies: Table, key: np.uint64) -> None:
    at = find_slot(copies.slots, key, capacity_of(copies.slots))
    count = copies.slots[_2 * at + _1]
    put_slot(copies.slots, at, key, count + _1)
    copies.size[0] += count == _0


@inlined
def _take_copy(copies: Table, key: np.uint64) -> bool:
    """Whether there was a copy above the first, which is one less now."""
    at = find_slot(copies.slots, key, capacity_of(copies.slots))
    count = copies.slots[_2 * at + _1]
    if count == _0:
        return False
    if count == _1:
        delete(copies, key)
    else:
        put_slot(copies.slots, at, key, count - _1)
    return True


@inlined
def _has_room(table: Table, num_more: Index) -> bool:
    # The load of kvplug/index/hash_table.py.
    return bool(4 * (table.size[0] + num_more + 1) <= 3 * (len(table.slots) // 2))


@inlined
def _sequence_hashes(tokens: U32, size: int, parent: np.uint64, rows: Rows, out: U64) -> None:
    """The hashes of an event's blocks, behind row `parent` (0: the start of a sequence)."""
    fill_block_hashes(tokens, size, _BASE_SEED if parent == _NO_ROW else rows.seeds[parent], out)
    before = rows.hashes[parent]
    for i in range(len(out)):
        if i > 0 or parent != _NO_ROW:
            out[i] = chain(before, out[i], _BASE_SEED)
        before = out[i]


@inlined
def _touch(table: Table, keys: U64) -> None:
    """Have the slots of all keys on their way from memory at once, not one after the other."""
    capacity = capacity_of(table.slots)
    for i in range(len(keys)):
        prefetch(table.slots, _2 * home_of(keys[i], capacity))


@inlined
def _find_rows(
    names: U64, hashes: U64, table: Table, domain: Table, rows: Rows, sets: Sets, out: U64
) -> bool:
    """The row of each block, 0 for a new one; False if a name and a content do not go together."""
    for i in range(len(names)):
        named, held = value_of(domain, names[i]), value_of(table, hashes[i])
        if named != held:
            unnamed = named == _NO_ROW and not is_held_in_domain(sets, np.int64(rows.sets[held]))
            if not unnamed:
                return False
        out[i] = held
    return True


@inlined
def _take_back(names: U64, table: Table, domain: Table, rows: Rows, at: U64, done: Bytes) -> None:
    """Undo _name_rows for the blocks that got a row or a name there, the last ones first."""
    for i in range(len(done) - 1, -1, -1):
        if done[i] & _NAMED != 0:
            delete(domain, names[i])
        if done[i] & _ROWED != 0:
            delete(table, rows.hashes[at[i]])
            rows.hashes[at[i]] = _0
            rows.num_free[0] += 1


@inlined
def _take_row(block_hash: np.uint64, seed: np.uint64, table: Table, rows: Rows) -> np.uint64:
    """A new row for a block, 0 if its hash has one."""
    row = np.uint64(rows.free[rows.num_free[0] - 1])
    if not insert(table, block_hash, row):
        return _NO_ROW
    rows.num_free[0] -= 1
    rows.hashes[row], rows.seeds[row] = block_hash, seed
    return row


@inlined
def _name_rows(
    names: U64, hashes: U64, seed: np.uint64,
    table: Table, domain: Table, rows: Rows, out: U64, out_done: Bytes,
) -> bool:  # fmt: skip
    """Give every block a row and the row its name; False, and nothing done, if one comes twice."""
    for i in range(len(names)):
        out_done[i] = 0
        if out[i] == _NO_ROW:
            out[i] = _take_row(hashes[i], seed, table, rows)
            out_done[i] = _ROWED if out[i] != _NO_ROW else 0
        if out[i] != _NO_ROW and insert(domain, names[i], out[i]):
            out_done[i] |= _NAMED
        elif out[i] == _NO_ROW or value_of(domain, names[i]) != out[i]:
            _take_back(names, table, domain, rows, out, out_done[: i + 1])
            return False
    return True


@inlined
def _add_holder(
    holder: Index, mark: np.uint64, hashes: U64, at: U64, flags: Bytes,
    copies: Table, speculative: Table, rows: Rows, sets: Sets,
) -> None:  # fmt: skip
    num_new = change(
        True, holder, at, rows.sets, sets.bits, sets.meta, sets.intern, sets.header, flags
    )
    if num_new < len(at):
        for i in range(len(at)):
            if flags[i] == 0:
                _count_copy(copies, copy_key(holder, at[i]))
    if speculative.size[0] > 0:
        for i in range(len(hashes)):
            delete(speculative, hashes[i] ^ mark)


@inlined
def _store(
    record: I64, parent: np.uint64, names: U64, tokens: U32, holder: Index, mark: np.uint64,
    table: Table, domain: Table, copies: Table, speculative: Table,
    rows: Rows, sets: Sets, scratch: _Scratch,
) -> bool:  # fmt: skip
    """False, and nothing done, if the event needs a decision."""
    parent_row = value_of(domain, parent) if record[wire.HAS_PARENT] != 0 else _NO_ROW
    if record[wire.HAS_PARENT] != 0 and parent_row == _NO_ROW:
        return False
    hashes, at = scratch.hashes[: len(names)], scratch.rows[: len(names)]
    flags = scratch.flags[: len(names)]
    _sequence_hashes(tokens, record[wire.BLOCK_SIZE], parent_row, rows, hashes)
    _touch(table, hashes)
    _touch(domain, names)
    if not _find_rows(names, hashes, table, domain, rows, sets, at):
        return False
    seed = _BASE_SEED if parent_row == _NO_ROW else rows.seeds[parent_row]
    if not _name_rows(names, hashes, seed, table, domain, rows, at, flags):
        return False
    _add_holder(holder, mark, hashes, at, flags, copies, speculative, rows, sets)
    return True


@inlined
def _remove(
    names: U64, holder: Index,
    table: Table, domain: Table, copies: Table, rows: Rows, sets: Sets,
) -> Index:  # fmt: skip
    """Returns how many of the blocks the holder had."""
    num_removed = 0
    for i in range(len(names)):
        row = value_of(domain, names[i])
        if row == _NO_ROW:
            continue
        if copies.size[0] > 0 and _take_copy(copies, copy_key(holder, row)):
            num_removed += 1
        elif contains(sets.bits, sets.header[0], np.int64(rows.sets[row]), holder):
            drop_row(names[i], row, holder, table, domain, rows, sets)
            num_removed += 1
    return num_removed


@inlined
def _has_room_for(
    num_blocks: Index, holder: Index, table: Table, domain: Table, copies: Table,
    rows: Rows, sets: Sets, scratch: _Scratch,
) -> bool:  # fmt: skip
    num_live = sets.header[2]
    if holder >= 64 * sets.header[0] or num_blocks > len(scratch.rows):
        return False
    # kvplug/index/holder_sets.py: each set in use, and the empty one, turns into one new at most.
    if num_live + min(num_blocks, num_live + 1) + 2 > len(sets.meta) // 2:
        return False
    in_tables = _has_room(table, num_blocks) and _has_room(domain, num_blocks)
    return in_tables and _has_room(copies, num_blocks) and rows.num_free[0] >= num_blocks


@kernel(
    i8(
        i8, i8, i8, i8, u8,
        reads(i8), reads(u8), reads(u8), reads(u4), reads(i8),
        writes(u8), writes(i8), writes(u8), writes(i8), writes(u8), writes(i8),
        writes(u8), writes(i8),
        writes(u8), writes(u4), writes(u8), writes(u8), writes(i8),
        writes(u8), writes(u8), writes(u4), writes(i8), reads(u8),
        writes(u8), writes(u8), writes(u1), reads(u1), writes(i8),
    ),
    releases_gil=True,
)  # fmt: skip
def apply_records(
    first: Index, last: Index, max_blocks: Index, block_size: Index, mark: np.uint64,
    records: I64, parents: U64, names: U64, tokens: U32, holder_of_tier: I64,
    table_slots: U64, table_size: I64, domain_slots: U64, domain_size: I64,
    copies_slots: U64, copies_size: I64, speculative_slots: U64, speculative_size: I64,
    hash_of_row: U64, set_of_row: U32, seed_of_row: U64, free_rows: U64, num_free: I64,
    bits: U64, meta: U64, intern: U32, header: I64, in_domain: U64,
    hashes: U64, rows: U64, flags: Bytes, is_wanted: Bytes, out_counts: I64,
) -> Index:  # fmt: skip
    """Apply records first..last; returns the number of the first that was not applied.

    Ends early once `max_blocks` blocks are done, or after the event at hand when another thread has
    set is_wanted[0]. `mark` is the rank's in the speculative table.
    out_counts has [NUM_STORED, NUM_REMOVED, NUM_UNKNOWN] added up, and behind them why it ended.
    """
    table, domain = Table(table_slots, table_size), Table(domain_slots, domain_size)
    copies = Table(copies_slots, copies_size)
    speculative = Table(speculative_slots, speculative_size)
    columns = Rows(hash_of_row, set_of_row, seed_of_row, free_rows, num_free)
    sets, scratch = Sets(bits, meta, intern, header, in_domain), _Scratch(hashes, rows, flags)
    num_blocks = 0
    out_counts[NUM_COUNTS] = DONE
    for event in range(first, last):
        if num_blocks >= max_blocks or (num_blocks > 0 and is_wanted[0] != 0):
            return event
        record = records[wire.RECORD_WIDTH * event : wire.RECORD_WIDTH * (event + 1)]
        kind, n, start = record[wire.KIND], record[wire.NUM_NAMES], record[wire.FIRST_NAME]
        holder = holder_of_tier[max(0, record[wire.TIER])]
        fits = kind == wire.REMOVED or (
            kind == wire.STORED and record[wire.BLOCK_SIZE] == block_size
        )
        if not fits or holder < 0:
            out_counts[NUM_COUNTS] = NEEDS_DECISION
            return event
        if not _has_room_for(n, holder, table, domain, copies, columns, sets, scratch):
            out_counts[NUM_COUNTS] = NEEDS_ROOM
            return event
        if kind == wire.REMOVED:
            num_removed = _remove(
                names[start : start + n], holder, table, domain, copies, columns, sets
            )
            out_counts[NUM_REMOVED] += num_removed
            out_counts[NUM_UNKNOWN] += n - num_removed
        else:
            token = record[wire.FIRST_TOKEN]
            if not _store(
                record, parents[event], names[start : start + n],
                tokens[token : token + record[wire.NUM_TOKENS]], holder, mark,
                table, domain, copies, speculative, columns, sets, scratch,
            ):  # fmt: skip
                out_counts[NUM_COUNTS] = NEEDS_DECISION
                return event
            out_counts[NUM_STORED] += n
        num_blocks += n
    return last
