"""How long a prefix of a request each rank holds, going from border to border of its runs.

In:  the sets of holders that follow each other along a request, and who is behind each holder.
Out: per rank, how many leading blocks it has in each class of memory, and what they are worth.

Classes of memory are DEVICE, HOST, DISK and POOLED (another worker can read it); a rank leaves at
the first block that it does not hold in any. At a border only the holders that come or go are
looked at; what a rank has between two borders is counted when it changes. Parts for matching.py.
Reference: plain loops over Python sets (tests/kernels/references.py).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import inlined_optimized, trailing_zeros

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]
Index = int | np.int64

DEVICE, HOST, DISK, POOLED = 0, 1, 2, 3
NUM_CLASSES = 4
# A scope is the classes of memory that count: the device; device or host; device, host or disk;
# any class; the device or a pool.
SCOPES = (0b0001, 0b0011, 0b0111, 0b1111, 0b1001)
NUM_SCOPES = len(SCOPES)
ON_DEVICE, IN_HOST, ON_DISK, ANY, ON_DEVICE_OR_POOLED = range(NUM_SCOPES)
NUM_MASKS = 2**NUM_CLASSES
# In which scopes (bits) a rank is that has a block in these classes (bits).
_SCOPES_OF = np.array(
    [
        sum(1 << each for each, classes in enumerate(SCOPES) if has & classes)
        for has in range(NUM_MASKS)
    ],
    dtype=np.int64,
)

_0, _1 = np.uint64(0), np.uint64(1)
_EVERY_SCOPE = 2**NUM_SCOPES - 1
_STAYS = -1
_NUM_OF_RANK = 5


class Holders(NamedTuple):
    """Which holders are in a set, and who is behind each of them.

    bits: of the sets (kernels/holders.py), `words` for each.

    owner[h] is 4 * rank + class for copies of one rank's own; below -1 it is -2 - i: readers[i]
    ranks, listed from readers[i + 1] on, can read the copies in a pool; -1 is nobody.

    credits: float64[16 + ranks], what a block is worth on a rank that has it in these classes
    (bits), and behind that what everything is worth on each rank.
    """

    bits: U64
    words: Index
    owner: I64
    readers: I64
    credits: F64


class Ranks(NamedTuple):
    """What is known of each rank on the way: the classes of which it has copies (bits), in how many
    pools it finds the block, in which scopes it still is (bits), since which block, and with which
    block it left all of them. is_mixed[0]: whether any rank is in some scopes and not in the
    others; then the rows of the answer are kept on the way. `changed` has room for every holder.
    """

    has: I64
    pools: I64
    scopes: I64
    since: I64
    left: I64
    is_mixed: I64
    changed: I64


class Out(NamedTuple):
    """prefix_lengths: int64[NUM_SCOPES * ranks] by scope; credit: float64[ranks]."""

    prefix_lengths: I64
    credit: F64


def num_scratch(num_ranks: int, num_holders: int) -> int:
    """Words that `ranks_in` needs."""
    return _NUM_OF_RANK * num_ranks + 1 + num_holders


@inlined_optimized
def num_words(holders: Holders) -> Index:
    """How many words of a set have holders that somebody is behind: in an index of another process
    it may have others by now.
    """
    return np.int64(min(holders.words, len(holders.owner) >> 6))


@inlined_optimized
def ranks_in(scratch: I64, num_ranks: Index) -> Ranks:
    """Nobody has anything yet; scratch: int64[num_scratch]."""
    n, end = num_ranks, _NUM_OF_RANK * num_ranks
    scratch[: 2 * n + 1] = 0
    return Ranks(
        scratch[1 : n + 1], scratch[n + 1 : 2 * n + 1], scratch[2 * n + 1 : 3 * n + 1],
        scratch[3 * n + 1 : 4 * n + 1], scratch[4 * n + 1 : end + 1], scratch[:1],
        scratch[end + 1 :],
    )  # fmt: skip


@inlined_optimized
def _mix(ranks: Ranks, out: Out) -> None:
    """From now on rows count."""
    if ranks.is_mixed[0] == 0:
        ranks.is_mixed[0] = 1
        out.prefix_lengths[:] = 0


@inlined_optimized
def _settle(rank: Index, at: Index, holders: Holders, ranks: Ranks, out: Out) -> None:
    """Count what the rank had up to block `at`."""
    out.credit[rank] += holders.credits[ranks.has[rank]] * (at - ranks.since[rank])
    ranks.since[rank] = at


@inlined_optimized
def _flip_pool(rank: Index, gains: bool, ranks: Ranks) -> None:
    ranks.pools[rank] += 1 if gains else -1
    if ranks.pools[rank] > 0:
        ranks.has[rank] |= 1 << POOLED
    else:
        ranks.has[rank] &= ~(1 << POOLED)


@inlined_optimized
def _flip(owner: Index, gains: bool, at: Index, holders: Holders, ranks: Ranks, out: Out) -> None:
    """A holder comes or goes with block `at`; what a rank had that has left counts at the end."""
    if owner >= 0:
        rank = owner >> 2
        if ranks.left[rank] == _STAYS:
            _settle(rank, at, holders, ranks, out)
            ranks.has[rank] ^= 1 << (owner & 3)
    elif owner < -1:
        first = -1 - owner
        for i in range(first, first + holders.readers[first - 1]):
            rank = holders.readers[i]
            if ranks.left[rank] == _STAYS:
                _settle(rank, at, holders, ranks, out)
                _flip_pool(rank, gains, ranks)


@inlined_optimized
def _leave_scopes(rank: Index, at: Index, ranks: Ranks, out: Out) -> Index:
    """The rank ends where it has nothing in a scope any more; -1 if it is out of all, else 0."""
    if ranks.left[rank] != _STAYS:
        return 0
    if ranks.has[rank] == 0:
        ranks.left[rank] = at
        return -1
    ended = ranks.scopes[rank] & ~_SCOPES_OF[ranks.has[rank]]
    if ended != 0:
        _mix(ranks, out)
        ranks.scopes[rank] ^= ended
        for each in range(NUM_SCOPES):
            if ended & (1 << each) != 0:
                out.prefix_lengths[each * len(ranks.has) + rank] = at
    return 0


@inlined_optimized
def _leave(owner: Index, at: Index, holders: Holders, ranks: Ranks, out: Out) -> Index:
    """The ranks behind a holder that has come or gone; -n if n of them are out of all scopes."""
    if owner >= 0:
        return _leave_scopes(owner >> 2, at, ranks, out)
    num_left: Index = 0
    if owner < -1:
        first = -1 - owner
        for i in range(first, first + holders.readers[first - 1]):
            num_left += _leave_scopes(holders.readers[i], at, ranks, out)
    return num_left


@inlined_optimized
def is_all(holder: Index, holders: Holders, ranks: Ranks) -> bool:
    """Whether the holder is all that its rank had: then `leave_with` is all there is to do as it
    goes. Most borders are like that.
    """
    owner = holders.owner[holder]
    return bool(owner >= 0 and ranks.has[owner >> 2] == 1 << (owner & 3))


@inlined_optimized
def leave_with(holder: Index, at: Index, holders: Holders, ranks: Ranks) -> Index:
    """As `cross` if only this holder goes, and it is all that its rank had."""
    rank = holders.owner[holder] >> 2
    leaves = ranks.left[rank] == _STAYS
    ranks.left[rank] = at if leaves else ranks.left[rank]
    return -1 if leaves else 0


@inlined_optimized
def cross(
    before: Index, now: Index, at: Index, holders: Holders, ranks: Ranks, out: Out
) -> tuple[Index, Index]:
    """From set `before` to set `now` with block `at`: how many ranks left, as -n, and the holder
    that came or went, -1 if there was more than one.
    """
    num_changed, last = 0, np.int64(-1)
    bits, words = holders.bits, holders.words
    for w in range(num_words(holders)):
        members = bits[now * words + w]
        rest = members ^ bits[before * words + w]
        while rest != _0:
            bit = trailing_zeros(rest)
            rest &= rest - _1
            last = 64 * w + np.int64(bit)
            ranks.changed[num_changed] = holders.owner[last]
            num_changed += 1
            _flip(holders.owner[last], (members >> bit) & _1 != _0, at, holders, ranks, out)
    num_left: Index = 0
    for i in range(num_changed):
        num_left += _leave(ranks.changed[i], at, holders, ranks, out)
    return num_left, last if num_changed == 1 else np.int64(-1)


@inlined_optimized
def enter(now: Index, holders: Holders, ranks: Ranks, out: Out) -> Index:
    """Who has the first block; returns how many ranks that are."""
    for w in range(num_words(holders)):
        rest = holders.bits[now * holders.words + w]
        while rest != _0:
            owner = holders.owner[64 * w + np.int64(trailing_zeros(rest))]
            rest &= rest - _1
            if owner >= 0:
                ranks.has[owner >> 2] |= 1 << (owner & 3)
            elif owner < -1:
                first = -1 - owner
                for i in range(first, first + holders.readers[first - 1]):
                    _flip_pool(holders.readers[i], True, ranks)
    num_alive, num_mixed = 0, 0
    for rank in range(len(ranks.has)):
        scopes = _SCOPES_OF[np.uint64(ranks.has[rank])]
        ranks.scopes[rank], ranks.since[rank] = scopes, 0
        ranks.left[rank] = _STAYS if scopes != 0 else 0
        num_alive += scopes != 0
        num_mixed += scopes != 0 and scopes != _EVERY_SCOPE
    if num_mixed > 0:
        _mix(ranks, out)
    return num_alive


@inlined_optimized
def finish(at: Index, holders: Holders, ranks: Ranks, out: Out) -> None:
    """Whoever is still in a scope holds everything up to where it left, or to block `at`."""
    num_ranks = len(ranks.has)
    confidences = holders.credits[NUM_MASKS:]
    for rank in range(num_ranks):
        end = at if ranks.left[rank] == _STAYS else ranks.left[rank]
        ranks.left[rank] = end
        confidence = holders.credits[np.uint64(ranks.has[rank])] * (end - ranks.since[rank])
        out.credit[rank] = (out.credit[rank] + confidence) * confidences[rank]
    for each in range(NUM_SCOPES):
        row = out.prefix_lengths[each * num_ranks : (each + 1) * num_ranks]
        # Without branches for each rank, so that it is done some at a time.
        if ranks.is_mixed[0] == 0:
            for rank in range(num_ranks):
                row[rank] = ranks.left[rank]
        else:
            for rank in range(num_ranks):
                row[rank] += ((ranks.scopes[rank] >> each) & 1) * (ranks.left[rank] - row[rank])
