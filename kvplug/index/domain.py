"""One engine hash space: ranks that give equal blocks equal engine hashes.

In:  engine hashes.   Out: rows of kvplug/index/holdings.py.
"""

from __future__ import annotations

from kvplug.events import Rank
from kvplug.index.hash_table import HashTable


class Domain:
    """The ranks and their common table, engine hash -> row."""

    def __init__(self) -> None:
        self.ranks: set[Rank] = set()
        self.table = HashTable()
