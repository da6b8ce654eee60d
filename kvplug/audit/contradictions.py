"""Whether an engine contradicts its own events: it reuses less than they say it has.

In:  requests that counted on resident blocks, and whether the engine had them.
Out: what those have in common that were wrong, once that is no accident.

    adapter     requests of one LoRA adapter
    tier        requests that counted on host memory or a disk
    device      all others

Each is judged by its own requests: what is wrong with an adapter costs the base model nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import StrEnum
from typing import Final, NamedTuple

# An index that is right is never contradicted (0 of 2,400 requests under evictions), so a few
# requests are enough, if not all of them lack the one block that some engines compute anew; so many
# right ones in a row end it.
_WINDOW: Final = 64
_NUM_WRONG: Final = 2
_NUM_RIGHT: Final = 16
_MAX_SCOPES: Final = 256


class Blocks(StrEnum):
    """On which blocks requests count that are judged together."""

    ADAPTER = "adapter"
    TIER = "tier"
    DEVICE = "device"


class Scope(NamedTuple):
    """adapter: its name, for Blocks.ADAPTER."""

    blocks: Blocks
    adapter: str = ""

    def __str__(self) -> str:
        """What requests counted on."""
        names = {Blocks.TIER: "host memory or a disk", Blocks.DEVICE: "the device"}
        return names.get(self.blocks, f"adapter {self.adapter!r}")


DEVICE = Scope(Blocks.DEVICE)
TIER = Scope(Blocks.TIER)


class Contradictions:
    """Of one rank. note each request; those in it are the scopes that the engine contradicts now;
    counts and forget of a scope.
    """

    def __init__(self) -> None:
        self._num_missing: dict[Scope, deque[int]] = {}
        self._contradicted: set[Scope] = set()

    def __contains__(self, scope: Scope) -> bool:
        return scope in self._contradicted

    def __iter__(self) -> Iterator[Scope]:
        return iter(sorted(self._contradicted))

    def note(self, scope: Scope, num_missing: int) -> bool:
        """A request counted on blocks of the scope, and so many were not there; returns whether the
        scope is contradicted by this one, and was not before.
        """
        window = self._window(scope)
        window.append(num_missing)
        if scope in self._contradicted:
            if not any(list(window)[-_NUM_RIGHT:]) and len(window) >= _NUM_RIGHT:
                self.forget(scope)
            return False
        num_wrong, _ = self.counts(scope)
        is_now = num_wrong >= _NUM_WRONG and max(window) > 1
        if is_now:
            self._contradicted.add(scope)
        return is_now

    def counts(self, scope: Scope) -> tuple[int, int]:
        """Of the last requests of a scope, how many were wrong, and how many there were."""
        window = self._num_missing.get(scope, ())
        return sum(num > 0 for num in window), len(window)

    def forget(self, scope: Scope) -> None:
        """What was wrong is put right."""
        self._num_missing.pop(scope, None)
        self._contradicted.discard(scope)

    def _window(self, scope: Scope) -> deque[int]:
        if scope not in self._num_missing:
            if len(self._num_missing) >= _MAX_SCOPES:
                self.forget(next(iter(self._num_missing)))
            self._num_missing[scope] = deque(maxlen=_WINDOW)
        return self._num_missing[scope]
