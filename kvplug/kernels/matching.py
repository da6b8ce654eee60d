"""A request's blocks to how much of it each rank holds, and what that is worth.

In:  sequence hashes of a request, the runs and sets of kvplug/index/holdings.py, who is behind each
holder.   Out: per rank, how many leading blocks it holds, by class of memory.

A request goes from run to run, not from block to block. If the last block of a run is in the
request, all before it are, and nothing needs to be looked up between; if not, the last block that
is lies where halving the rest leads. Only runs with holes are walked. At the border of two runs
only the holders that come or go are looked at. Classes of memory are DEVICE, HOST, DISK and POOLED
(another worker can read it); a rank leaves at the first block that it does not hold in any.
Twin: plain loops over Python sets (tests/kernels/test_matching.py).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.kernels import runs
from kvplug.kernels._jit import f8, i8, inlined, kernel, reads, trailing_zeros, u8, void, writes
from kvplug.kernels.table import capacity_of, find_slot

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]
Index = int | np.int64

DEVICE, HOST, DISK, POOLED = 0, 1, 2, 3
NUM_CLASSES = 4
# What out_reach counts: blocks on the device; there or in host memory; ... or on disk; in any
# class; on the device or in a pool.
REACHES = (0b0001, 0b0011, 0b0111, 0b1111, 0b1001)
NUM_REACHES = len(REACHES)
ON_DEVICE, IN_HOST, ON_DISK, ANY, ON_DEVICE_OR_POOLED = range(NUM_REACHES)
NUM_MASKS = 2**NUM_CLASSES
# In which reaches (bits) a rank is that has a block in these classes (bits).
_REACHES_OF = np.array(
    [
        sum(1 << each for each, classes in enumerate(REACHES) if has & classes)
        for has in range(NUM_MASKS)
    ],
    dtype=np.int64,
)

_0, _1, _2 = np.uint64(0), np.uint64(1), np.uint64(2)


class Path(NamedTuple):
    """Where blocks are: the table and the runs of the index."""

    table: U64
    runs: U64


class Holders(NamedTuple):
    """Who is behind holder h: owner[h] is 4 * rank + class for copies of one rank's own; below -1
    it is -2 - i, where readers[i] ranks, listed from readers[i + 1] on, can read the copies in a
    pool; -1 is nobody. credits: float64[16 + ranks], what a block is worth on a rank that has it in
    these classes (bits), and behind that what everything is worth on each rank.
    """

    owner: I64
    readers: I64
    credits: F64


class Ranks(NamedTuple):
    """What is known of each rank on the way: of which class it has copies (bits), in how many pools
    it finds the block, in which reaches it still is (bits), and since which block. `changed` has
    room for every holder.
    """

    has: I64
    pools: I64
    reach: I64
    since: I64
    changed: I64


@inlined
def _place_of(path: Path, hash_: np.uint64) -> np.uint64:
    return np.uint64(path.table[_2 * find_slot(path.table, hash_, capacity_of(path.table)) + _1])


@inlined
def _is_in(path: Path, hash_: np.uint64, run: np.uint64) -> bool:
    return bool(runs.run_of(_place_of(path, hash_)) == run)


@inlined
def _last_by_walking(path: Path, hashes: U64, first: Index, last: Index, run: np.uint64) -> Index:
    at = first
    while at < last and _is_in(path, hashes[at + 1], run):
        at += 1
    return at


@inlined
def _last_by_halving(path: Path, hashes: U64, first: Index, last: Index, run: np.uint64) -> Index:
    """hashes[first] is in the run, hashes[last] is not."""
    while last - first > 1:
        middle = (first + last) // 2
        if _is_in(path, hashes[middle], run):
            first = middle
        else:
            last = middle
    return first


@inlined
def last_of_run(path: Path, hashes: U64, first: Index, run: np.uint64) -> Index:
    """The last block of the request that is in the run of block `first`, without a gap."""
    end = np.int64(runs.get(path.runs, run, runs.END))
    last = end if end < len(hashes) else np.int64(len(hashes) - 1)
    if runs.num_holes(path.runs, run) != _0:
        return _last_by_walking(path, hashes, first, last, run)
    if last == end and runs.get(path.runs, run, runs.TAIL) == hashes[last]:
        return last
    if last == first or _is_in(path, hashes[last], run):
        return last
    return _last_by_halving(path, hashes, first, last, run)


@inlined
def run_at(path: Path, hashes: U64, first: Index) -> np.uint64:
    """The run of block `first` of the request, NO_RUN if nobody holds it."""
    place = _place_of(path, hashes[first])
    run = runs.run_of(place)
    if place == _0 or runs.get(path.runs, run, runs.SET) == _0:
        return runs.NO_RUN
    if runs.depth_of(place) != np.uint64(first) or np.uint64(first) > runs.get(
        path.runs, run, runs.END
    ):
        return runs.NO_RUN
    return run


@inlined
def _settle(rank: Index, at: Index, holders: Holders, ranks: Ranks, out_credit: F64) -> None:
    """Count what the rank had up to block `at`."""
    if ranks.reach[rank] & (1 << ANY) != 0:
        worth = holders.credits[ranks.has[rank]]
        out_credit[rank] += worth * (at - ranks.since[rank])
    ranks.since[rank] = at


@inlined
def _flip_pool(rank: Index, gains: bool, ranks: Ranks) -> None:
    ranks.pools[rank] += 1 if gains else -1
    if ranks.pools[rank] > 0:
        ranks.has[rank] |= 1 << POOLED
    else:
        ranks.has[rank] &= ~(1 << POOLED)


@inlined
def _flip(
    owner: Index, gains: bool, at: Index, holders: Holders, ranks: Ranks, out_credit: F64
) -> None:
    """A holder comes or goes with block `at`."""
    if owner >= 0:
        rank = owner >> 2
        _settle(rank, at, holders, ranks, out_credit)
        ranks.has[rank] ^= 1 << (owner & 3)
    elif owner < -1:
        first = -1 - owner
        for i in range(first, first + holders.readers[first - 1]):
            rank = holders.readers[i]
            _settle(rank, at, holders, ranks, out_credit)
            _flip_pool(rank, gains, ranks)


@inlined
def _write_reaches(rank: Index, which: Index, at: Index, num_ranks: Index, out_reach: I64) -> None:
    for each in range(NUM_REACHES):
        if which & (1 << each) != 0:
            out_reach[each * num_ranks + rank] = at


@inlined
def _leave_reaches(rank: Index, at: Index, ranks: Ranks, out_reach: I64) -> Index:
    """The rank ends where it has nothing in a reach any more; -1 if it is out of ANY, else 0."""
    within = _REACHES_OF[ranks.has[rank]]
    if at == 0:
        ranks.reach[rank] = within
        return 0
    before = ranks.reach[rank]
    left = before & ~within
    if left == 0:
        return 0
    ranks.reach[rank] = before ^ left
    _write_reaches(rank, left, at, len(ranks.has), out_reach)
    return -1 if left & (1 << ANY) != 0 else 0


@inlined
def _leave_holder(owner: Index, at: Index, holders: Holders, ranks: Ranks, out_reach: I64) -> Index:
    if owner >= 0:
        return _leave_reaches(owner >> 2, at, ranks, out_reach)
    num_left: Index = 0
    if owner < -1:
        first = -1 - owner
        for i in range(first, first + holders.readers[first - 1]):
            num_left += _leave_reaches(holders.readers[i], at, ranks, out_reach)
    return num_left


@inlined
def _flip_changed(
    before: Index, now: Index, at: Index, bits: U64, words: Index,
    holders: Holders, ranks: Ranks, out_credit: F64,
) -> Index:  # fmt: skip
    """Returns how many holders come or go; who is behind them is in ranks.changed."""
    num_changed = 0
    for w in range(words):
        members = bits[now * words + w]
        rest = members ^ bits[before * words + w]
        while rest != _0:
            bit = trailing_zeros(rest)
            rest &= rest - _1
            owner = holders.owner[64 * w + np.int64(bit)]
            ranks.changed[num_changed] = owner
            num_changed += 1
            _flip(owner, (members >> bit) & _1 != _0, at, holders, ranks, out_credit)
    return num_changed


@inlined
def cross_border(
    before: Index, now: Index, at: Index, bits: U64, words: Index,
    holders: Holders, ranks: Ranks, out_reach: I64, out_credit: F64,
) -> Index:  # fmt: skip
    """From set `before` to set `now` with block `at`; returns how many ranks left, as -n."""
    num_changed = _flip_changed(before, now, at, bits, words, holders, ranks, out_credit)
    num_left: Index = 0
    for i in range(num_changed):
        num_left += _leave_holder(ranks.changed[i], at, holders, ranks, out_reach)
    return num_left


@inlined
def _finish(at: Index, holders: Holders, ranks: Ranks, out_reach: I64, out_credit: F64) -> None:
    """Whoever is still in a reach holds everything up to block `at`."""
    num_ranks = len(ranks.has)
    for rank in range(num_ranks):
        if ranks.reach[rank] != 0:
            _settle(rank, at, holders, ranks, out_credit)
            _write_reaches(rank, ranks.reach[rank], at, num_ranks, out_reach)
        out_credit[rank] *= holders.credits[NUM_MASKS + rank]


@inlined
def _num_alive(ranks: Ranks) -> Index:
    num_alive = 0
    for rank in range(len(ranks.reach)):
        num_alive += ranks.reach[rank] != 0
    return num_alive


@inlined
def _ranks(num_ranks: Index, scratch: I64) -> Ranks:
    n = num_ranks
    scratch[: 4 * n] = 0
    return Ranks(
        scratch[:n], scratch[n : 2 * n], scratch[2 * n : 3 * n], scratch[3 * n : 4 * n],
        scratch[4 * n :],
    )  # fmt: skip


@inlined
def fill_overlap(
    hashes: U64, path: Path, bits: U64, words: Index, holders: Holders,
    scratch: I64, out_reach: I64, out_credit: F64,
) -> Index:  # fmt: skip
    """What each rank holds of a request; returns how many leading blocks anybody holds.

    out_reach: int64[NUM_REACHES * ranks] by reach, out_credit: float64[ranks]; scratch:
    int64[4 * ranks + holders].
    """
    out_reach[:], out_credit[:] = 0, 0.0
    ranks = _ranks(len(out_credit), scratch)
    at: Index = 0
    before: Index = np.int64(0)
    num_alive: Index = 0
    while at < len(hashes):
        run = run_at(path, hashes, at)
        if run == runs.NO_RUN:
            break
        now = np.int64(runs.get(path.runs, run, runs.SET))
        if now != before:
            num_alive += cross_border(
                before, now, at, bits, words, holders, ranks, out_reach, out_credit
            )
            if at == 0:
                num_alive = _num_alive(ranks)
            if num_alive == 0:
                break
            before = now
        runs.touch(path.runs, run)
        at = last_of_run(path, hashes, at, run) + 1
    _finish(at, holders, ranks, out_reach, out_credit)
    return at


@kernel(
    i8(
        reads(u8), reads(u8), writes(u8), reads(u8), i8, reads(i8), reads(i8), reads(f8),
        writes(i8), writes(i8), writes(f8),
    )
)  # fmt: skip
def overlap(
    hashes: U64, table: U64, run_words: U64, bits: U64, words: Index,
    owner: I64, readers: I64, credits: F64, scratch: I64, out_reach: I64, out_credit: F64,
) -> Index:  # fmt: skip
    """fill_overlap for one request."""
    runs.tick(run_words)
    holders, path = Holders(owner, readers, credits), Path(table, run_words)
    return fill_overlap(hashes, path, bits, words, holders, scratch, out_reach, out_credit)


@kernel(
    void(
        reads(u8), reads(i8), reads(u8), writes(u8), reads(u8), i8, reads(i8), reads(i8),
        reads(f8), writes(i8), writes(i8), writes(f8),
    )
)  # fmt: skip
def overlap_many(
    hashes: U64, ends: I64, table: U64, run_words: U64, bits: U64, words: Index,
    owner: I64, readers: I64, credits: F64, scratch: I64, out_reach: I64, out_credit: F64,
) -> None:  # fmt: skip
    """fill_overlap for many requests: hashes one after the other, request i up to ends[i].

    out_reach, int64[requests * NUM_REACHES * ranks]; out_credit, float64[requests * ranks].
    """
    runs.tick(run_words)
    holders, path = Holders(owner, readers, credits), Path(table, run_words)
    n, start = len(out_credit) // max(1, len(ends)), 0
    for i in range(len(ends)):
        fill_overlap(
            hashes[start : ends[i]], path, bits, words, holders, scratch,
            out_reach[i * NUM_REACHES * n : (i + 1) * NUM_REACHES * n],
            out_credit[i * n : (i + 1) * n],
        )  # fmt: skip
        start = ends[i]
