"""Workers that fail again and again get no requests for a while.

In:  how requests ended, by worker.   Out: which workers may be asked.

A health check says that an engine listens, not that it answers: one that fails each request does so
at once, looks idle, and draws more of them. After a number of failures in a row it is left out.
When its time is over, one request is let through: if that is answered the worker is back, else it
stays out for twice as long. If all workers of a model are out, all may be asked.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

_LONGEST: Final = 16  # times the first ejection


@dataclass(slots=True)
class _Ejected:
    until_s: float
    lasts_s: float


class Ejections:
    """note_sent, note_success, note_failure; usable. Times are of time.monotonic."""

    def __init__(self, after: int, lasts_s: float) -> None:
        """`after`: failures in a row, 0 for never; `lasts_s`: the first time."""
        self._after, self._lasts_s = after, lasts_s
        self._num_failures: dict[str, int] = {}
        self._ejected: dict[str, _Ejected] = {}

    def usable(self, workers: frozenset[str]) -> frozenset[str]:
        """Those that may get a request now."""
        if not self._ejected:
            return workers
        now_s = time.monotonic()
        return frozenset(name for name in workers if self._left_s(name, now_s) <= 0) or workers

    def left_s(self, worker: str) -> float | None:
        """How long it is still out, 0 while it waits for a trial; None if it is not ejected."""
        if worker not in self._ejected:
            return None
        return max(0.0, self._left_s(worker, time.monotonic()))

    def note_sent(self, worker: str) -> None:
        """A request goes there; one at a time while it is on trial."""
        if (ejected := self._ejected.get(worker)) is not None:
            ejected.until_s = max(ejected.until_s, time.monotonic() + ejected.lasts_s)

    def note_success(self, worker: str) -> bool:
        """It answered; whether it was ejected."""
        self._num_failures.pop(worker, None)
        return self._ejected.pop(worker, None) is not None

    def note_failure(self, worker: str) -> bool:
        """It did not; whether it is ejected now, and was not, or not for as long."""
        if not self._after:
            return False
        now_s, ejected = time.monotonic(), self._ejected.get(worker)
        if ejected is not None:
            ejected.lasts_s = min(2 * ejected.lasts_s, _LONGEST * self._lasts_s)
            ejected.until_s = now_s + ejected.lasts_s
            return True
        self._num_failures[worker] = self._num_failures.get(worker, 0) + 1
        if self._num_failures[worker] < self._after:
            return False
        self._ejected[worker] = _Ejected(now_s + self._lasts_s, self._lasts_s)
        return True

    def forget(self, worker: str) -> None:
        """It is a worker no more."""
        self._num_failures.pop(worker, None)
        self._ejected.pop(worker, None)

    def _left_s(self, worker: str, now_s: float) -> float:
        ejected = self._ejected.get(worker)
        return 0.0 if ejected is None else ejected.until_s - now_s
