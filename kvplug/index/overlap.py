"""What each rank holds of a request, as a kernel has written it.

In:  int64[NUM_ROWS * ranks] (kernels/matching.py).   Out: the rows by name, made when asked for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvplug.kernels import matching, prefix_lengths

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


class Overlap:
    """By rank number; all counts are of leading blocks without a gap.

    depth: int64[ranks], held in any class of memory, or expected to be in a moment;
    credit: float64[ranks], what they are worth in blocks: at most `depth`, less on lower tiers and
    on ranks of which not everything is known.
    """

    __slots__ = ("_answer",)

    def __init__(self, answer: I64) -> None:
        self._answer = answer

    @property
    def _rows(self) -> I64:
        return self._answer.reshape(matching.NUM_ROWS, len(self._answer) // matching.NUM_ROWS)

    @property
    def depth(self) -> I64:
        """int64[ranks]."""
        row: I64 = self._rows[matching.DEPTH]
        return row

    @property
    def credit(self) -> F64:
        """float64[ranks]."""
        row: F64 = self._rows[matching.CREDIT].view(np.float64)
        return row

    @property
    def prefix_lengths(self) -> I64:
        """int64[NUM_SCOPES, ranks], by class of memory, nothing expected
        (prefix_lengths.SCOPES).
        """
        return self._rows[: prefix_lengths.NUM_SCOPES]

    @property
    def device(self) -> I64:
        """int64[ranks], on the rank's device."""
        return np.asarray(self._rows[prefix_lengths.ON_DEVICE])

    @property
    def host(self) -> I64:
        """int64[ranks], there or in host memory: `device` and its extension."""
        return np.asarray(self._rows[prefix_lengths.IN_HOST])

    @property
    def disk(self) -> I64:
        """int64[ranks], there or on disk: `host` and its extension."""
        return np.asarray(self._rows[prefix_lengths.ON_DISK])

    @property
    def cxl_accessible(self) -> I64:
        """int64[ranks], on the device, or in CXL pools that the rank can read."""
        return np.asarray(self._rows[prefix_lengths.ON_DEVICE_OR_POOLED])

    @property
    def held(self) -> I64:
        """int64[ranks], in any memory: `depth` without what is expected."""
        return np.asarray(self._rows[prefix_lengths.ANY])
