"""Which of many ever-growing counts have grown of late.

In:  counts by reason, looked at now and then.   Out: those that grew within the window.
"""

from __future__ import annotations

from collections import Counter


class RecentCounts:
    """of(worker, counts, now_s): what grew in the last `window_s`, with its whole count."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._grew: dict[tuple[str, str], tuple[int, float]] = {}

    def of(self, worker: str, counts: Counter[str], now_s: float) -> Counter[str]:
        """A reason that is seen for the first time has just grown."""
        for reason, count in counts.items():
            last, _ = self._grew.get((worker, reason), (0, now_s))
            if count != last:
                self._grew[worker, reason] = count, now_s
        return Counter(
            {
                reason: count
                for reason, count in counts.items()
                if count and now_s - self._grew[worker, reason][1] < self._window_s
            }
        )
