"""KV cache groups, and copies in lower tiers, as an index takes them.

In:  what events say of a group, or of copies.
Out: the holder of their blocks; whether they count.

The rules are those of kvplug/index/cache_groups.py and kvplug/index/lower_tiers.py, for one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from kvplug.engines.resident_blocks import GROUP
from kvplug.events import PARTIAL_ATTENTION, BlockCopied, BlockStored, Tier

_MIN_COPIES: Final = 4


class GroupKind(NamedTuple):
    """What an event says of a group."""

    attention: str
    sliding_window: int | None

    @property
    def is_full(self) -> bool:
        """Whether a prefix needs all of its blocks."""
        return self.attention not in PARTIAL_ATTENTION


FULL: Final = GroupKind("full_attention", None)


class ResidentGroups:
    """holder_to_store, holder_of; `main` and `others`, the kinds by number, once there are any.

    `is_on_device` tells whether the rank has blocks on its device.
    """

    def __init__(self, has_main: Callable[[], bool], is_on_device: Callable[[], bool]) -> None:
        self._has_main, self._is_on_device = has_main, is_on_device
        self.is_hybrid = False
        self.main: int | None = 0
        self.others: dict[int, GroupKind] = {}

    def holder_to_store(self, event: BlockStored | BlockCopied) -> int | None:
        """The holder of what an event brings; None in a tier that does not count."""
        kind = GroupKind(event.attention, event.sliding_window)
        if not self.is_hybrid:
            if event.group == 0 and kind.is_full:
                return int(event.tier)
            self.is_hybrid, self.main = True, 0 if self._has_main() else None
        if isinstance(event, BlockCopied) and kind.is_full and event.group in self.others:
            kind = self.others[event.group]  # a copy need not say it
        if self._is_main(event.group, kind):
            return int(event.tier)
        if event.tier is not Tier.DEVICE:
            return None
        self.others[event.group] = kind
        return GROUP + event.group

    def holder_of(self, group: int, tier: Tier) -> int | None:
        """The holder of blocks of a group; None if nothing of it is known."""
        if group == self.main:
            return int(tier)
        is_here = group in self.others and tier is Tier.DEVICE
        return GROUP + group if is_here else None

    def _is_main(self, group: int, kind: GroupKind) -> bool:
        if kind.is_full and self.main is None and group not in self.others:
            self.main = group
        if self.main == group and not kind.is_full and not self._is_on_device():
            self.main = None
        return group == self.main


class OffloadedCopies:
    """note; outlive_clears. Of copies that events name without their content."""

    def __init__(self) -> None:
        self.num_copies = self.blocks_per_chunk = 0

    @property
    def outlive_clears(self) -> bool:
        """Whether a clear that names no tier leaves them: a connector published them."""
        return self.blocks_per_chunk > 0

    @property
    def are_chunks(self) -> bool:
        """Whether they are the last blocks of chunks, so that none counts."""
        return self.blocks_per_chunk > 1 and self.num_copies >= _MIN_COPIES

    def note(self, depths: list[int]) -> bool:
        """There are copies of blocks at these depths; whether they count."""
        self.blocks_per_chunk = math.gcd(self.blocks_per_chunk, *(depth + 1 for depth in depths))
        self.num_copies += len(depths)
        return not self.are_chunks
