"""A lock that lets queries go before ingestion.

In:  `with lock:` around a query, `with lock.low_priority as turn:` around ingestion, which calls
`turn.yield_to_queries()` between slices.   Out: a query waits for one slice, ingestion for other
ingestion.

Python's lock does not hand over: a thread that releases it and takes it again at once wins against
a waiting one, and a query would wait for many slices instead of one. So each thread takes `next`
before the inner lock. A waiting query holds `next` until it is served, and at most one low-priority
thread at a time may wait for it. `query_waiting`, uint8[1], is 1 while a query waits: a kernel
that runs without the GIL looks at it and returns early.

A query first waits awake, as it takes longer to wake a thread than to answer a query: ingestion
then hands the inner lock over (kernels/handover.py), and waits awake for its turn.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvplug.kernels import handover
from kvplug.kernels._jit import COMPILED

Flag = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]

# A look takes 10 to 50 ns. Ingestion comes to a stop within some tens of microseconds.
_MAX_LOOKS = 2000
_FREE = int(handover.FREE)


class QueryFirstLock:
    """Not reentrant."""

    def __init__(self) -> None:
        self._inner, self._next = threading.Lock(), threading.Lock()
        self.low_priority = _LowPriority(self)
        # A bytearray, as it is set in half the time of an array's item; kernels read the array.
        self._flag = bytearray(1)
        self.query_waiting: Flag = np.frombuffer(self._flag, dtype=np.uint8)
        self._state = memoryview(bytearray(8)).cast("Q")
        self._word: U64 = np.frombuffer(self._state, dtype=np.uint64)
        self._max_looks = _MAX_LOOKS if COMPILED and _num_cores() > 1 else 0
        self._is_ingesting = self._was_handed = False

    def __enter__(self) -> None:
        with self._next:
            if not self._inner.acquire(blocking=False):
                self._wait()

    def _wait(self) -> None:
        if self._is_ingesting and self._is_handed_over():
            self._was_handed = True
        else:  # whoever has it may have been handed it
            self._flag[0] = 1
            self._inner.acquire()
        self._flag[0] = 0

    def _is_handed_over(self) -> bool:
        looks = self._max_looks
        return bool(looks and handover.await_lock(self._word, self.query_waiting, looks))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._was_handed:
            self._was_handed, self._state[0] = False, _FREE
        self._inner.release()

    def begin_slice(self) -> None:
        """Ingestion has the lock from now on."""
        self.__enter__()
        self._is_ingesting = True

    def end_slice(self) -> None:
        """Ingestion gives the lock to the query that waits, if there is one."""
        self._is_ingesting = False
        is_awake = self._flag[0] and self._max_looks
        if not (is_awake and handover.hand_over(self._word, self._max_looks)):
            self.__exit__(None, None, None)


class _LowPriority:
    def __init__(self, lock: QueryFirstLock) -> None:
        self._lock, self._turn = lock, threading.Lock()

    def __enter__(self) -> _LowPriority:
        self._turn.acquire()
        self._lock.begin_slice()
        return self

    def yield_to_queries(self) -> None:
        """Let the queries that wait go now."""
        if self._lock.query_waiting[0]:
            self._lock.end_slice()
            self._lock.begin_slice()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Queries go meanwhile, other ingestion does not."""
        self._lock.end_slice()
        try:
            yield
        finally:
            self._lock.begin_slice()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.end_slice()
        self._turn.release()


def _num_cores() -> int:
    """Of this process. On one core, whoever waits awake keeps the other from coming."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
