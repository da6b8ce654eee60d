"""The load of several processes in one: what each shows, and what the others have.

In:  rows that every process shows in shared memory, by slot; the columns of kernels/costing.py.
Out: the columns with the load of the others beside one's own; one's own rows.

    rows   float64[processes * slots * ROW_WIDTH]: the first NUM_BUSY columns of each rank
    facts  float64[ranks * FACT_WIDTH]: what the writer of the index knows of each rank

A row that is read while it is written mixes two moments of a rank, a microsecond apart. Reference:
plain numpy (tests/kernels/test_peer_load.py).
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import f8, i8, inlined, kernel, reads, writes
from kvplug.kernels.costing import (
    CAPACITY_BLOCKS,
    COMING_BLOCKS,
    FIRST_MS,
    FIRST_SINCE_MS,
    NUM_COLUMNS,
    NUM_WAITING,
    PREFILL_TOKENS,
    RESIDENT_BLOCKS,
    WAITING_MS,
)

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Index = int | np.int64

NUM_BUSY = RESIDENT_BLOCKS
"""How many columns say what a rank is busy with: the first ones."""
ROW_WIDTH = 16
# Of each rank: blocks on its device, room for how many, what its blocks are worth.
RESIDENT, CAPACITY, CONFIDENCE, FACT_WIDTH = range(4)
HAS_CAPACITY, HAS_CONFIDENCE = 1, 2


@inlined
def _sum_of_others(rows: F64, own: Index, num_processes: Index, slot: Index, out_sums: F64) -> None:
    """Of one rank. Of the oldest requests, that of the process whose request is served longest."""
    out_sums[:] = 0.0
    since, size = np.inf, len(rows) // num_processes
    for process in range(num_processes):
        if process != own:
            row = rows[process * size + slot * ROW_WIDTH :]
            for column in range(NUM_BUSY):
                if column != FIRST_MS and column != FIRST_SINCE_MS:
                    out_sums[column] += row[column]
            if row[FIRST_MS] > 0.0 and row[FIRST_SINCE_MS] < since:
                since = row[FIRST_SINCE_MS]
                out_sums[FIRST_MS], out_sums[FIRST_SINCE_MS] = row[FIRST_MS], since
    # More than waits is never being computed, whatever moments of a row were read.
    out_sums[FIRST_MS] = min(out_sums[FIRST_MS], max(0.0, out_sums[WAITING_MS]))


@inlined
def _put(sums: F64, ranks: F64, peers: F64) -> None:
    """The load of the others is this now, of one rank. The rank is at work on a request of theirs
    if it was so before, or if none of one's own waits.
    """
    is_idle = ranks[NUM_WAITING] - peers[NUM_WAITING] < 0.5
    is_theirs = is_idle or ranks[FIRST_SINCE_MS] == peers[FIRST_SINCE_MS]
    for column in range(NUM_BUSY):
        if column != FIRST_MS and column != FIRST_SINCE_MS:
            ranks[column] += sums[column] - peers[column]
        elif is_theirs:
            ranks[column] = sums[column]
        peers[column] = sums[column]
    if is_idle:  # not what rounding has left
        ranks[WAITING_MS], ranks[PREFILL_TOKENS] = sums[WAITING_MS], sums[PREFILL_TOKENS]
        ranks[COMING_BLOCKS] = sums[COMING_BLOCKS]


@kernel(i8(reads(f8), i8, i8, reads(i8), writes(f8), writes(f8), writes(f8)))
def take(
    rows: F64, own: Index, num_processes: Index, slots: I64, ranks: F64, peers: F64, scratch: F64
) -> Index:  # fmt: skip
    """Count what the other processes have sent to ranks beside one's own; returns for how many
    ranks it has changed.

    slots: of each rank, below 0 for none; ranks: float64[ranks * NUM_COLUMNS]; peers:
    float64[ranks * NUM_BUSY], what of it is the others'; scratch: float64[NUM_BUSY].
    """
    num_changed = 0
    for rank in range(len(slots)):
        if slots[rank] < 0:
            continue
        mine = peers[NUM_BUSY * rank : NUM_BUSY * (rank + 1)]
        _sum_of_others(rows, own, num_processes, slots[rank], scratch)
        is_other = False
        for column in range(NUM_BUSY):
            is_other = is_other or scratch[column] != mine[column]
        if is_other:
            _put(scratch, ranks[NUM_COLUMNS * rank : NUM_COLUMNS * (rank + 1)], mine)
            num_changed += 1
    return num_changed


@kernel(i8(reads(i8), reads(f8), reads(f8), writes(f8)))
def show(slots: I64, ranks: F64, peers: F64, out_rows: F64) -> Index:
    """Put what ranks are busy with because of this process into its rows; returns how many words
    have changed.
    """
    num_changed = 0
    for rank in range(len(slots)):
        if slots[rank] < 0:
            continue
        row = out_rows[ROW_WIDTH * slots[rank] : ROW_WIDTH * (slots[rank] + 1)]
        since = ranks[NUM_COLUMNS * rank + FIRST_SINCE_MS]
        num_own = ranks[NUM_COLUMNS * rank + NUM_WAITING] - peers[NUM_BUSY * rank + NUM_WAITING]
        is_own = num_own > 0.5 and since != peers[NUM_BUSY * rank + FIRST_SINCE_MS]
        for column in range(NUM_BUSY):
            value = ranks[NUM_COLUMNS * rank + column]
            if column != FIRST_MS and column != FIRST_SINCE_MS:
                value -= peers[NUM_BUSY * rank + column]
            elif not is_own:
                value = 0.0
            if row[column] != value:
                row[column] = value
                num_changed += 1
    return num_changed


@kernel(i8(reads(f8), reads(i8), writes(f8), reads(f8)))
def take_facts(facts: F64, numbers: I64, ranks: F64, confidence: F64) -> Index:
    """Put what the writer knows of caches into the columns: of rank n of its index, whose number
    here is numbers[n], below 0 for none. Returns HAS_CAPACITY if a capacity has changed,
    HAS_CONFIDENCE if that of a rank is not confidence[n] any more, both added up.
    """
    changed = 0
    for n in range(len(numbers)):
        fact = facts[FACT_WIDTH * n : FACT_WIDTH * (n + 1)]
        if fact[CONFIDENCE] != confidence[n]:
            changed |= HAS_CONFIDENCE
        if numbers[n] >= 0:
            row = NUM_COLUMNS * numbers[n]
            ranks[row + RESIDENT_BLOCKS] = fact[RESIDENT]
            if ranks[row + CAPACITY_BLOCKS] != fact[CAPACITY]:
                ranks[row + CAPACITY_BLOCKS] = fact[CAPACITY]
                changed |= HAS_CAPACITY
    return changed
