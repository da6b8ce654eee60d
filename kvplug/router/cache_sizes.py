"""How full the cache of each rank is, and how many blocks it has room for.

In:  what engines say; how many blocks they hold, also when they evict.
Out: the numbers in the load of the fleet (kvplug/router/load.py); what is wrong with them.

An engine that evicts is full, so the most that it held then is its capacity, or nearly: a request
of many blocks evicts before the last of them fit. What an engine says is believed unless it holds
more, or has evicted a whole cache of blocks and never held nearly as many.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Literal

from kvplug.events import Rank
from kvplug.index.applied import Applied
from kvplug.kernels import costing
from kvplug.router.fleet_index import FleetIndex
from kvplug.router.load import ActiveLoad

logger = logging.getLogger(__name__)

Source = Literal["given", "learned", "unknown"]

# vLLM keeps a block to itself, and counts it.
_TOLERANCE = 1.02
# Blocks that are being computed take room, and are in no event yet.
_LEAST_SHARE = 0.8


@dataclass(slots=True)
class CacheSize:
    """Of one rank's cache, in blocks; `problem`: what is wrong with the capacity that was said."""

    num_resident: int = 0
    said: float | None = None
    learned: int = 0
    num_evicted: int = 0
    problem: str | None = None

    @property
    def capacity(self) -> float:
        """What is believed; 0 if nothing is known."""
        if self.said is not None and self.problem is None:
            return self.said
        return float(self.learned)

    @property
    def source(self) -> Source:
        """Where that is from."""
        if self.said is not None and self.problem is None:
            return "given"
        return "learned" if self.learned else "unknown"

    def say(self, num_blocks: float) -> bool:
        """The engine has room for so many; whether there is a problem that was not there before."""
        if num_blocks == self.said:
            return False
        if self.said is not None:
            self.learned = self.num_evicted = 0  # another engine, or the same one set otherwise
        self.said, self.problem = num_blocks, None
        if not num_blocks > 0:
            self.problem = f"a capacity of {num_blocks:g} blocks is none"
        return self.problem is not None

    def see(self, num_resident: int, num_evicted: int) -> bool:
        """It held so many and evicted so many; whether there is a problem that was not before."""
        self.num_evicted += num_evicted
        if num_evicted:
            self.learned = max(self.learned, num_resident)
        if self.problem is not None or self.said is None:
            return False
        if num_resident > _TOLERANCE * self.said:
            self.problem = (
                f"it holds {num_resident} blocks, more than its capacity of {self.said:g}"
            )
        elif self.num_evicted >= self.said and self.learned < _LEAST_SHARE * self.said:
            self.problem = (
                f"it has evicted {self.num_evicted} blocks and never held more than "
                f"{self.learned}, well below its capacity of {self.said:g}"
            )
        return self.problem is not None


class CacheSizes:
    """say, note, note_rank, note_all; of(rank)."""

    def __init__(self, fleet_index: FleetIndex, load: ActiveLoad) -> None:
        self._fleet_index, self._load = fleet_index, load
        self._sizes: dict[Rank, CacheSize] = {}

    def of(self, rank: Rank) -> CacheSize:
        """What is known of the rank now."""
        size = self._sizes.get(rank, CacheSize())
        return replace(size, num_resident=self.num_resident(rank))

    def say(self, rank: Rank, num_blocks: float) -> None:
        """The rank's engine has room for so many blocks."""
        if rank in self._fleet_index.numbers:
            size = self._sizes.setdefault(rank, CacheSize())
            self._put(rank, size, is_new_problem=size.say(num_blocks))

    def num_resident(self, rank: Rank) -> int:
        """Distinct blocks on the rank's device."""
        if rank not in self._fleet_index.numbers:
            return 0
        return self._fleet_index.section_of(rank).index.num_resident(rank)

    def note(self, rank: Rank, num_before: int, applied: Applied) -> None:
        """Events have changed the rank's cache, which had so many blocks before."""
        if rank not in self._fleet_index.numbers:
            return
        number, num_now = self._fleet_index.numbers.number_of(rank), self.num_resident(rank)
        if applied.was_cleared:
            self._load.empty_cache(number)
        self._put_resident(rank)
        size = self._sizes.setdefault(rank, CacheSize())
        before = size.capacity
        is_new = size.see(max(num_before, num_now), applied.num_removed)
        if is_new or size.capacity != before:
            self._put(rank, size, is_new_problem=is_new)

    def note_all(self) -> None:
        """Ranks came or went, or are in another index now."""
        for rank in self._fleet_index.numbers.ranks:
            if rank is not None:
                self._put_resident(rank)

    def note_rank(self, rank: Rank) -> None:
        """What the rank holds has changed, or what that counts for."""
        if rank in self._fleet_index.numbers:
            self._put_resident(rank)

    def forget(self, rank: Rank) -> None:
        """The rank is gone."""
        self._sizes.pop(rank, None)

    def _put_resident(self, rank: Rank) -> None:
        """A rank whose blocks count for nothing has a cache of which nothing is known."""
        if not self._load.counts_sent:
            is_known = self._fleet_index.worth_of(rank) > 0
            num_blocks = self.num_resident(rank) if is_known else costing.UNKNOWN_BLOCKS
            self._load.set_resident(self._fleet_index.numbers.number_of(rank), num_blocks)

    def _put(self, rank: Rank, size: CacheSize, *, is_new_problem: bool) -> None:
        if is_new_problem:
            logger.warning(
                "%s: %s; that is ignored, and learnt from its events", rank, size.problem
            )
        self._load.set_capacity(self._fleet_index.numbers.number_of(rank), size.capacity)
