"""Bundles: many arrays handed to a kernel as one argument, an array of their addresses.

In:  arrays.   Out: uint64[2 * arrays], where each begins and how long it is; in a kernel the arrays
again: `u64_of(words, 3)` is the fourth, of which the kernel knows that it is one of uint64.

Numba takes 45 ns to unbox an array, and an index has a dozen. Whoever makes a bundle keeps it, for
it keeps its arrays alive, and makes a new one when an array is replaced
(kvplug/index/arrays.py). A bundle may contain another one: `u64_of` gives its words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import f64_of, i32_of, i64_of, u1_of, u32_of, u64_of

__all__ = ["Bundle", "f64_of", "i32_of", "i64_of", "u1_of", "u32_of", "u64_of"]

U64 = npt.NDArray[np.uint64]


class Bundle:
    """words: uint64[2 * arrays], for a kernel; the arrays live as long as the bundle."""

    __slots__ = ("_kept", "words")

    def __init__(self, *arrays: npt.NDArray[Any] | Bundle) -> None:
        self._kept = arrays
        flat = [each.words if isinstance(each, Bundle) else each for each in arrays]
        places = [(array.ctypes.data, len(array)) for array in flat]
        self.words: U64 = np.array(places, dtype=np.uint64).reshape(-1)
