"""An open-addressing table, u64 -> u64, in one flat array.

In:  `slots`, uint64[2 * capacity]: key and value of slot i at 2i and 2i + 1, in one cache line.
Out: values for keys; 0 means absent, so 0 is never stored as a value (the caller's promise).

Linear probing from `home_of(key)`; removal shifts later entries back instead of leaving tombstones,
so a table that was full of evicted blocks probes as fast as a new one. The capacity may be any
number (no power of two), so that tables can grow by less than doubling. The caller keeps at least
one slot empty. Twin: a dict (tests/kernels/test_table.py).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import i8, inlined, kernel, reads, u1, u8, void, writes

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.uint8]

# 2**64 / golden ratio: one multiplication spreads keys that differ in few bits (Knuth, 6.4).
_GOLDEN, _32 = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)
_ABSENT, _ONE, _TWO = np.uint64(0), np.uint64(1), np.uint64(2)


@inlined
def home_of(key: np.uint64, capacity: np.uint64) -> np.uint64:
    """The slot where a key would be in an empty table."""
    return (((key * _GOLDEN) >> _32) * capacity) >> _32


@inlined
def capacity_of(slots: U64) -> np.uint64:
    """Number of slots."""
    return np.uint64(len(slots)) // _TWO


@inlined
def _after(at: np.uint64, capacity: np.uint64) -> np.uint64:
    at += _ONE
    return _ABSENT if at == capacity else at


@inlined
def find_slot(slots: U64, key: np.uint64, capacity: np.uint64) -> np.uint64:
    """The slot of `key`, or the empty slot where it would go."""
    at = home_of(key, capacity)
    while slots[_TWO * at + _ONE] != _ABSENT and slots[_TWO * at] != key:
        at = _after(at, capacity)
    return at


@inlined
def put_slot(slots: U64, at: np.uint64, key: np.uint64, value: np.uint64) -> None:
    """Fill a slot."""
    slots[_TWO * at], slots[_TWO * at + _ONE] = key, value


@inlined
def _distance(start: np.uint64, end: np.uint64, capacity: np.uint64) -> np.uint64:
    return end - start if end >= start else end + capacity - start


@inlined
def erase_slot(slots: U64, hole: np.uint64, capacity: np.uint64) -> None:
    """Empty the slot, then move back whatever would not be found past the hole."""
    at = _after(hole, capacity)
    while slots[_TWO * at + _ONE] != _ABSENT:
        home = home_of(slots[_TWO * at], capacity)
        if _distance(home, at, capacity) >= _distance(hole, at, capacity):
            put_slot(slots, hole, slots[_TWO * at], slots[_TWO * at + _ONE])
            hole = at
        at = _after(at, capacity)
    put_slot(slots, hole, _ABSENT, _ABSENT)


class Table(NamedTuple):
    """Slots, and the number of entries as int64[1]: for kernels that change several tables."""

    slots: U64
    size: I64


@inlined
def value_of(table: Table, key: np.uint64) -> np.uint64:
    """The value of a key, 0 if it is absent."""
    at = find_slot(table.slots, key, capacity_of(table.slots))
    return np.uint64(table.slots[_TWO * at + _ONE])


@inlined
def insert(table: Table, key: np.uint64, value: np.uint64) -> bool:
    """False, and nothing done, if the key is there."""
    at = find_slot(table.slots, key, capacity_of(table.slots))
    if table.slots[_TWO * at + _ONE] != _ABSENT:
        return False
    put_slot(table.slots, at, key, value)
    table.size[0] += 1
    return True


@inlined
def delete(table: Table, key: np.uint64) -> None:
    """Remove a key, if it is there."""
    capacity = capacity_of(table.slots)
    at = find_slot(table.slots, key, capacity)
    if table.slots[_TWO * at + _ONE] != _ABSENT:
        erase_slot(table.slots, at, capacity)
        table.size[0] -= 1


@kernel(void(reads(u8), reads(u8), writes(u8)))
def find_many(slots: U64, keys: U64, out_values: U64) -> None:
    """out_values[i] = value of keys[i], or 0."""
    capacity = capacity_of(slots)
    for i in range(len(keys)):
        out_values[i] = slots[_TWO * find_slot(slots, keys[i], capacity) + _ONE]


@kernel(i8(reads(u8), reads(u8), writes(u8)))
def find_prefix(slots: U64, keys: U64, out_values: U64) -> int:
    """Values of the keys up to the first absent one; returns how many were found."""
    capacity = capacity_of(slots)
    for i in range(len(keys)):
        value = slots[_TWO * find_slot(slots, keys[i], capacity) + _ONE]
        if value == _ABSENT:
            return i
        out_values[i] = value
    return len(keys)


@kernel(i8(writes(u8), reads(u8), reads(u8)))
def put_many(slots: U64, keys: U64, values: U64) -> int:
    """Store or overwrite; returns how many keys are new."""
    capacity, num_new = capacity_of(slots), 0
    for i in range(len(keys)):
        at = find_slot(slots, keys[i], capacity)
        num_new += slots[_TWO * at + _ONE] == _ABSENT
        put_slot(slots, at, keys[i], values[i])
    return num_new


@kernel(i8(writes(u8), reads(u8), reads(u8), writes(u8)))
def find_or_put_many(slots: U64, keys: U64, fresh_values: U64, out_values: U64) -> int:
    """out_values[i] = value of keys[i]; absent keys take fresh_values in order.

    Returns how many fresh values were taken. len(fresh_values) >= len(keys).
    """
    capacity, num_taken = capacity_of(slots), 0
    for i in range(len(keys)):
        at = find_slot(slots, keys[i], capacity)
        if slots[_TWO * at + _ONE] == _ABSENT:
            put_slot(slots, at, keys[i], fresh_values[num_taken])
            num_taken += 1
        out_values[i] = slots[_TWO * at + _ONE]
    return num_taken


@kernel(i8(writes(u8), reads(u8)))
def erase_many(slots: U64, keys: U64) -> int:
    """Remove keys; returns how many were there."""
    capacity, num_erased = capacity_of(slots), 0
    for i in range(len(keys)):
        at = find_slot(slots, keys[i], capacity)
        if slots[_TWO * at + _ONE] != _ABSENT:
            erase_slot(slots, at, capacity)
            num_erased += 1
    return num_erased


@kernel(i8(writes(u8), reads(u8)))
def count_up_many(slots: U64, keys: U64) -> int:
    """Add one to each key's value, from 0; returns how many keys are new."""
    capacity, num_new = capacity_of(slots), 0
    for i in range(len(keys)):
        at = find_slot(slots, keys[i], capacity)
        num_new += slots[_TWO * at + _ONE] == _ABSENT
        put_slot(slots, at, keys[i], slots[_TWO * at + _ONE] + _ONE)
    return num_new


@kernel(i8(writes(u8), reads(u8), writes(u1)))
def count_down_many(slots: U64, keys: U64, out_counted: Flags) -> int:
    """Take one from each key that is there and erase it at 0; returns how many were erased.

    out_counted[i] = 1 if keys[i] was there.
    """
    capacity, num_erased = capacity_of(slots), 0
    for i in range(len(keys)):
        at = find_slot(slots, keys[i], capacity)
        count = slots[_TWO * at + _ONE]
        out_counted[i] = count != _ABSENT
        if count > _ONE:
            slots[_TWO * at + _ONE] = count - _ONE
        elif count == _ONE:
            erase_slot(slots, at, capacity)
            num_erased += 1
    return num_erased


@kernel(void(reads(u8), reads(u8), reads(u8), writes(i8)))
def extend_runs(slots: U64, keys: U64, salts: U64, out_ends: I64) -> None:
    """Move out_ends[j] forward while keys[out_ends[j]] ^ salts[j] is in the table, for each j."""
    capacity = capacity_of(slots)
    for j in range(len(salts)):
        end = out_ends[j]
        while end < len(keys):
            at = find_slot(slots, keys[end] ^ salts[j], capacity)
            if slots[_TWO * at + _ONE] == _ABSENT:
                break
            end += 1
        out_ends[j] = end


@kernel(void(reads(u8), writes(u8)))
def rehash(slots: U64, out_slots: U64) -> None:
    """Move every entry into an empty table of another capacity."""
    capacity = capacity_of(out_slots)
    for at in range(len(slots) // 2):
        key, value = slots[2 * at], slots[2 * at + 1]
        if value != _ABSENT:
            put_slot(out_slots, find_slot(out_slots, key, capacity), key, value)
