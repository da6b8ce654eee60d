"""Arrays that one process writes and others read, without a lock.

In:  `control`, uint64[CONTROL_WIDTH] in shared memory.   Out: its words changed.

    VERSION     odd while the writer is in the middle of an event: whoever reads looks at it before
                and after, and begins again if it has changed (a sequence lock)
    GENERATION  which arrays there are now: a table that grows moves into another one
    FACTS       how often facts have changed (kernels/peer_load.py)

A ring of words has one writer and any number of readers, each with a place of its own: HEAD words
were written, RESERVED are written or about to be. A reader that is too slow finds that its words
were written over.

    ring        uint64[RING_HEADER + a power of two]: HEAD, RESERVED, then the words

Reference: the steps one at a time, and a deque (tests/kernels/test_versioned.py).
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import (
    exchange_if,
    fence,
    i8,
    kernel,
    load_acquire,
    reads,
    store_release,
    u8,
    void,
    writes,
)

U64 = npt.NDArray[np.uint64]
Index = int | np.int64

# Each on a cache line of its own.
VERSION, GENERATION, FACTS, CONTROL_WIDTH = 0, 8, 16, 24
HEAD, RESERVED, RING_HEADER = 0, 8, 16
NO_SLOT, WRITTEN_OVER = -1, -1

_0, _1 = np.uint64(0), np.uint64(1)


@kernel(void(writes(u8)))
def begin_write(control: U64) -> None:
    """An event begins. After a writer that died in the middle of one, the version is odd already:
    it changes all the same.
    """
    version = load_acquire(control, VERSION)
    store_release(control, VERSION, (version + _1) | _1)
    fence()


@kernel(void(writes(u8), u8))
def end_write(control: U64, generation: np.uint64) -> None:
    """The event is over, and the arrays are of this generation."""
    store_release(control, GENERATION, generation)
    store_release(control, VERSION, load_acquire(control, VERSION) + _1)


@kernel(i8(writes(u8), u8))
def claim(names: U64, name: np.uint64) -> Index:
    """The slot of a name, which is not 0, in an array that several processes fill; NO_SLOT if it is
    full of others. A slot stays with its name.
    """
    num_slots = np.uint64(len(names))
    at = np.int64(name % num_slots)
    for _ in range(len(names)):
        if exchange_if(names[at:], _0, name) or load_acquire(names, at) == name:
            return at
        at = np.int64(0) if at + 1 == len(names) else at + 1
    return np.int64(NO_SLOT)


@kernel(void(writes(u8), reads(u8), reads(u8)))
def push(ring: U64, first: U64, words: U64) -> None:
    """Write the first words and the others behind them, together fewer than the ring has."""
    head, mask = load_acquire(ring, HEAD), np.uint64(len(ring) - RING_HEADER) - _1
    behind = head + np.uint64(len(first))
    end = behind + np.uint64(len(words))
    store_release(ring, RESERVED, end)
    fence()
    for i in range(len(first)):
        ring[np.int64((head + np.uint64(i)) & mask) + RING_HEADER] = first[i]
    for i in range(len(words)):
        ring[np.int64((behind + np.uint64(i)) & mask) + RING_HEADER] = words[i]
    store_release(ring, HEAD, end)


@kernel(i8(reads(u8), u8, writes(u8)))
def pull(ring: U64, place: np.uint64, out_words: U64) -> Index:
    """How many words from a place on are in out_words, as many as fit; WRITTEN_OVER if those that
    come next are not there any more.
    """
    size = np.uint64(len(ring) - RING_HEADER)
    num_words = min(load_acquire(ring, HEAD) - place, np.uint64(len(out_words)))
    for i in range(np.int64(min(num_words, size))):
        out_words[i] = ring[np.int64((place + np.uint64(i)) & (size - _1)) + RING_HEADER]
    fence()
    if load_acquire(ring, RESERVED) - place > size:
        return np.int64(WRITTEN_OVER)
    return np.int64(num_words)
