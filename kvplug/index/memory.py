"""Memory for the large arrays of an index.

In:  a number of 64-bit words.   Out: an array of zeros that gives its memory back when it goes.

A table that has outgrown its array is moved into another one. From the allocator of C such arrays
come in small pages, 1.6 us for each of them when it is first touched on a small virtual machine,
and what was freed may stay with the process. Mapped on their own, in huge pages where the system
has them, 16 MiB take 1.1 ms instead of 6, a lookup misses the cache of pages less often, and
freeing is exact. Only whole huge pages are taken: an array begins at the border of one, and what it
has beyond the last is mapped in small ones.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

_HUGE_PAGE = 2**21
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)


def zeros(num_words: int) -> U64:
    """uint64[num_words]."""
    if 8 * num_words < _HUGE_PAGE or _HUGE is None:
        return np.zeros(num_words, dtype=np.uint64)
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
