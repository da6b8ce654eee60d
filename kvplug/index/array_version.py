"""What the arrays of one index have in common: whether those that somebody has collected are still
the ones in use, and whether they may take more memory than they need.

In:  whoever replaces an array says so.   Out: a number that is another one then.
"""

from __future__ import annotations


class ArrayVersion:
    """count: how often an array of the index has become another, or a number another rank's.

    is_tight: arrays grow by little each time, as the memory of the index is bounded.
    """

    __slots__ = ("count", "is_tight")

    def __init__(self, *, is_tight: bool = False) -> None:
        self.count, self.is_tight = 0, is_tight
