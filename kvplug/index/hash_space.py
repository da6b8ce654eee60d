"""One engine hash space: ranks that give equal blocks equal engine hashes.

In:  engine hashes.   Out: sequence hashes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvplug.events import Rank
from kvplug.index.array_version import ArrayVersion
from kvplug.index.hash_table import HashTable

U64 = npt.NDArray[np.uint64]


_MIN_NAMES = 800


class HashSpace:
    """The ranks and their common table, engine hash -> sequence hash."""

    def __init__(self, version: ArrayVersion, slots: U64 | None = None) -> None:
        self.ranks: set[Rank] = set()
        self.table = HashTable(version, slots)
        self.table.reserve(0 if slots is not None else _MIN_NAMES)
