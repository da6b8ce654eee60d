"""Histograms that cost less than a microsecond to add to.

In:  numbers.   Out: cumulative buckets, as Prometheus has them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

STEP_S: Final = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Bounds for what takes microseconds to seconds."""
WAIT_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Bounds for what an engine takes."""
SHARE: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Bounds for parts of a whole."""


class Histogram:
    """add; buckets, total. Of one thread."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.total = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        """One more."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many are not above it) of each, the last is "+Inf"."""
        num, buckets = 0, []
        bounds = [*map(str, self._bounds), "+Inf"]
        for bound, count in zip(bounds, self._counts, strict=True):
            num += count
            buckets.append((bound, float(num)))
        return buckets
