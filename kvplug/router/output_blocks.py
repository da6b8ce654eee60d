"""Blocks of answers: what those that are being written add to the blocks in use on each rank, and
what nears its end takes off.

In:  requests in flight, their next block, how much of the answer is still expected.
Out: how many blocks more, or less, are in use on a rank than prompts alone have there.

A block of an answer counts 1. Told that a fraction f of the answer is left, all blocks of the
answer count f, and so do the last blocks of the prompt that no other request on the rank has: they
will soon be free. What others share keeps its 1. The blocks of a rank are the rounded sum.
"""

from __future__ import annotations

import math

import msgspec


class OutputShare(msgspec.Struct):
    """Of one request: blocks of its answer, and what they count; what was left of the answer when
    that was last said, and how much less the request's own prompt blocks count for it.
    """

    num_blocks: int = 0
    weight: float = 0.0
    fraction: float = 1.0
    decayed: float = 0.0

    def add(self) -> None:
        """One more block, which counts 1."""
        self.num_blocks += 1
        self.weight += 1.0

    def decay(self, fraction: float, num_own: int) -> None:
        """So much of the answer is left; the request alone has the last `num_own` prompt blocks."""
        self.weight, self.fraction = fraction * self.num_blocks, fraction
        self.own(num_own)

    def own(self, num_own: int) -> None:
        """The request alone has the last so many blocks of the prompt."""
        self.decayed = (1.0 - self.fraction) * num_own


class OutputBlocks:
    """Of one rank: share_of, end; num_blocks is the rounded sum of all shares.

    Summed anew each time, so that nothing of rounding stays when all have ended.
    """

    __slots__ = ("_shares",)

    def __init__(self) -> None:
        self._shares: dict[int, OutputShare] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in use on the rank beyond those of prompts; below 0 if much nears its end."""
        return math.floor(sum(each.weight - each.decayed for each in self._shares.values()) + 0.5)

    def share_of(self, number: int) -> OutputShare:
        """Of the request with this number; a new one at its first block."""
        return self._shares.setdefault(number, OutputShare())

    def end(self, number: int) -> OutputShare | None:
        """The request is over, or leaves the rank; what it had, None without a block."""
        return self._shares.pop(number, None)

    def put(self, number: int, share: OutputShare) -> None:
        """The request has come to the rank with its blocks."""
        self._shares[number] = share
