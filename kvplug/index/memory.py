"""Memory for the large arrays of an index.

In:  a number of 64-bit words.   Out: an array of zeros that gives its memory back when it goes.

A table that has outgrown its array is moved into another one. From the allocator of C such arrays
come in small pages, 1.6 us for each of them when it is first touched on a small virtual machine,
and what was freed may stay with the process. Mapped on their own, in huge pages where the system
has them, 2 MiB take 50 us instead of 800, a lookup misses the cache of pages less often, and
freeing is exact. Linux gives huge pages to mappings that are made of them; so arrays of that size
are, too.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

_HUGE_WORDS = 2**18  # 2 MiB
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)


def rounded(num_words: int) -> int:
    """So many words, or more if memory comes in larger pieces."""
    return num_words if num_words < _HUGE_WORDS else -(-num_words // _HUGE_WORDS) * _HUGE_WORDS


def zeros(num_words: int) -> U64:
    """uint64[num_words]."""
    if num_words < _HUGE_WORDS:
        return np.zeros(num_words, dtype=np.uint64)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, 8 * rounded(num_words), flags=flags)
    if _HUGE is not None:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(_HUGE)
    return np.frombuffer(memory, dtype=np.uint64, count=num_words)
