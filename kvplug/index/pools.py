"""Where copies in CXL pools are: pools, and the workers that can read them, behind numbers.

In:  a rank number, a pool id, workers.   Out: a number for them, and the holder of such copies.

A rank has few of them at a time. What no block refers to any more is given up when a rank comes
near its limit (MAX_PLACEMENTS), or goes.
"""

from __future__ import annotations

from typing import NamedTuple

from kvplug.index.holder_numbers import HolderNumbers

MAX_PLACEMENTS = 256
"""Of one rank at once; each takes a bit in every set of holders."""


class Placement(NamedTuple):
    """Where a block of a rank is or was in a pool; None is what no event has said."""

    rank_number: int
    pool_id: int | None = None
    workers: tuple[str, ...] | None = None

    def moved(self, pool_id: int | None, workers: tuple[str, ...] | None) -> Placement:
        """What is left out is as before."""
        return Placement(
            self.rank_number,
            self.pool_id if pool_id is None else pool_id,
            self.workers if workers is None else tuple(sorted(set(workers))),
        )

    @property
    def is_unknown(self) -> bool:
        """Whether it says nothing."""
        return self.pool_id is None and not self.workers


class Placements:
    """number_of, placement, holder, numbers_of, free; numbers of all ranks are dense."""

    def __init__(self, numbers: HolderNumbers) -> None:
        self._numbers = numbers
        self._placements: list[Placement | None] = []
        self._number_of: dict[int, dict[Placement, int]] = {}
        self._holder_of: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(len(numbers) for numbers in self._number_of.values())

    @property
    def holders(self) -> list[int]:
        """The holders of copies in pools, of all ranks."""
        return list(self._holder_of.values())

    def state(self) -> list[tuple[Placement, int | None] | None]:
        """Every placement by number, with its holder if it has one."""
        return [
            None if each is None else (each, self._holder_of.get(number))
            for number, each in enumerate(self._placements)
        ]

    def load(self, state: list[tuple[Placement, int | None] | None]) -> None:
        """Be what other placements were; there are none here yet."""
        self._placements = [None if each is None else each[0] for each in state]
        for number, each in enumerate(state):
            if each is not None:
                self._number_of.setdefault(each[0].rank_number, {})[each[0]] = number
                if each[1] is not None:
                    self._holder_of[number] = each[1]

    def placement(self, number: int) -> Placement:
        """What is behind a number that is in use."""
        placement = self._placements[number]
        assert placement is not None
        return placement

    def numbers_of(self, rank_number: int) -> list[int]:
        """The numbers of a rank's placements."""
        return list(self._number_of.get(rank_number, {}).values())

    def is_full(self, rank_number: int) -> bool:
        """Whether a rank can have no more placements."""
        return len(self._number_of.get(rank_number, ())) >= MAX_PLACEMENTS

    def find(self, placement: Placement) -> int | None:
        """The number of a placement, None if it has none yet."""
        return self._number_of.get(placement.rank_number, {}).get(placement)

    def add(self, placement: Placement) -> int:
        """The number of a placement that had none."""
        free = self._placements.index(None) if None in self._placements else len(self._placements)
        self._placements[free : free + 1] = [placement]
        self._number_of.setdefault(placement.rank_number, {})[placement] = free
        return free

    def holder(self, number: int) -> int:
        """The holder of the copies there; given on first use."""
        holder = self._holder_of.get(number)
        if holder is None:
            rank_number, _, workers = self.placement(number)
            holder = self._holder_of[number] = self._numbers.add_pool(rank_number, workers or ())
        return holder

    def free(self, numbers: list[int]) -> None:
        """No block refers to these any more."""
        holders = [self._holder_of.pop(number) for number in numbers if number in self._holder_of]
        for number in numbers:
            placement = self.placement(number)
            del self._number_of[placement.rank_number][placement]
            if not self._number_of[placement.rank_number]:
                del self._number_of[placement.rank_number]
            self._placements[number] = None
        if holders:
            self._numbers.remove_pools(holders)
