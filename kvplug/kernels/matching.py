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
from kvplug.kernels.bundle import f64_of, i64_of, u64_of
from kvplug.kernels.expiring import extend
from kvplug.kernels.table import capacity_of, find_slot, num_entries

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

# Rows of an answer behind the reaches.
DEPTH, CREDIT, NUM_ROWS = NUM_REACHES, NUM_REACHES + 1, NUM_REACHES + 2
# The arrays of a bundle (kernels/bundle.py). EXPECTED and what follows are those of
# kernels/expiring.py, empty if nothing is ever expected.
(
    TABLE, RUNS, BITS, HEADER, OWNER, READERS, CREDITS, SCRATCH, EXPECTED, DEADLINES,
    EXPECTED_STATE,
) = range(11)  # fmt: skip

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
def _end_of_next(path: Path, hashes: U64, first: Index, run: np.uint64) -> Index:
    """Where the run below ends if it begins at block `first` and is in the request as a whole.

    -1 if not, or if that needs a look at the table.
    """
    following = runs.below(path.runs, run)
    if following == runs.NO_RUN:
        return np.int64(-1)
    end = np.int64(runs.get(path.runs, following, runs.END))
    if end >= len(hashes) or runs.get(path.runs, following, runs.TAIL) != hashes[end]:
        return np.int64(-1)
    is_next = runs.get(path.runs, following, runs.START) == np.uint64(first)
    is_whole = is_next and runs.num_holes(path.runs, following) == _0
    return end if is_whole and runs.get(path.runs, following, runs.SET) != _0 else np.int64(-1)


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
    before = ranks.reach[rank]
    left = before & ~_REACHES_OF[ranks.has[rank]]
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
def _enter(now: Index, bits: U64, words: Index, holders: Holders, ranks: Ranks) -> Index:
    """Who has the first block; returns how many ranks that are."""
    for w in range(words):
        rest = bits[now * words + w]
        while rest != _0:
            owner = holders.owner[64 * w + np.int64(trailing_zeros(rest))]
            rest &= rest - _1
            if owner >= 0:
                ranks.has[owner >> 2] |= 1 << (owner & 3)
            elif owner < -1:
                first = -1 - owner
                for i in range(first, first + holders.readers[first - 1]):
                    _flip_pool(holders.readers[i], True, ranks)
    num_alive = 0
    for rank in range(len(ranks.has)):
        ranks.reach[rank] = _REACHES_OF[ranks.has[rank]]
        num_alive += ranks.has[rank] != 0
    return num_alive


@inlined
def _finish(at: Index, holders: Holders, ranks: Ranks, out_reach: I64, out_credit: F64) -> None:
    """Whoever is still in a reach holds everything up to block `at`."""
    num_ranks = len(ranks.has)
    for rank in range(num_ranks):
        _settle(rank, at, holders, ranks, out_credit)
        out_credit[rank] *= holders.credits[NUM_MASKS + rank]
    for each in range(NUM_REACHES):
        row = out_reach[each * num_ranks : (each + 1) * num_ranks]
        for rank in range(num_ranks):  # without branches, so that it is done four at a time
            row[rank] += ((ranks.reach[rank] >> each) & 1) * (at - row[rank])


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
) -> None:  # fmt: skip
    """What each rank holds of a request.

    out_reach: int64[NUM_REACHES * ranks] by reach, out_credit: float64[ranks]; scratch:
    int64[4 * ranks + holders].
    """
    out_reach[:], out_credit[:] = 0, 0.0
    ranks = _ranks(len(out_credit), scratch)
    at: Index = 0
    before: Index = np.int64(0)
    num_alive: Index = 0
    run = runs.NO_RUN
    while at < len(hashes):
        end = _end_of_next(path, hashes, at, run)
        run = run_at(path, hashes, at) if end < 0 else runs.below(path.runs, run)
        if run == runs.NO_RUN:
            break
        now = np.int64(runs.get(path.runs, run, runs.SET))
        if now != before:
            if at == 0:
                num_alive = _enter(now, bits, words, holders, ranks)
            else:
                num_alive += cross_border(
                    before, now, at, bits, words, holders, ranks, out_reach, out_credit
                )
            if num_alive == 0:
                break
            before = now
        runs.touch(path.runs, run)
        at = 1 + (last_of_run(path, hashes, at, run) if end < 0 else end)
    _finish(at, holders, ranks, out_reach, out_credit)


@inlined
def fill_answer(hashes: U64, now_s: float, bundle: U64, out: I64) -> None:
    """fill_overlap, then what is expected besides: out as `overlap` has it, for one request."""
    runs.tick(u64_of(bundle, RUNS))
    header = i64_of(bundle, HEADER)
    path = Path(u64_of(bundle, TABLE), u64_of(bundle, RUNS))
    holders = Holders(i64_of(bundle, OWNER), i64_of(bundle, READERS), f64_of(bundle, CREDITS))
    num_ranks = len(out) // NUM_ROWS
    credit = out[CREDIT * num_ranks :].view(np.float64)
    reach, depths = out[: NUM_REACHES * num_ranks], out[DEPTH * num_ranks : CREDIT * num_ranks]
    scratch, bits, words = i64_of(bundle, SCRATCH), u64_of(bundle, BITS), header[0]
    fill_overlap(hashes, path, bits, words, holders, scratch, reach, credit)
    held = reach[ANY * num_ranks : (ANY + 1) * num_ranks]
    for rank in range(num_ranks):
        depths[rank] = held[rank]
    expected = u64_of(bundle, EXPECTED)
    if len(expected) == 0 or num_entries(expected) == _0:
        return
    extend(
        expected, f64_of(bundle, DEADLINES), i64_of(bundle, EXPECTED_STATE), now_s, hashes, depths
    )
    for rank in range(num_ranks):
        credit[rank] += depths[rank] - held[rank]


@kernel(void(reads(u8), f8, reads(u8), writes(i8)))
def overlap(hashes: U64, now_s: float, bundle: U64, out: I64) -> None:
    """What each rank holds of a request.

    out: int64[NUM_ROWS * ranks], a row for each reach, then DEPTH (ANY, moved on over blocks that
    are expected), then CREDIT, which is float64.
    """
    fill_answer(hashes, now_s, bundle, out)


@kernel(void(reads(u8), reads(i8), f8, reads(u8), writes(i8)))
def overlap_many(hashes: U64, ends: I64, now_s: float, bundle: U64, out: I64) -> None:
    """As `overlap` for many requests: hashes one after the other, request i up to ends[i].

    out: int64[requests * NUM_ROWS * ranks].
    """
    size, start = len(out) // max(1, len(ends)), 0
    for i in range(len(ends)):
        one = out[i * size : (i + 1) * size]
        fill_answer(hashes[start : ends[i]], now_s, bundle, one)
        start = ends[i]
