"""How full the cache of each rank is, and how many blocks it has room for.

In:  the capacities that engines report; how many blocks they hold, and how many they evict.
Out: the numbers in the load of the fleet (kvplug/router/load.py); what is wrong with them.

An engine that evicts is full, so the most that it held then is about its capacity. A reported
capacity is believed unless the engine holds more, or evicts that many blocks without ever having
held nearly as many: an engine that counts the blocks of two kinds of attention, or keeps answers
out of its cache until they end, has room for fewer prefix blocks than it says.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Literal

from kvplug.events import Rank
from kvplug.index.apply_result import ApplyResult
from kvplug.router.arguments import MAX_BLOCKS
from kvplug.router.fleet_index import FleetIndex
from kvplug.router.load import ActiveLoad
from kvplug.setting import finite

logger = logging.getLogger(__name__)

Source = Literal["given", "learned", "unknown"]

# vLLM keeps a block to itself, and counts it.
_TOLERANCE = 1.02
# Blocks that are being computed take room, and are in no event yet.
_LEAST_SHARE = 0.8


@dataclass(slots=True)
class CacheSize:
    """Of one rank's cache, in blocks; `said`: the reported capacity; `problem`: what is wrong
    with it.
    """

    num_resident: int = 0
    said: float | None = None
    learned: int = 0
    num_evicted: int = 0
    problem: str | None = None

    @property
    def is_said_right(self) -> bool:
        """Whether what was said agrees with what was seen."""
        if self.said is None or self.problem is not None:
            return False
        return self.num_evicted < self.said or self.learned >= _LEAST_SHARE * self.said

    @property
    def capacity(self) -> float:
        """What is believed; 0 if nothing is known."""
        return self.said if self.said is not None and self.is_said_right else float(self.learned)

    @property
    def source(self) -> Source:
        """Where that is from."""
        if self.is_said_right:
            return "given"
        return "learned" if self.learned else "unknown"

    def say(self, num_blocks: float) -> bool:
        """The engine has room for so many; whether there is a problem that was not there before."""
        num_blocks = finite(num_blocks)  # NaN for what is no number
        if num_blocks == self.said:
            return False
        if self.said is not None:
            self.learned = self.num_evicted = 0  # another engine, or the same one set otherwise
        self.said, self.problem = num_blocks, None
        if not 0 < num_blocks <= MAX_BLOCKS:
            self.problem = f"a capacity of {num_blocks:g} blocks is none"
        return self.problem is not None

    def see(self, num_resident: int, num_evicted: int) -> bool:
        """It held so many and evicted so many; whether there is a problem that was not before."""
        self.num_evicted += num_evicted
        if num_evicted:
            self.learned = max(self.learned, num_resident)
        if self.problem is not None or self.said is None or num_resident <= _TOLERANCE * self.said:
            return False
        self.problem = f"it holds {num_resident} blocks, more than its capacity of {self.said:g}"
        return True


class CacheSizes:
    """say, note, note_confidence, note_clear, note_all; of(rank)."""

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
        return self._fleet_index.group_of(rank).index.num_resident(rank)

    def note(self, rank: Rank, num_before: int, applied: ApplyResult) -> None:
        """Events have changed the rank's cache, which had so many blocks before."""
        if rank not in self._fleet_index.numbers:
            return
        number, num_now = self._fleet_index.numbers.number_of(rank), self.num_resident(rank)
        if applied.was_cleared:
            self._load.empty_cache(number)
        self._put_resident(rank)
        size = self._sizes.setdefault(rank, CacheSize())
        before = size.capacity
        if applied.was_cleared:
            size.num_evicted = 0  # it starts over
        num_gone = num_before - num_now - applied.num_forgotten
        num_evicted = self._num_evicted(rank, num_gone, applied.num_removed)
        is_new = size.see(max(num_before, num_now), num_evicted)
        if is_new or size.capacity != before:
            self._put(rank, size, is_new_problem=is_new)

    def note_all(self) -> None:
        """Ranks came or went, or are in another index now."""
        for rank in self._fleet_index.numbers.ranks:
            if rank is not None:
                self._put_resident(rank)

    def note_confidence(self, rank: Rank) -> None:
        """What the rank's blocks count for has changed."""
        if rank in self._fleet_index.numbers:
            self._put_resident(rank)

    def note_forgotten(self, rank: Rank) -> None:
        """Blocks of the rank were forgotten that its engine still has."""
        if rank in self._fleet_index.numbers:
            self._put_resident(rank)

    def note_clear(self, rank: Rank) -> None:
        """The rank holds nothing any more, or what it holds is unknown."""
        self._load.empty_cache(self._fleet_index.numbers.number_of(rank))
        if rank in self._sizes:
            self._sizes[rank].num_evicted = 0
            self._put(rank, self._sizes[rank], is_new_problem=False)

    def forget(self, rank: Rank) -> None:
        """The rank is gone."""
        self._sizes.pop(rank, None)

    def _num_evicted(self, rank: Rank, num_fewer: int, num_removed: int) -> int:
        """How many of the removed blocks were evicted from the device."""
        index = self._fleet_index.group_of(rank).index
        if self._fleet_index.confidence_of(rank) < 1 or index.capacity_guard.stats.num_blocks:
            return 0  # it holds more than is known
        has_tiers = len(index.numbers.holders(index.numbers.number_of(rank))) > 1
        return max(0, num_fewer) if has_tiers else num_removed

    def _put_resident(self, rank: Rank) -> None:
        """Of a rank with confidence 0, what it holds is known until it computes something."""
        if not self._load.counts_sent:
            number = self._fleet_index.numbers.number_of(rank)
            is_told = self._fleet_index.confidence_of(rank) > 0
            self._load.set_resident(number, self.num_resident(rank), is_told=is_told)

    def _put(self, rank: Rank, size: CacheSize, *, is_new_problem: bool) -> None:
        if is_new_problem:
            logger.warning(
                "%s: %s; that is ignored, and learnt from its events", rank, size.problem
            )
        self._load.set_capacity(self._fleet_index.numbers.number_of(rank), size.capacity)
