"""A hash table, u64 -> u64, in buckets of one cache line, in one flat array.

In:  `slots`, uint64[2 * capacity + 2]: key and value of slot i at 2i and 2i + 1; four slots are a
     bucket; behind them the number of entries, and how many there may be at most (0: no limit).
Out: values for keys; 0 means absent, so 0 is never stored as a value (the caller's promise).

The filled slots of a bucket are its first ones, in any order. A key is in its home bucket, or, if
that is full, in the next that is not. So a lookup compares four keys at once and mostly reads one
cache line, and most removals move one entry within it: only a full bucket may have sent entries on,
and takes one of them back. No tombstones are left, so a table that was full of evicted blocks
probes as fast as a new one. There may be any number of buckets (no power of two), so that tables
can grow by less than doubling; homes rise with the mixed key, whatever the capacity, so moving to a
larger table reads and writes memory in order. The caller keeps at least one slot empty. Reference:
a dict (tests/kernels/test_table.py).
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import (
    i8,
    inlined,
    kernel,
    prefetch,
    reads,
    trailing_zeros,
    u8,
    void,
    writes,
)

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Index = int | np.int64

# 2**64 / golden ratio: one multiplication spreads keys that differ in few bits (Knuth, 6.4).
_GOLDEN, _32 = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)
# From so many slots on, 2 MiB, memory counts for more than time. At a load of 0.8 a key that is
# there takes 1.4 buckets on average, another one 3.7; at 0.4 1.02 and 1.1.
LARGE = 2**17
# Keys of each of two tables at once. A core that has some dozens of loads under way drops further
# prefetches: 8 MiB looked at in random order took 51 ns each with 128 at once, 12 with 64 and 6
# with 16.
NUM_PREFETCHED = 16
BUCKET = 4
"""Slots of a bucket: 64 bytes."""
_ABSENT, _ONE, _TWO, _THREE, _FOUR, _SIX = (np.uint64(n) for n in (0, 1, 2, 3, 4, 6))


@inlined
def home_of(key: np.uint64, capacity: np.uint64) -> np.uint64:
    """The first slot of the bucket where a key would be in an empty table."""
    return ((((key * _GOLDEN) >> _32) * (capacity >> _TWO)) >> _32) << _TWO


@inlined
def capacity_of(slots: U64) -> np.uint64:
    """Number of slots."""
    return (np.uint64(len(slots)) - _TWO) // _TWO


@inlined
def num_entries(slots: U64) -> np.uint64:
    """How many keys are in the table."""
    return np.uint64(slots[np.uint64(len(slots)) - _TWO])


@inlined
def _count(slots: U64, more: np.uint64) -> None:
    slots[np.uint64(len(slots)) - _TWO] += more


@inlined
def _next_bucket(at: np.uint64, capacity: np.uint64) -> np.uint64:
    at += _FOUR
    return _ABSENT if at == capacity else at


@inlined
def _is_there(slots: U64, at: np.uint64, key: np.uint64) -> np.uint64:
    """A bit for each slot of the bucket at `at` that has the key. Empty slots have key 0."""
    first = _TWO * at
    return (
        np.uint64(slots[first] == key)
        | (np.uint64(slots[first + _TWO] == key) << _ONE)
        | (np.uint64(slots[first + _FOUR] == key) << _TWO)
        | (np.uint64(slots[first + _SIX] == key) << _THREE)
    )


@inlined
def _num_filled(slots: U64, at: np.uint64) -> np.uint64:
    """How many slots of the bucket at `at` are filled."""
    first = _TWO * at + _ONE
    return (
        np.uint64(slots[first] != _ABSENT)
        + np.uint64(slots[first + _TWO] != _ABSENT)
        + np.uint64(slots[first + _FOUR] != _ABSENT)
        + np.uint64(slots[first + _SIX] != _ABSENT)
    )


@inlined
def find_slot(slots: U64, key: np.uint64, capacity: np.uint64) -> np.uint64:
    """The slot of `key`, or the empty slot where it would go."""
    at = home_of(key, capacity)
    hits = _is_there(slots, at, key)
    while hits == _ABSENT:
        num_filled = _num_filled(slots, at)
        if num_filled < _FOUR:
            return at + num_filled
        at = _next_bucket(at, capacity)
        hits = _is_there(slots, at, key)
    return np.uint64(at + trailing_zeros(hits))


@inlined
def _put(slots: U64, at: np.uint64, key: np.uint64, value: np.uint64) -> None:
    slots[_TWO * at], slots[_TWO * at + _ONE] = key, value


@inlined
def fill_slot(slots: U64, at: np.uint64, key: np.uint64, value: np.uint64) -> None:
    """A new entry, in the slot that find_slot gave for it."""
    _put(slots, at, key, value)
    _count(slots, _ONE)


@inlined
def _distance(start: np.uint64, end: np.uint64, capacity: np.uint64) -> np.uint64:
    return end - start if end >= start else end + capacity - start


@inlined
def _is_sent_on(
    slots: U64, slot: np.uint64, at: np.uint64, distance: np.uint64, capacity: np.uint64
) -> np.uint64:
    """1 if the entry of a slot in the bucket at `at` has its home so far before it, or further; 0
    if not, or if the slot is empty.
    """
    home, is_filled = home_of(slots[_TWO * slot], capacity), slots[_TWO * slot + _ONE] != _ABSENT
    return np.uint64(is_filled & (_distance(home, at, capacity) >= distance))


@inlined
def _sent_on(slots: U64, full: np.uint64, capacity: np.uint64) -> np.uint64:
    """The slot of an entry that the full bucket at `full` had no room for; `full` if there is none.

    All buckets from there to the entry are full.
    """
    at = full
    while True:
        at = _next_bucket(at, capacity)
        distance = _distance(full, at, capacity)
        found = (
            _is_sent_on(slots, at, at, distance, capacity)
            | (_is_sent_on(slots, at + _ONE, at, distance, capacity) << _ONE)
            | (_is_sent_on(slots, at + _TWO, at, distance, capacity) << _TWO)
            | (_is_sent_on(slots, at + _THREE, at, distance, capacity) << _THREE)
        )
        if found != _ABSENT:
            return np.uint64(at + trailing_zeros(found))
        if slots[_TWO * (at + _THREE) + _ONE] == _ABSENT:
            return full


@inlined
def _move(slots: U64, source: np.uint64, hole: np.uint64) -> None:
    _put(slots, hole, slots[_TWO * source], slots[_TWO * source + _ONE])


@inlined
def erase_slot(slots: U64, hole: np.uint64, capacity: np.uint64) -> None:
    """Remove the entry, then move back what a full bucket has sent on."""
    _count(slots, ~_ABSENT)
    bucket = hole & ~_THREE
    num_filled = _num_filled(slots, bucket)
    while num_filled == _FOUR:
        source = _sent_on(slots, bucket, capacity)
        if source == bucket:
            break
        _move(slots, source, hole)
        hole, bucket = source, source & ~_THREE
        num_filled = _num_filled(slots, bucket)
    last = bucket + num_filled - _ONE
    _move(slots, last, hole)
    _put(slots, last, _ABSENT, _ABSENT)


@inlined
def prefetch_key(slots: U64, key: np.uint64, capacity: np.uint64) -> None:
    """Prefetch the home bucket of a key."""
    prefetch(slots, _TWO * home_of(key, capacity))


@inlined
def prefetch_first(slots: U64, keys: U64) -> None:
    """Prefetch the first keys at once; `prefetch_next` goes on with the others."""
    capacity = capacity_of(slots)
    for i in range(min(NUM_PREFETCHED, len(keys))):
        prefetch_key(slots, keys[i], capacity)


@inlined
def prefetch_next(slots: U64, keys: U64, i: Index, capacity: np.uint64) -> None:
    """As key i is looked up, prefetch a later one."""
    if i + NUM_PREFETCHED < len(keys):
        prefetch_key(slots, keys[i + NUM_PREFETCHED], capacity)


@inlined
def value_of(slots: U64, key: np.uint64) -> np.uint64:
    """The value of a key, 0 if it is absent."""
    at = find_slot(slots, key, capacity_of(slots))
    return np.uint64(slots[_TWO * at + _ONE])


@inlined
def delete(slots: U64, key: np.uint64) -> bool:
    """Remove a key; False if it is not there."""
    capacity = capacity_of(slots)
    at = find_slot(slots, key, capacity)
    if slots[_TWO * at + _ONE] == _ABSENT:
        return False
    erase_slot(slots, at, capacity)
    return True


@inlined
def count_up(slots: U64, key: np.uint64, start: np.uint64) -> None:
    """Add one to the value of a key, a new one from `start`."""
    at = find_slot(slots, key, capacity_of(slots))
    if slots[_TWO * at + _ONE] == _ABSENT:
        fill_slot(slots, at, key, start)
    slots[_TWO * at + _ONE] += _ONE


@inlined
def has_room(slots: U64, num_more: Index) -> bool:
    """Whether as many entries can come: a small table may be two fifths full, a large one four."""
    capacity = np.int64(capacity_of(slots))
    fifths = 2 if capacity < LARGE else 4
    needed = np.int64(num_entries(slots)) + num_more
    return bool(needed <= fifths * capacity // 5 - 1)


@inlined
def num_over_limit(slots: U64, keys: U64) -> np.int64:
    """How many of the keys are new, if the table may not take so many; else 0."""
    limit = np.int64(slots[np.uint64(len(slots)) - _ONE])
    left = limit - np.int64(num_entries(slots))
    if limit == 0 or len(keys) <= left:
        return np.int64(0)
    num_new = np.int64(0)
    for i in range(len(keys)):
        num_new += value_of(slots, keys[i]) == _ABSENT
    return num_new if num_new > left else np.int64(0)


@kernel(void(reads(u8), reads(u8), writes(u8)))
def find_many(slots: U64, keys: U64, out_values: U64) -> None:
    """out_values[i] = value of keys[i], or 0."""
    capacity = capacity_of(slots)
    for i in range(len(keys)):
        out_values[i] = slots[_TWO * find_slot(slots, keys[i], capacity) + _ONE]


@kernel(void(writes(u8), reads(u8), reads(u8)))
def put_many(slots: U64, keys: U64, values: U64) -> None:
    """Store or overwrite."""
    capacity = capacity_of(slots)
    for i in range(len(keys)):
        at = find_slot(slots, keys[i], capacity)
        if slots[_TWO * at + _ONE] == _ABSENT:
            fill_slot(slots, at, keys[i], values[i])
        slots[_TWO * at + _ONE] = values[i]


@kernel(i8(writes(u8), reads(u8)))
def erase_many(slots: U64, keys: U64) -> int:
    """Remove keys; returns how many were there."""
    num_erased = 0
    for i in range(len(keys)):
        num_erased += delete(slots, keys[i])
    return num_erased


@kernel(void(reads(u8), reads(u8), reads(u8), reads(i8), reads(u8), writes(i8)))
def count_equal(
    slots: U64, keys: U64, salts: U64, ends: I64, values: U64, out_counts: I64
) -> None:  # fmt: skip
    """out_counts[j] = how many of keys[:ends[j]] ^ salts[j] have values[j]."""
    capacity = capacity_of(slots)
    for j in range(len(salts)):
        out_counts[j] = 0
        for i in range(ends[j]):
            at = find_slot(slots, keys[i] ^ salts[j], capacity)
            out_counts[j] += slots[_TWO * at + _ONE] == values[j]


@kernel(i8(reads(u8)))
def count_reachable(slots: U64) -> int:
    """How many slots are filled, each with a key that a lookup finds right there.

    -1 if one is not, or if an empty slot has a key.
    """
    capacity, num_found = capacity_of(slots), 0
    for at in range(len(slots) // 2 - 1):
        key, value = slots[2 * at], slots[2 * at + 1]
        if value != _ABSENT:
            if find_slot(slots, key, capacity) != np.uint64(at):
                return -1
            num_found += 1
        elif key != _ABSENT:
            return -1
    return num_found


@kernel(void(reads(u8), writes(u8)))
def rehash(slots: U64, out_slots: U64) -> None:
    """Move every entry into an empty table of another capacity."""
    capacity = capacity_of(out_slots)
    for at in range(len(slots) // 2 - 1):
        key, value = slots[2 * at], slots[2 * at + 1]
        if value != _ABSENT:
            fill_slot(out_slots, find_slot(out_slots, key, capacity), key, value)
