"""Many arrays as one argument: handing over an array costs Numba 45 ns, and an index has a dozen.

In:  arrays.   Out: uint64[2 * arrays], where each begins and how long it is; in a kernel, the
arrays again: `u64_of(words, number)` and its like.

Whoever makes a bundle keeps its arrays, which thereby stay where they are, and makes another one
when an array is replaced (kvplug/index/arrays.py).
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import f64_of, i32_of, i64_of, u1_of, u32_of, u64_of

__all__ = ["Bundle", "f64_of", "i32_of", "i64_of", "u1_of", "u32_of", "u64_of"]

U64 = npt.NDArray[np.uint64]


class Bundle:
    """words: uint64[2 * arrays], for a kernel; the arrays live as long as the bundle."""

    __slots__ = ("_arrays", "words")

    def __init__(self, *arrays: npt.NDArray[Any]) -> None:
        self._arrays = arrays
        places = [(array.ctypes.data, len(array)) for array in arrays]
        self.words: U64 = np.array(places, dtype=np.uint64).reshape(-1)
