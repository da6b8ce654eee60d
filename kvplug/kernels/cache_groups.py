"""How long a prefix engines with hybrid models can reuse: what all of their KV cache groups allow.

In:  sequence hashes of a request, who holds what of them, and for each group of a rank how many of
the last blocks of a prefix it needs (kvplug/index/cache_groups.py).
Out: the answer of kernels/matching.py, limited.

A group that needs k blocks allows the prefix of n blocks if it holds blocks n - k to n - 1, or all
n. Along a stretch of blocks that it holds, from block s on, these are the prefixes that end s + k
or more blocks deep, or any if s is 0. What the groups of a rank allow in common is known run by
run; the longest counts. Engines that draft tokens compute the last block that matches anew.
Reference: plain loops (tests/kernels/test_cache_groups.py).
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels import prefix_lengths, runs
from kvplug.kernels._jit import inlined
from kvplug.kernels.path import Path, last_of_run, run_at, set_of
from kvplug.kernels.prefix_lengths import Holders, Out

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Index = int | np.int64

# Columns of a row, one for each group of a rank but its main one. NUM_ROWS is that of the rank,
# whose rows follow each other. HAS_MAIN: 1 if what the rank's tiers hold limits the prefix, too.
# HOLDER: -1 if there is no other group, and the row is there for NUM_RECOMPUTED, in the first row
# of a rank: how many of the last blocks that match the engine computes anew. SINCE and BEST are
# scratch: with which block the group's stretch began, -1 for none; in the first row of a rank, the
# longest prefix so far.
RANK, NUM_ROWS, HAS_MAIN, HOLDER, NUM_NEEDED, NUM_RECOMPUTED, SINCE, BEST, WIDTH = range(9)

_NONE = -1
_1 = np.uint64(1)


def row(
    rank: int, *, num_rows: int, has_main: bool, holder: int, num_needed: int,
    num_recomputed: int = 0,
) -> list[int]:  # fmt: skip
    """The columns of a group."""
    return [rank, num_rows, int(has_main), holder, num_needed, num_recomputed, _NONE, 0]


@inlined
def _main_length(group: I64, max_blocks: Index, out: Out) -> Index:
    """How long a prefix the rank's main group allows."""
    if group[HAS_MAIN] == 0:
        return max_blocks
    num_ranks = len(out.credit)
    held = out.prefix_lengths[prefix_lengths.ANY * num_ranks + group[RANK]]
    return np.int64(min(held, max_blocks))


@inlined
def _start(groups: I64, max_blocks: Index, out: Out) -> Index:
    """Nothing is known; returns how many blocks of the request have to be looked at."""
    longest = np.int64(0)
    for at in range(0, len(groups), WIDTH):
        group = groups[at : at + WIDTH]
        group[SINCE], group[BEST] = _NONE, 0
        longest = np.int64(max(longest, _main_length(group, max_blocks, out)))
    return longest


@inlined
def _shortest(group: I64, is_held: bool | np.bool_, at: Index) -> Index:
    """The shortest prefix behind block `at` that the group allows, as it holds what follows; -1 for
    none.
    """
    if not is_held:
        group[SINCE] = _NONE
        return np.int64(_NONE)
    if group[SINCE] == _NONE:
        group[SINCE] = at
    return np.int64(0) if group[SINCE] == 0 else np.int64(group[SINCE] + group[NUM_NEEDED])


@inlined
def _is_member(holders: Holders, set_: Index, holder: Index) -> bool:
    if holder == _NONE:
        return True
    if holder >> 6 >= holders.words:  # nothing was ever stored for it
        return False
    word = holders.bits[set_ * holders.words + (holder >> 6)]
    return set_ != 0 and bool((word >> np.uint64(holder & 63)) & _1)


@inlined
def _advance(groups: I64, first: Index, set_: Index, at: Index, end: Index, holders: Holders,
             longest: Index) -> None:  # fmt: skip
    """The groups of a rank, whose rows begin at `first`, along blocks `at` to `end` - 1, which one
    set of holders has (0: nobody); longest: what the main group allows.
    """
    shortest, allows = np.int64(at + 1), True
    for i in range(first, first + WIDTH * groups[first + NUM_ROWS], WIDTH):
        group = groups[i : i + WIDTH]
        is_held = _is_member(holders, set_, group[HOLDER])
        least = _shortest(group, is_held, at)
        shortest = np.int64(max(shortest, least))
        allows = allows and least != _NONE
    length = min(end, longest)
    if allows and length >= shortest:
        groups[first + BEST] = length


@inlined
def _look_through(
    hashes: U64, num_blocks: Index, max_blocks: Index, path: Path, holders: Holders, groups: I64,
    out: Out,
) -> None:  # fmt: skip
    """BEST of each rank, from run to run; blocks that nobody holds one by one."""
    at, time = np.int64(0), runs.time(path.runs)
    while at < num_blocks:
        run = run_at(path, hashes, at)
        end, set_ = at + 1, np.int64(0)
        if run != runs.NO_RUN:
            end = np.int64(last_of_run(path, hashes, at, run) + 1)
            set_ = set_of(path, run)
            if not path.is_shared:
                runs.mark_used_at(path.runs, run, time)
        first = np.int64(0)
        while first < len(groups):
            longest = _main_length(groups[first : first + WIDTH], max_blocks, out)
            _advance(groups, first, set_, at, end, holders, longest)
            first += WIDTH * groups[first + NUM_ROWS]
        at = end


@inlined
def _credit_of(rank: Index, holders: Holders, out: Out) -> float:
    """What the prefixes of a rank are worth: each block in the nearest of its scopes."""
    num_ranks, credit, before = len(out.credit), 0.0, np.int64(0)
    for each in range(prefix_lengths.POOLED + 1):
        held = out.prefix_lengths[each * num_ranks + rank]
        credit += holders.credits[1 << each] * (held - before)
        before = held
    return float(credit * holders.credits[prefix_lengths.NUM_MASKS + rank])


@inlined
def limit(
    hashes: U64, max_blocks: Index, path: Path, holders: Holders, groups: I64, out: Out
) -> None:
    """What ranks with groups can reuse of a request; others stay as they are. A rank without a main
    group has everything on its device.
    """
    num_blocks = _start(groups, max_blocks, out)
    _look_through(hashes, num_blocks, max_blocks, path, holders, groups, out)
    num_ranks, at = len(out.credit), np.int64(0)
    while at < len(groups):
        group = groups[at : at + WIDTH]
        rank, longest = group[RANK], max(0, group[BEST] - group[NUM_RECOMPUTED])
        for each in range(prefix_lengths.NUM_SCOPES):
            held = out.prefix_lengths[each * num_ranks + rank]
            least = held if group[HAS_MAIN] != 0 else longest
            out.prefix_lengths[each * num_ranks + rank] = min(least, longest)
        out.credit[rank] = _credit_of(rank, holders, out)
        at += WIDTH * group[NUM_ROWS]
