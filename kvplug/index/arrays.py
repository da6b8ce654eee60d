"""What the growing arrays of an index have in common: where their memory is, and who learns that
one of them was replaced.

In:  a number of 64-bit words; whoever replaces an array says so.   Out: an array of zeros that
gives its memory back when it goes; a count that has changed.

A table that has outgrown its array moves into another one. From the allocator of C such arrays
come in small pages, 1.6 us for each when it is first touched on a small virtual machine, and freed
memory may stay with the process. Mapped on their own, in huge pages where the system has them,
16 MiB take 1.1 ms instead of 6, a lookup misses the TLB less often, and freeing is exact. Only
whole huge pages are taken: an array begins at the border of one, and what it has beyond the last
is mapped in small ones.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

_HUGE_PAGE = 2**21
_LINE = 8
"""Words of a cache line."""
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)


class ArrayVersion:
    """Shared by all arrays of one index, so that a kernel's bundle of them is collected only once.

    count: rises when an array becomes another one, or a number comes to stand for another rank.
    is_tight: arrays grow by little each time, as the memory of the index is bounded.
    """

    __slots__ = ("count", "is_tight")

    def __init__(self, *, is_tight: bool = False) -> None:
        self.count, self.is_tight = 0, is_tight


def zeros(num_words: int) -> U64:
    """uint64[num_words] that begins with a cache line."""
    if 8 * num_words < _HUGE_PAGE or _HUGE is None:
        words = np.zeros(num_words + _LINE, dtype=np.uint64)
        first = -(words.ctypes.data // 8) % _LINE
        return words[first : first + num_words]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, 8 * num_words + _HUGE_PAGE, flags=flags)
    skipped = -_address_of(memory) % _HUGE_PAGE
    num_bytes = skipped + 8 * num_words
    memory.resize(-(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)  # cut off behind the array
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(_HUGE)
    return np.frombuffer(memory, dtype=np.uint64, count=num_words, offset=skipped)


def _address_of(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
