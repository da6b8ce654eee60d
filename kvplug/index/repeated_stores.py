"""Which engines say again what they have: a stored event that brings no further copies.

In:  numbers of ranks.   Out: a flag for each, which kernels set, too.

Any client can have vLLM (0.32, `kv_cache_report_mode=full`) publish the prefix that it reuses, as
if it were stored, and no removal will follow. On the wire it looks like a prefix that is computed
anew. That is rare: an engine with one KV cache group reuses what it has, but for the last block of
a prompt, which it computes in any case. So two or more blocks from the start of a prompt that a
rank has already are such a report. One block may be either, and is taken for a second copy until
the engine has made a report.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Flag = npt.NDArray[np.uint8]


class RepeatedStores:
    """flag_of: uint8[1] of a rank, 1 once its engine has made a report."""

    def __init__(self) -> None:
        self._flags: dict[int, Flag] = {}

    def flag_of(self, rank_number: int) -> Flag:
        """The same array at each call."""
        return self._flags.setdefault(rank_number, np.zeros(1, dtype=np.uint8))

    def forget(self, rank_number: int) -> None:
        """The rank leaves."""
        self._flags.pop(rank_number, None)
