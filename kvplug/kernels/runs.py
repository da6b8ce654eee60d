"""Runs: blocks that follow each other on one path and are held by the same set of holders.

In:  `runs`, uint64[WIDTH * capacity]; a run's number.   Out: the same array changed.

A block has a run and a depth: its number in its sequence, 0 for the first. A run has at most one
block at each depth from START to END, all on one path: whoever finds its last block in a request
has matched all of it, without looking at the blocks between. Words of a run:

    SET      low half: number of its set of holders (kernels/holders.py); the word is 0 if nobody
             has it any more; high half: its family, 0 for none
    START    depth of its first block           END    depth of its last one
    USED     low half: how many blocks between are missing ("holes"); high half: when it was used
    SEED     of the namespace of its blocks
    TAIL     sequence hash of the block at END, 0 if that is not known
    PARENT   sequence hash of the block before START; 0 if there is none or if it is not known. With
             a run above: 1 + the only holder that comes or goes between the two, 0 if not known
    LINKS    low half: the run above, whose last block comes right before START; high half: the run
             below, whose run above is this one; 0: not known

Runs of one family were one once: where a block leaves the middle of a run, nobody knows by hash
what came before and behind it. All that is known is that it is within the family, which has a
number that is taken from the hash of that block. So of a block and the one before it, which was
there as it came: both are in one run or one family, or the first is what PARENT or LINKS say.

Of a free run, START has the next free one. Run 0 is none; its words START and END have the first
free run and the number of live ones, USED has the time, which is never 0. Reference:
tests/index/reference.py; check() of an index compares runs and blocks.
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import inlined

U64 = npt.NDArray[np.uint64]
Index = int | np.int64

WIDTH = 8
SET, START, END, USED, SEED, TAIL, PARENT, LINKS = (np.uint64(word) for word in range(WIDTH))
NO_RUN = np.uint64(0)

_0, _1, _8, _32 = np.uint64(0), np.uint64(1), np.uint64(8), np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


@inlined
def get(runs: U64, run: np.uint64, word: np.uint64) -> np.uint64:
    """A word of a run."""
    return np.uint64(runs[_8 * run + word])


@inlined
def put(runs: U64, run: np.uint64, word: np.uint64, value: np.uint64) -> None:
    """Change a word of a run."""
    runs[_8 * run + word] = value


@inlined
def set_of(runs: U64, run: np.uint64) -> np.int64:
    """The number of its set."""
    return np.int64(get(runs, run, SET) & _LOW)


@inlined
def family(runs: U64, run: np.uint64) -> np.uint64:
    """The number of its family, 0 for none."""
    return get(runs, run, SET) >> _32


@inlined
def join_family(runs: U64, run: np.uint64, number: np.uint64) -> None:
    """The run, which had no other one, is of this family (0: stays as it is)."""
    put(runs, run, SET, get(runs, run, SET) | (number << _32))


@inlined
def family_to_leave(runs: U64, run: np.uint64, depth: np.uint64, hash_: np.uint64) -> np.uint64:
    """The family of a block that is about to leave the run for another one."""
    if run == NO_RUN:
        return _0
    is_inside = get(runs, run, START) < depth and depth < get(runs, run, END)
    if is_inside and family(runs, run) == _0:
        number = hash_ & _LOW
        join_family(runs, run, number if number != _0 else _1)
    return family(runs, run)


@inlined
def takes_family(runs: U64, run: np.uint64, number: np.uint64) -> bool:
    """Whether blocks of this family can come to the run."""
    own = family(runs, run)
    is_free = number == _0 or own == _0
    return bool(is_free or own == number)


@inlined
def place(run: np.uint64, depth: np.uint64) -> np.uint64:
    """Run and depth of a block as one value of a table; never 0."""
    return run | (depth << _32)


@inlined
def run_of(value: np.uint64) -> np.uint64:
    """The run in a place."""
    return value & _LOW


@inlined
def depth_of(value: np.uint64) -> np.uint64:
    """The depth in a place."""
    return value >> _32


@inlined
def num_holes(runs: U64, run: np.uint64) -> np.uint64:
    """How many depths between START and END have no block."""
    return get(runs, run, USED) & _LOW


@inlined
def num_blocks(runs: U64, run: np.uint64) -> np.uint64:
    """How many blocks the run has."""
    return get(runs, run, END) + _1 - get(runs, run, START) - num_holes(runs, run)


@inlined
def is_live(runs: U64, run: np.uint64) -> bool:
    """Whether the number is in use."""
    return bool(run != NO_RUN and get(runs, run, USED) >> _32 != _0)


@inlined
def claims(runs: U64, value: np.uint64) -> bool:
    """Whether the run of a block, whose place this is, has anybody and reaches so deep."""
    run = run_of(value)
    if get(runs, run, SET) == _0:
        return False
    return bool(depth_of(value) <= get(runs, run, END))


@inlined
def above(runs: U64, run: np.uint64) -> np.uint64:
    """The run above, if it is known."""
    return get(runs, run, LINKS) & _LOW


@inlined
def below(runs: U64, run: np.uint64) -> np.uint64:
    """The run below, if it is known."""
    return get(runs, run, LINKS) >> _32


@inlined
def _set_above(runs: U64, run: np.uint64, other: np.uint64) -> None:
    put(runs, run, LINKS, (get(runs, run, LINKS) & ~_LOW) | other)


@inlined
def _set_below(runs: U64, run: np.uint64, other: np.uint64) -> None:
    put(runs, run, LINKS, (get(runs, run, LINKS) & _LOW) | (other << _32))


@inlined
def cut_below(runs: U64, run: np.uint64, tail: np.uint64) -> None:
    """What hung on the run's last block, whose hash is `tail`, hangs on it by its hash now."""
    other = below(runs, run)
    if other != NO_RUN:
        put(runs, other, PARENT, tail)
        _set_above(runs, other, NO_RUN)
        _set_below(runs, run, NO_RUN)


@inlined
def cut_above(runs: U64, run: np.uint64) -> None:
    """The run does not come right behind another one any more."""
    other = above(runs, run)
    if other != NO_RUN:
        _set_below(runs, other, NO_RUN)
        _set_above(runs, run, NO_RUN)
        put(runs, run, PARENT, _0)


@inlined
def link(runs: U64, run: np.uint64, other: np.uint64, tail: np.uint64) -> None:
    """`other` comes right behind the last block of `run`; `tail` was that up to now."""
    cut_below(runs, run, tail)
    cut_above(runs, other)
    put(runs, other, PARENT, _0)
    _set_below(runs, run, other)
    _set_above(runs, other, run)


@inlined
def inherit_parent(runs: U64, run: np.uint64, heir: np.uint64) -> None:
    """The first block of `run` is `heir`'s first block now."""
    cut_above(runs, heir)
    other = above(runs, run)
    put(runs, heir, PARENT, get(runs, run, PARENT) if other == NO_RUN else _0)
    if other != NO_RUN:
        put(runs, run, PARENT, _0)
        _set_below(runs, other, heir)
        _set_above(runs, heir, other)
        _set_above(runs, run, NO_RUN)


@inlined
def parent_of(runs: U64, run: np.uint64) -> np.uint64:
    """The sequence hash of the block before the run, 0 if it is not known by its hash."""
    return get(runs, run, PARENT) if above(runs, run) == NO_RUN else _0


@inlined
def only_change(runs: U64, run: np.uint64) -> np.int64:
    """The only holder that comes or goes between the run above and this one; -1: not known."""
    return np.int64(get(runs, run, PARENT)) - 1


@inlined
def remember_change(runs: U64, run: np.uint64, holder: Index) -> None:
    """For a run that has a run above."""
    put(runs, run, PARENT, np.uint64(holder + 1))


@inlined
def change_set(runs: U64, run: np.uint64, set_id: Index) -> None:
    """All blocks of the run are held by another set from now on."""
    kept = _0 if set_id == 0 else get(runs, run, SET) & ~_LOW
    put(runs, run, SET, np.uint64(set_id) | kept)
    if above(runs, run) != NO_RUN:
        put(runs, run, PARENT, _0)
    if below(runs, run) != NO_RUN:
        put(runs, below(runs, run), PARENT, _0)


@inlined
def has_room(runs: U64, num_more: Index) -> bool:
    """Whether as many runs can be made."""
    return bool(np.int64(runs[END]) + num_more + 1 < len(runs) // WIDTH)


@inlined
def create(runs: U64, set_id: np.uint64, depth: np.uint64, seed: np.uint64) -> np.uint64:
    """A run without blocks yet, ahead of `depth`."""
    run = runs[START]
    runs[START] = get(runs, run, START)
    runs[END] += _1
    put(runs, run, SET, set_id)
    put(runs, run, START, depth)
    put(runs, run, END, depth - _1)
    put(runs, run, SEED, seed)
    mark_used(runs, run)
    return np.uint64(run)


@inlined
def free(runs: U64, run: np.uint64) -> None:
    """The run has no blocks and no set any more."""
    other = below(runs, run)
    if other != NO_RUN and get(runs, other, START) == get(runs, run, START):
        inherit_parent(runs, run, other)
    cut_below(runs, run, _0)
    cut_above(runs, run)
    for word in range(WIDTH):
        put(runs, run, np.uint64(word), _0)
    put(runs, run, START, np.uint64(runs[START]))
    runs[START] = run
    runs[END] -= _1


@inlined
def time(runs: U64) -> np.uint64:
    """The time now, for `mark_used_at`."""
    return np.uint64(runs[USED] << _32)


@inlined
def mark_used_at(runs: U64, run: np.uint64, used: np.uint64) -> None:
    """The run was used then."""
    put(runs, run, USED, num_holes(runs, run) | used)


@inlined
def mark_used(runs: U64, run: np.uint64) -> None:
    """The run was used now."""
    mark_used_at(runs, run, time(runs))


@inlined
def tick(runs: U64) -> None:
    """Time goes on."""
    time = (runs[USED] + _1) & _LOW
    runs[USED] = time if time != _0 else _1


@inlined
def append(runs: U64, run: np.uint64, hash_: np.uint64, before: np.uint64) -> None:
    """A block, behind `before`, at the end of the run."""
    cut_below(runs, run, before)
    put(runs, run, END, get(runs, run, END) + _1)
    put(runs, run, TAIL, hash_)


@inlined
def prepend(runs: U64, run: np.uint64) -> None:
    """A block at the start of the run; the caller sees to the run above."""
    put(runs, run, START, get(runs, run, START) - _1)
    put(runs, run, PARENT, _0)


@inlined
def take_out(runs: U64, run: np.uint64, depth: np.uint64, hash_: np.uint64) -> None:
    """The block at a depth leaves the run, maybe for the run below."""
    if depth == get(runs, run, END):
        other = below(runs, run)
        if other != NO_RUN and get(runs, other, START) != depth:
            cut_below(runs, run, hash_)
        put(runs, run, END, depth - _1)
        put(runs, run, TAIL, _0)
    elif depth == get(runs, run, START):
        cut_above(runs, run)
        put(runs, run, START, depth + _1)
        put(runs, run, PARENT, hash_)
    else:
        put(runs, run, USED, get(runs, run, USED) + _1)
