"""What an index knows of blocks besides who holds them.

In:  the parts.   Out: the same, in one hand.
"""

from __future__ import annotations

from typing import NamedTuple

from kvplug.index.cxl import CxlBlocks
from kvplug.index.expiring import ExpiringBlocks
from kvplug.index.moe_labels import MoeLabels


class BlockAnnotations(NamedTuple):
    """speculative: what ranks are about to hold; cxl: what is or was in pools; labels: experts."""

    speculative: ExpiringBlocks
    cxl: CxlBlocks
    labels: MoeLabels

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all."""
        return self.speculative.nbytes + self.cxl.states.nbytes + self.labels.nbytes

    def check(self) -> None:
        """Every invariant of each; raises IndexCorruptError."""
        self.speculative.check()
        self.cxl.check()
        self.labels.check()
