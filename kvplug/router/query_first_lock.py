"""A lock for which queries go before ingestion.

In:  `with lock:` around a query, `with lock.patiently as turn:` around ingestion, which calls
`turn.give_way()` between slices.   Out: a query waits for one slice, ingestion for other ingestion.

Python's lock does not hand over: a thread that releases it and takes it again at once wins against
one that waits, and a query would wait for many slices instead of one. So whoever wants the inner
lock first takes `next`, which a waiting query holds until it is served, and at most one patient
thread at a time may wait for `next`.
"""

from __future__ import annotations

import threading
from types import TracebackType


class QueryFirstLock:
    """Not reentrant."""

    def __init__(self) -> None:
        self._inner, self._next = threading.Lock(), threading.Lock()
        self.patiently = _Patiently(self)

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits to be the next."""
        return self._next.locked()

    def __enter__(self) -> None:
        with self._next:
            self._inner.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inner.release()


class _Patiently:
    def __init__(self, lock: QueryFirstLock) -> None:
        self._lock, self._turn = lock, threading.Lock()

    def __enter__(self) -> _Patiently:
        self._turn.acquire()
        self._lock.__enter__()
        return self

    def give_way(self) -> None:
        """Let the queries that wait go now."""
        if self._lock.is_wanted:
            self._lock.__exit__(None, None, None)
            self._lock.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.__exit__(kind, error, trace)
        self._turn.release()
