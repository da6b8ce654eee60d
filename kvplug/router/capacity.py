"""How many blocks the cache of a rank has room for.

In:  what the engine says; how many blocks it held when it evicted.   Out: a number, or none.

An engine that evicts is full, so the most that it held then is its capacity, or nearly: a request of
many blocks evicts before the last of them fit. What an engine says is believed unless it holds more.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from kvplug.events import Rank

logger = logging.getLogger(__name__)

Source = Literal["given", "learned", "unknown"]

# vLLM keeps a block to itself, and blocks of requests that run may not be stored yet.
_TOLERANCE = 1.02


@dataclass(slots=True)
class CacheCapacity:
    """Of one rank: `num_blocks` (0: unknown), its `source`, and what is wrong with what was said."""

    rank: Rank
    said: float | None = None
    learned: int = 0
    problem: str | None = None

    @property
    def num_blocks(self) -> float:
        """What is believed."""
        if self.said is not None and self.problem is None:
            return self.said
        return float(self.learned)

    @property
    def source(self) -> Source:
        """Where that is from."""
        if self.said is not None and self.problem is None:
            return "given"
        return "learned" if self.learned else "unknown"

    def say(self, num_blocks: float) -> None:
        """The engine, or whoever set it up, says so."""
        if num_blocks != self.said:
            self.said, self.problem = num_blocks, None
            if not num_blocks > 0:
                self._name(f"a capacity of {num_blocks:g} blocks is none")

    def see(self, num_resident: int, *, evicts: bool) -> bool:
        """It holds so many blocks, and has evicted some just now; whether what is believed changed."""
        before = self.num_blocks
        if evicts and num_resident > self.learned:
            self.learned = num_resident
        is_more = self.said is not None and num_resident > _TOLERANCE * self.said
        if is_more and self.problem is None:
            self.learned = max(self.learned, num_resident)
            self._name(f"it holds {num_resident} blocks, more than its capacity of {self.said:g}")
        return self.num_blocks != before

    def _name(self, problem: str) -> None:
        self.problem = problem
        logger.warning(
            "%s: %s; that is ignored, and learnt from what it holds when it evicts",
            self.rank,
            problem,
        )
