"""A setting: a value that somebody gave, as a number if it is one.

In:  a value of any type.   Out: a number, NaN if it is none (so it is in no range); how to show it.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from reprlib import repr as shortened


def whole(value: object) -> int | float:
    """An int; NaN for all but whole numbers. True and False are none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return math.nan
    return int(value)


def finite(value: object) -> float:
    """A float; NaN for all but numbers that a float can be. True and False are none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def shown(value: object) -> str:
    """How it is named in a sentence: on one line, and not at length."""
    try:
        return " ".join(shortened(value).split())
    except ValueError:  # Python writes no whole numbers of thousands of digits
        return "a number of thousands of digits"
