"""A rank's copies out of the index, a stretch of its domain's table at a time.

In:  slots of the table engine hash -> row, and the holders that are cleared.
Out: the arrays of the index without those copies, and the slot to go on with.

Every block that a rank holds has one name in the rank's domain, so a walk over that table meets
all of them. Between two calls the index is consistent; nothing but queries may come in between, as
a removal would move entries to slots that are done. Twin: Holdings.drop_all, then the names.
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import i8, inlined, kernel, reads, u4, u8, writes
from kvplug.kernels.blocks import Rows, Sets, copy_key, drop_row
from kvplug.kernels.holders import contains
from kvplug.kernels.table import Table, delete

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Index = int | np.int64

_0, _2, _1 = np.uint64(0), np.uint64(2), np.uint64(1)


@inlined
def _has_room(sets: Sets) -> bool:
    # For the set that a drop may create (kvplug/index/holder_sets.py).
    return bool(sets.header[2] + 2 < len(sets.meta) // 2)


@inlined
def _clear_row(
    name: np.uint64, row: np.uint64, holders: I64,
    table: Table, domain: Table, copies: Table, rows: Rows, sets: Sets,
) -> Index:  # fmt: skip
    """Returns how many of the holders had the block; ends early if sets run out of room."""
    num_dropped = 0
    for i in range(len(holders)):
        holder = holders[i]
        if contains(sets.bits, sets.header[0], np.int64(rows.sets[row]), holder):
            if not _has_room(sets):
                return num_dropped
            if copies.size[0] > 0:
                delete(copies, copy_key(holder, row))
            drop_row(name, row, holder, table, domain, rows, sets)
            num_dropped += 1
    return num_dropped


@kernel(
    i8(
        i8, i8, reads(i8),
        writes(u8), writes(i8), writes(u8), writes(i8), writes(u8), writes(i8),
        writes(u8), writes(u4), writes(u8), writes(u8), writes(i8),
        writes(u8), writes(u8), writes(u4), writes(i8), reads(u8), writes(i8),
    ),
    releases_gil=True,
)  # fmt: skip
def clear_slots(
    first: Index, last: Index, holders: I64,
    table_slots: U64, table_size: I64, domain_slots: U64, domain_size: I64,
    copies_slots: U64, copies_size: I64,
    hash_of_row: U64, set_of_row: U32, seed_of_row: U64, free_rows: U64, num_free: I64,
    bits: U64, meta: U64, intern: U32, header: I64, in_domain: U64, out_num_dropped: I64,
) -> Index:  # fmt: skip
    """Take the holders from the blocks named in slots first..last; returns the next slot to do.

    Less than `last` if the sets need room first. out_num_dropped[0] has the copies added up.
    """
    table, domain = Table(table_slots, table_size), Table(domain_slots, domain_size)
    copies = Table(copies_slots, copies_size)
    rows = Rows(hash_of_row, set_of_row, seed_of_row, free_rows, num_free)
    sets = Sets(bits, meta, intern, header, in_domain)
    at = np.uint64(first)
    while at < np.uint64(last):
        name, row = domain_slots[_2 * at], domain_slots[_2 * at + _1]
        if row == _0:
            at += _1
            continue
        size = domain_size[0]
        out_num_dropped[0] += _clear_row(name, row, holders, table, domain, copies, rows, sets)
        if not _has_room(sets):
            return np.int64(at)
        if domain_size[0] == size:  # otherwise another entry may have moved into this slot
            at += _1
    return last
