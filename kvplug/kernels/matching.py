"""A request's blocks to how much of it each rank holds, and what that is worth.

In:  sequence hashes of a request, the runs and sets of kvplug/index/block_store.py, who is behind
each holder.   Out: per rank, how many leading blocks it holds, by class of memory.

A request goes from run to run, not from block to block. If the last block of a run is in the
request, all before it are, and nothing needs to be looked up between; if not, the last block that
is is found by bisection. Only runs with holes are walked. At the border of two runs
only the holders that come or go are looked at. Classes of memory are DEVICE, HOST, DISK and POOLED
(another worker can read it); a rank leaves at the first block that it does not hold in any.
Reference: plain loops over Python sets (tests/kernels/test_matching.py).
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels import cache_groups, prefix_lengths, runs
from kvplug.kernels._jit import (
    f8,
    fence,
    i8,
    inlined,
    kernel,
    load_acquire,
    load_now,
    reads,
    u8,
    void,
    writes,
)
from kvplug.kernels.bundle import f64_of, i64_of, u64_of
from kvplug.kernels.expiring import extend
from kvplug.kernels.holders import WORDS
from kvplug.kernels.path import Path, last_of_run, run_at, run_below, set_of
from kvplug.kernels.prefix_lengths import Holders, Out, Ranks
from kvplug.kernels.table import num_entries
from kvplug.kernels.versioned import GENERATION, VERSION

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]
Index = int | np.int64

# Rows of an answer behind the scopes.
DEPTH, CREDIT, NUM_ROWS = (
    prefix_lengths.NUM_SCOPES,
    prefix_lengths.NUM_SCOPES + 1,
    prefix_lengths.NUM_SCOPES + 2,
)
# The arrays of a bundle (kernels/bundle.py). EXPECTED and what follows are those of
# kernels/expiring.py, empty if nothing is ever expected; GROUPS is that of kernels/cache_groups.py,
# empty in a fleet without hybrid models. CONTROL: the words of kernels/versioned.py, empty if the
# index is this process's own; READS: what came of reading it, the words below.
(
    TABLE, RUNS, BITS, HEADER, OWNER, READERS, CREDITS, SCRATCH, GROUPS, EXPECTED, DEADLINES,
    EXPECTED_STATE, CONTROL, READS,
) = range(14)  # fmt: skip
# Words of READS. SEEN: the generation that the arrays are of. How many reads there were, how often
# one began again, and how many gave up and found nothing.
SEEN, NUM_READS, NUM_RETRIES, NUM_GIVEN_UP, READS_WIDTH = range(5)
# A read of a shared index gives up after so many tries, or after so many looks at a writer that is
# in the middle of an event: about 200 us.
_MAX_TRIES, _MAX_LOOKS = 8, 4000

_0, _1 = np.uint64(0), np.uint64(1)


@inlined
def _end_of_next(path: Path, hashes: U64, first: Index, run: np.uint64) -> Index:
    """Where the run below ends if it begins at block `first` and is in the request as a whole.

    -1 if not, or if that needs a look at the table.
    """
    following = run_below(path, run)
    if following == runs.NO_RUN:
        return np.int64(-1)
    end = np.int64(runs.get(path.runs, following, runs.END))
    if path.is_shared and end < first:
        return np.int64(-1)
    if end >= len(hashes) or runs.get(path.runs, following, runs.TAIL) != hashes[end]:
        return np.int64(-1)
    is_next = runs.get(path.runs, following, runs.START) == np.uint64(first)
    is_whole = is_next and runs.num_holes(path.runs, following) == _0
    return end if is_whole and runs.get(path.runs, following, runs.SET) != _0 else np.int64(-1)


@inlined
def _cross(
    above: np.uint64, run: np.uint64, is_next: bool | np.bool_, at: Index, path: Path,
    holders: Holders, ranks: Ranks, out: Out,
) -> Index:  # fmt: skip
    """From a run to another; returns how many ranks left, as -n. Which holder is the only one that
    comes or goes between a run and the run below is remembered there.
    """
    before, now = set_of(path, above), set_of(path, run)
    known = runs.only_change(path.runs, run) if is_next else np.int64(-1)
    if path.is_shared and known >= len(holders.owner):  # PARENT is a hash if no run is above
        known = np.int64(-1)
    if known >= 0 and prefix_lengths.is_all(known, holders, ranks):
        return prefix_lengths.leave_with(known, at, holders, ranks)
    num_left, changed = prefix_lengths.cross(before, now, at, holders, ranks, out)
    if not path.is_shared and is_next and changed >= 0:
        runs.remember_change(path.runs, run, changed)
    return num_left


@inlined
def fill_overlap(hashes: U64, path: Path, holders: Holders, scratch: I64, out: Out) -> None:
    """What each rank holds of a request; scratch as for prefix_lengths.ranks_in."""
    out.credit[:] = 0.0
    ranks = prefix_lengths.ranks_in(scratch, len(out.credit))
    at: Index = 0
    num_alive: Index = 0
    run, time = runs.NO_RUN, runs.time(path.runs)
    while at < len(hashes):
        above, end = run, _end_of_next(path, hashes, at, run)
        run = run_at(path, hashes, at) if end < 0 else run_below(path, run)
        if run == runs.NO_RUN:
            break
        if at == 0:
            now = set_of(path, run)
            num_alive = prefix_lengths.enter(now, holders, ranks, out)
        else:
            num_alive += _cross(above, run, end >= 0, at, path, holders, ranks, out)
        if num_alive == 0:
            break
        if not path.is_shared:
            runs.mark_used_at(path.runs, run, time)
        at = 1 + (last_of_run(path, hashes, at, run) if end < 0 else end)
    if at == 0:
        out.prefix_lengths[:] = 0
    else:
        prefix_lengths.finish(at, holders, ranks, out)


@inlined
def _holders_of(bundle: U64) -> Holders:
    return Holders(
        u64_of(bundle, BITS), i64_of(bundle, HEADER)[WORDS], i64_of(bundle, OWNER),
        i64_of(bundle, READERS), f64_of(bundle, CREDITS),
    )  # fmt: skip


@inlined
def _path_of(bundle: U64, words: Index, is_shared: bool) -> Path:
    num_sets = len(u64_of(bundle, BITS)) // words
    return Path(u64_of(bundle, TABLE), u64_of(bundle, RUNS), num_sets, is_shared)


@inlined
def _fill_held(hashes: U64, max_blocks: Index, path: Path, bundle: U64, answer: Out) -> None:
    """fill_overlap, limited by what hybrid models need."""
    holders, groups = _holders_of(bundle), i64_of(bundle, GROUPS)
    fill_overlap(hashes, path, holders, i64_of(bundle, SCRATCH), answer)
    if len(groups) > 0:
        cache_groups.limit(hashes, max_blocks, path, holders, groups, answer)


@inlined
def _await_writer(control: U64) -> np.uint64:
    """The version as soon as nobody is in the middle of an event; odd if that takes too long."""
    version = load_acquire(control, VERSION)
    for _ in range(_MAX_LOOKS):
        if version & _1 == _0:
            break
        version = load_now(control[VERSION:])
    return np.uint64(version)


@inlined
def _fill_shared(hashes: U64, max_blocks: Index, bundle: U64, control: U64, answer: Out) -> None:
    """As `_fill_held`, from arrays that another process writes: again if it has, nothing if it does
    not let up or has put others in their place.
    """
    path = _path_of(bundle, i64_of(bundle, HEADER)[WORDS], True)
    reads_ = u64_of(bundle, READS)
    reads_[NUM_READS] += _1
    for _ in range(_MAX_TRIES):
        if load_acquire(control, GENERATION) != reads_[SEEN]:
            break
        version = _await_writer(control)
        if version & _1 != _0 or load_acquire(control, GENERATION) != reads_[SEEN]:
            break
        _fill_held(hashes, max_blocks, path, bundle, answer)
        fence()
        if load_acquire(control, VERSION) == version:
            return
        reads_[NUM_RETRIES] += _1
    reads_[NUM_GIVEN_UP] += _1
    answer.prefix_lengths[:] = 0
    answer.credit[:] = 0.0


@inlined
def fill_answer(hashes: U64, max_blocks: Index, now_s: float, bundle: U64, out: I64) -> None:
    """fill_overlap, then what is expected besides: out as `overlap` has it, for one request.

    max_blocks: how many an engine reuses at most, as it computes the last token in any case. It
    matters to windows, which end there.
    """
    num_ranks, control = len(out) // NUM_ROWS, u64_of(bundle, CONTROL)
    lengths, depths = out[: DEPTH * num_ranks], out[DEPTH * num_ranks : CREDIT * num_ranks]
    credit = out[CREDIT * num_ranks :].view(np.float64)
    if len(control) == 0:
        path = _path_of(bundle, i64_of(bundle, HEADER)[WORDS], False)
        runs.tick(path.runs)
        _fill_held(hashes, max_blocks, path, bundle, Out(lengths, credit))
    else:
        _fill_shared(hashes, max_blocks, bundle, control, Out(lengths, credit))
    held = lengths[prefix_lengths.ANY * num_ranks : (prefix_lengths.ANY + 1) * num_ranks]
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

    out: int64[NUM_ROWS * ranks], a row for each scope, then DEPTH (ANY, moved on over blocks that
    are expected), then CREDIT, which is float64.
    """
    fill_answer(hashes, len(hashes), now_s, bundle, out)


@kernel(void(reads(u8), reads(i8), f8, reads(u8), writes(i8)))
def overlap_many(hashes: U64, ends: I64, now_s: float, bundle: U64, out: I64) -> None:
    """As `overlap` for many requests: hashes one after the other, request i up to ends[i].

    out: int64[requests * NUM_ROWS * ranks].
    """
    size, start = len(out) // max(1, len(ends)), 0
    for i in range(len(ends)):
        one = out[i * size : (i + 1) * size]
        fill_answer(hashes[start : ends[i]], ends[i] - start, now_s, bundle, one)
        start = ends[i]
