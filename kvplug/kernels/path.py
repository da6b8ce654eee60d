"""Along a request from run to run: where its blocks are in the table and the runs of an index.

In:  sequence hashes of a request, the table and the runs of kvplug/index/block_store.py.
Out: the run of a block, and the last block of the request in it.

Parts for kernels/matching.py and kernels/cache_groups.py. Reference: the plain loops of
tests/kernels/test_matching.py.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.kernels import runs
from kvplug.kernels._jit import inlined
from kvplug.kernels.table import capacity_of, find_slot

U64 = npt.NDArray[np.uint64]
Index = int | np.int64

_0, _1, _2 = np.uint64(0), np.uint64(1), np.uint64(2)


class Path(NamedTuple):
    """Where blocks are: the table and the runs of the index; how many sets of holders it has.

    is_shared: another process may change all of them meanwhile (kernels/versioned.py). What is
    read may make no sense then, so every position is checked before it is used, and nothing is
    written. A constant where it is set, so that it costs nothing where it is False.
    """

    table: U64
    runs: U64
    num_sets: Index
    is_shared: bool


@inlined
def _place_of(path: Path, hash_: np.uint64) -> np.uint64:
    return np.uint64(path.table[_2 * find_slot(path.table, hash_, capacity_of(path.table)) + _1])


@inlined
def _checked_run(path: Path, run: np.uint64) -> np.uint64:
    """The run, NO_RUN for one that is none."""
    if path.is_shared and run >= np.uint64(len(path.runs) // runs.WIDTH):
        return runs.NO_RUN
    return run


@inlined
def run_below(path: Path, run: np.uint64) -> np.uint64:
    """The run below, NO_RUN if it is not known."""
    return _checked_run(path, runs.below(path.runs, run))


@inlined
def set_of(path: Path, run: np.uint64) -> np.int64:
    """The number of the run's set of holders."""
    set_ = runs.set_of(path.runs, run)
    if path.is_shared and set_ >= path.num_sets:
        return np.int64(0)
    return set_


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
    if path.is_shared and end < first:
        return np.int64(first)
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
    run = _checked_run(path, runs.run_of(place))
    if place == _0 or runs.get(path.runs, run, runs.SET) == _0:
        return runs.NO_RUN
    if runs.depth_of(place) != np.uint64(first) or np.uint64(first) > runs.get(
        path.runs, run, runs.END
    ):
        return runs.NO_RUN
    return run
