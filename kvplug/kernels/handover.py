"""One thread hands a lock to another one that waits for it awake.

In:  `word`, uint64[1]: FREE, AWAITED, or HANDED.   Out: the same word, changed by one of the two.

To wake a thread takes a virtual machine tens of microseconds, as long as a query takes. Both
threads are without the GIL here, so that the one that gets the lock finds it free, too. Reference:
the three states, one step at a time (tests/kernels/test_handover.py).
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import b1, exchange_if, i8, kernel, load_now, u1, u8, writes

Bytes = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
Index = int | np.int64

FREE, AWAITED, HANDED = (np.uint64(n) for n in range(3))
_0 = np.uint64(0)


@kernel(b1(writes(u8), writes(u1), i8), releases_gil=True)
def await_lock(word: U64, out_waiting: Bytes, max_looks: Index) -> bool:
    """Look at the word so many times at most; whether the lock was handed over.

    out_waiting[0] becomes 1, which asks for it, here and not before: whoever sees it wants the GIL
    at once, and would fall asleep if this thread still had it.
    """
    out_waiting[0] = 1
    if not exchange_if(word, FREE, AWAITED):
        return False
    for _ in range(max_looks):
        if load_now(word) == HANDED:
            return True
    return not exchange_if(word, AWAITED, FREE)


@kernel(b1(writes(u8), i8), releases_gil=True)
def hand_over(word: U64, max_looks: Index) -> bool:
    """Hand the lock over, and wait until it is given back, but so many looks at most; False, and
    nothing done, if nobody waits here.
    """
    if not exchange_if(word, AWAITED, HANDED):
        return False
    for _ in range(max_looks):
        if load_now(word) != HANDED:
            break
    return True
