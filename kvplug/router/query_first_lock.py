"""A lock that lets queries go before ingestion.

In:  `with lock:` around a query, `with lock.low_priority as turn:` around ingestion, which calls
`turn.yield_to_queries()` between slices.   Out: a query waits for one slice, ingestion for other
ingestion.

Python's lock does not hand over: a thread that releases it and takes it again at once wins against
a waiting one, and a query would wait for many slices instead of one. So each thread takes `next`
before the inner lock. A waiting query holds `next` until it is served, and at most one low-priority
thread at a time may wait for it. `query_waiting`, uint8[1], is 1 while a query waits: a kernel
that runs without the GIL looks at it and returns early.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import numpy as np
import numpy.typing as npt

Flag = npt.NDArray[np.uint8]


class QueryFirstLock:
    """Not reentrant."""

    def __init__(self) -> None:
        self._inner, self._next = threading.Lock(), threading.Lock()
        self.low_priority = _LowPriority(self)
        # A bytearray, as it is set in half the time of an array's item; kernels read the array.
        self._flag = bytearray(1)
        self.query_waiting: Flag = np.frombuffer(self._flag, dtype=np.uint8)

    def __enter__(self) -> None:
        with self._next:
            self._flag[0] = 1
            self._inner.acquire()
            self._flag[0] = 0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inner.release()


class _LowPriority:
    def __init__(self, lock: QueryFirstLock) -> None:
        self._lock, self._turn = lock, threading.Lock()

    def __enter__(self) -> _LowPriority:
        self._turn.acquire()
        self._lock.__enter__()
        return self

    def yield_to_queries(self) -> None:
        """Let the queries that wait go now."""
        if self._lock.query_waiting[0]:
            self._lock.__exit__(None, None, None)
            self._lock.__enter__()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Queries go meanwhile, other ingestion does not."""
        self._lock.__exit__(None, None, None)
        try:
            yield
        finally:
            self._lock.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.__exit__(kind, error, trace)
        self._turn.release()
