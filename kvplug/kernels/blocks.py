"""The arrays of kvplug/index/holdings.py as a kernel sees them, and how a block leaves them.

In:  columns of rows, the holder sets, the tables.   Out: the same, one copy of a block less.

Parts for kernels/applying.py and kernels/clearing.py, made of parts of the files that they name.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import inlined
from kvplug.kernels.holders import move, toggled
from kvplug.kernels.table import Table, delete

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Index = int | np.int64

_0, _32 = np.uint64(0), np.uint64(32)


class Rows(NamedTuple):
    """The columns of kvplug/index/holdings.py."""

    hashes: U64
    sets: U32
    seeds: U64
    free: U64
    num_free: I64


class Sets(NamedTuple):
    """The arrays of kernels/holders.py; `in_domain`: holders of the rank's domain, () if all."""

    bits: U64
    meta: U64
    intern: U32
    header: I64
    in_domain: U64


@inlined
def copy_key(holder: Index, row: np.uint64) -> np.uint64:
    """The key of a block in the table of copies, as _copy_keys in kvplug/index/holdings.py."""
    return (np.uint64(holder) << _32) | row


@inlined
def is_held_in_domain(sets: Sets, set_id: Index) -> bool:
    """Whether any rank of the domain is in the set."""
    if len(sets.in_domain) == 0:
        return set_id != 0
    words = sets.header[0]
    common = _0
    for w in range(words):
        common |= sets.bits[set_id * words + w] & sets.in_domain[w]
    return bool(common != _0)


@inlined
def drop_row(
    name: np.uint64, row: np.uint64, holder: Index,
    table: Table, domain: Table, rows: Rows, sets: Sets,
) -> None:  # fmt: skip
    """The holder has the block of this row no more."""
    old = np.int64(rows.sets[row])
    new = toggled(sets.bits, sets.meta, sets.intern, sets.header, old, holder)
    rows.sets[row] = new
    move(sets.bits, sets.meta, sets.intern, sets.header, old, new)
    if not is_held_in_domain(sets, np.int64(new)):
        delete(domain, name)
    if new == 0:
        delete(table, rows.hashes[row])
        rows.hashes[row] = _0
        rows.free[rows.num_free[0]] = row
        rows.num_free[0] += 1
