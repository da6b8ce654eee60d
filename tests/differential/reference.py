"""What a worker has of a prompt, by plain rules: those of kvplug, and those of Dynamo 1.6.1.

In:  what engines have published.   Out: lengths of prefixes by tier, and tokens to be computed.

They differ in three things, each of which has a name here. `gap`: once a block in the middle of a
prefix was removed, Dynamo does not know of the blocks behind it any more, so it does not find them
when the block is back; and it refuses what is stored behind them. `order`: Dynamo follows a prefix
from the device to host memory, and from there to disk, never back; kvplug takes each block where it
is nearest. `loaded`: to Dynamo, a block in
host memory is three quarters of a block that need not be computed, and a block on disk one quarter,
when it counts what a worker has to compute for the requests that it has; to kvplug all of it is
loaded, and nothing computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvplug.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, Tier


class Lengths(NamedTuple):
    """Leading blocks: on the device, there or in host memory, in any tier."""

    device: int
    host: int
    disk: int

    def credit(self, host: float, disk: float) -> float:
        """What they are worth in blocks, if none is nearer than its length says."""
        in_host, on_disk = self.host - self.device, self.disk - self.host
        return self.device + host * in_host + disk * on_disk


@dataclass(slots=True)
class Blocks:
    """What is known of one worker's cache. `forgets`: as Dynamo does it."""

    forgets: bool
    parent_of: dict[int, int | None]
    held: dict[Tier, set[int]] = field(default_factory=lambda: {tier: set() for tier in Tier})

    def apply(self, event: Event) -> None:
        """The worker has published it."""
        match event:
            case BlockStored(block_hashes=names, tier=tier):
                self._store(names, self.held[tier], tier)
            case BlockRemoved(block_hashes=names, tier=tier):
                self._remove(names, self.held[tier], tier)
            case AllBlocksCleared():
                for held in self.held.values():
                    held.clear()

    def lengths(self, path: Sequence[int]) -> Lengths:
        """Of the prefix of these blocks that the worker has."""
        device, host, disk = (self.held[tier] for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK))
        if self.forgets:
            first = _length(path, device, 0)
            second = _length(path, host, first)
            return Lengths(first, second, _length(path, disk, second))
        return Lengths(
            _length(path, device, 0), _length(path, device | host, 0),
            _length(path, device | host | disk, 0),
        )  # fmt: skip

    def credit(self, path: Sequence[int], host: float, disk: float) -> float:
        """What the prefix is worth in blocks on the device."""
        lengths = self.lengths(path)
        if self.forgets:
            return lengths.credit(host, disk)
        worth = {Tier.DISK: disk, Tier.HOST: host, Tier.DEVICE: 1.0}
        return sum(
            max(worth[tier] for tier in Tier if name in self.held[tier])
            for name in path[: lengths.disk]
        )

    def _store(self, names: Sequence[int], held: set[int], tier: Tier) -> None:
        parent = self.parent_of[names[0]]
        is_behind_nothing = parent is not None and parent not in held and tier is Tier.DEVICE
        if not (self.forgets and is_behind_nothing):
            held.update(names)

    def _remove(self, names: Sequence[int], held: set[int], tier: Tier) -> None:
        held.difference_update(names)
        if self.forgets and tier is Tier.DEVICE:
            held.difference_update([name for name in held if self._is_cut_off(name, held)])

    def _is_cut_off(self, name: int, held: set[int]) -> bool:
        parent = self.parent_of[name]
        return parent is not None and (parent not in held or self._is_cut_off(parent, held))


def _length(path: Sequence[int], held: set[int], first: int) -> int:
    length = first
    while length < len(path) and path[length] in held:
        length += 1
    return length
