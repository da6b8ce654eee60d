"""Interned sets of holders: most blocks of a prefix are held by the same ranks, so a run of blocks
needs only the number of its set.

In:  the set of a run (kernels/runs.py) and a holder number; the arrays of the sets.
Out: the number of the set with the holder added or removed; the arrays changed.

The arrays of the sets, for `num_sets` sets of `words` 64-bit words each:

    bits    uint64[num_sets * words]   members of set s: the set bits of words s*words ..
    meta    uint64[num_sets * 2]       [hash, number of runs]; of a free set: [0, next free set]
    intern  uint32[slots]              open addressing by hash: set numbers, 0 is an empty slot
    header  int64[3 + 64 * words]      [words, first free set, number of live sets], then how many
                                       blocks each holder has

Set 0 is the empty set: never interned, never counted. The hash of a set is the xor of one mark per
member (Zobrist), so that adding or removing a member costs no walk over the members. A set lives
as long as a run has it; then its number is free. The caller provides a free set and a free intern
slot per run. Reference: frozensets (tests/kernels/test_holders.py).
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import i8, inlined, kernel, u4, u8, void, writes

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Index = int | np.int64

WORDS, FIRST_FREE, NUM_LIVE, NUM_HELD = 0, 1, 2, 3

_0, _1, _32, _63 = np.uint64(0), np.uint64(1), np.uint64(32), np.uint64(63)
# splitmix64 (Steele, Lea, Flood 2014): consecutive holder numbers to unrelated marks.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)


@inlined
def mark_of(holder: Index) -> np.uint64:
    """A random-looking number of each holder."""
    x = np.uint64(holder + 1) * _GOLDEN
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    return x ^ (x >> _31)


@inlined
def _bit(holder: Index) -> np.uint64:
    return _1 << (np.uint64(holder) & _63)


@inlined
def contains(bits: U64, words: Index, set_id: Index, holder: Index) -> bool:
    """Whether the set has the holder."""
    return bool(bits[set_id * words + holder // 64] & _bit(holder))


@inlined
def has_any(bits: U64, words: Index, set_id: Index, members: U64) -> bool:
    """Whether the set has any of the members, which are given as bits; empty: anybody at all."""
    if len(members) == 0:
        return set_id != 0
    common = _0
    for w in range(words):
        common |= bits[set_id * words + w] & members[w]
    return bool(common != _0)


@inlined
def _home(key: np.uint64, num_slots: Index) -> Index:
    return np.int64(((key >> _32) * np.uint64(num_slots)) >> _32)


@inlined
def _after(at: Index, num_slots: Index) -> Index:
    return 0 if at + 1 == num_slots else at + 1


@inlined
def _is_toggled(bits: U64, words: Index, candidate: Index, set_id: Index, holder: Index) -> bool:
    """Whether `candidate` is `set_id` with `holder` added or removed."""
    for w in range(words):
        expected = bits[set_id * words + w]
        if w == holder // 64:
            expected ^= _bit(holder)
        if bits[candidate * words + w] != expected:
            return False
    return True


@inlined
def _create(
    bits: U64, meta: U64, intern: U32, header: I64, slot: Index, set_id: Index, holder: Index
) -> Index:
    created, words = np.int64(header[FIRST_FREE]), header[WORDS]
    header[FIRST_FREE] = np.int64(meta[2 * created + 1])
    header[NUM_LIVE] += 1
    for w in range(words):
        bits[created * words + w] = bits[set_id * words + w]
    bits[created * words + holder // 64] ^= _bit(holder)
    meta[2 * created] = meta[2 * set_id] ^ mark_of(holder)
    meta[2 * created + 1] = _0
    intern[slot] = created
    return created


@inlined
def toggled(bits: U64, meta: U64, intern: U32, header: I64, set_id: Index, holder: Index) -> Index:
    """The set that is `set_id` with `holder` added or removed, created if it is new."""
    words = header[WORDS]
    key = meta[2 * set_id] ^ mark_of(holder)
    if key == _0 and _is_toggled(bits, words, 0, set_id, holder):
        return 0
    slot = _home(key, len(intern))
    while intern[slot] != 0:
        candidate = np.int64(intern[slot])
        if meta[2 * candidate] == key and _is_toggled(bits, words, candidate, set_id, holder):
            return candidate
        slot = _after(slot, len(intern))
    return _create(bits, meta, intern, header, slot, set_id, holder)


@inlined
def _unintern(meta: U64, intern: U32, set_id: Index) -> None:
    num_slots = len(intern)
    hole = _home(meta[2 * set_id], num_slots)
    while intern[hole] != set_id:
        hole = _after(hole, num_slots)
    at = _after(hole, num_slots)
    while intern[at] != 0:
        home = _home(meta[2 * np.int64(intern[at])], num_slots)
        if (at - home) % num_slots >= (at - hole) % num_slots:
            intern[hole] = intern[at]
            hole = at
        at = _after(at, num_slots)
    intern[hole] = 0


@inlined
def retain(meta: U64, set_id: Index) -> None:
    """One run more has the set."""
    if set_id != 0:
        meta[2 * set_id + 1] += _1


@inlined
def release(bits: U64, meta: U64, intern: U32, header: I64, set_id: Index) -> None:
    """One run less has the set, which is freed after its last."""
    if set_id == 0:
        return
    meta[2 * set_id + 1] -= _1
    if meta[2 * set_id + 1] == _0:
        _unintern(meta, intern, set_id)
        for w in range(header[WORDS]):
            bits[set_id * header[WORDS] + w] = _0
        meta[2 * set_id], meta[2 * set_id + 1] = _0, np.uint64(header[FIRST_FREE])
        header[FIRST_FREE] = set_id
        header[NUM_LIVE] -= 1


@inlined
def has_room(meta: U64, header: I64, holder: Index, num_runs: Index) -> bool:
    """Whether the holder has a bit, and so many runs may each get a set of their own.

    Each set in use, and the empty one, turns into one new set at most.
    """
    num_live = header[NUM_LIVE]
    fits = num_live + min(num_runs, num_live + 1) + 2 <= len(meta) // 2
    return bool(fits and holder < 64 * header[WORDS])


@kernel(void(i8, i8, writes(u8), writes(u4)))
def reintern(words: Index, num_sets: Index, meta: U64, out_intern: U32) -> None:
    """Fill an empty intern table with the sets that have runs."""
    for set_id in range(1, num_sets):
        if meta[2 * set_id] != _0:
            slot = _home(meta[2 * set_id], len(out_intern))
            while out_intern[slot] != 0:
                slot = _after(slot, len(out_intern))
            out_intern[slot] = set_id
