"""Whether arrays that somebody has collected are still the ones in use.

In:  whoever replaces an array says so.   Out: a number that is another one then.
"""

from __future__ import annotations


class Changes:
    """count: how often an array of the index has become another, or a number another rank's."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0
