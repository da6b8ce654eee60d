"""Many blocks out of the index in stretches, so that queries can come in between.

In:  holders to be forgotten, or runs that are cut short already.
Out: holdings and names without their blocks.

    clear     the holders leave the sets of all runs         a step per run
    sweep     blocks that no run claims leave the table      a step per slot, if there are any
              names of blocks that nobody of the domain has  a step per slot
              counts of copies that nobody has               a step per slot, if there are any

Between two stretches queries find what is left, and nothing else may change the index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvplug.index.holdings import Holdings
from kvplug.kernels import sweeping as kernels

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Named = tuple[U64, U64]

# A pass over slots: (first, last) -> how many entries are erased in them.
_Pass = Callable[[int, int], int]


class Clearing:
    """advance until `is_done`; `num_dropped` copies are gone by then.

    `domains` are slots and members of each domain whose names may be left without a block
    (kvplug/index/holdings.py).
    """

    def __init__(
        self, holdings: Holdings, domains: Sequence[Named], holders: list[int], *,
        any_block_gone: bool = False,
    ) -> None:  # fmt: skip
        self._holdings, self._domains = holdings, domains
        self._holders: I64 = np.array(holders, dtype=np.int64)
        self._counts: I64 = np.zeros(2, dtype=np.int64)
        self._any_block_gone = any_block_gone
        self._steps = self._run()
        self._budget = 0
        self.is_done = not holders and not any_block_gone

    @property
    def num_dropped(self) -> int:
        """Copies that are gone, those of one block in one tier counted once."""
        return int(self._counts[kernels.NUM_COPIES])

    @property
    def num_steps(self) -> int:
        """At least as many steps as are left."""
        held = self._holdings
        slots = held.table.capacity + held.copies.capacity + held.runs.capacity
        return slots + sum(len(names) for names, _ in self._domains)

    def advance(self, max_steps: int) -> None:
        """Look at so many more runs or slots."""
        self._budget = max_steps
        self.is_done = self.is_done or next(self._steps, True)

    def finish(self) -> None:
        """All the rest at once."""
        while not self.is_done:
            self.advance(self.num_steps)

    def _run(self) -> Iterator[bool]:
        """Yields False where it pauses."""
        yield from self._cut_holders()
        if self._any_block_gone or self._counts[kernels.NUM_BLOCKS]:
            yield from self._sweep(self._sweep_blocks, self._holdings.table.capacity)
            kernels.free_dead_runs(self._holdings.runs.words)
        for names, members in self._domains:
            yield from self._sweep(self._names_pass(names, members), len(names) // 2 - 1)
        if len(self._holdings.copies):
            yield from self._sweep(self._sweep_copies, self._holdings.copies.capacity)
        yield True

    def _cut_holders(self) -> Iterator[bool]:
        held, at = self._holdings, 1
        while at < held.runs.capacity and len(self._holders):
            held.sets.reserve(0, 1)
            last = min(at + self._budget, held.runs.capacity)
            end = kernels.cut_holders(
                at, last, self._holders, held.runs.words, *held.sets.arrays, self._counts
            )
            self._budget -= int(end) - at
            at = int(end)
            if self._budget <= 0:
                yield False

    def _sweep(self, sweep: _Pass, num_slots: int) -> Iterator[bool]:
        at = 0
        while at < num_slots:
            last = min(at + self._budget, num_slots)
            sweep(at, last)
            self._budget -= last - at
            at = last
            if self._budget <= 0:
                yield False

    def _sweep_blocks(self, first: int, last: int) -> int:
        held = self._holdings
        return int(kernels.sweep_blocks(first, last, held.runs.words, held.table.slots))

    def _names_pass(self, names: U64, members: U64) -> _Pass:
        held = self._holdings
        arrays = held.table.slots, held.runs.words, held.sets.bits, held.sets.header
        return lambda first, last: int(kernels.sweep_names(first, last, *arrays, members, names))

    def _sweep_copies(self, first: int, last: int) -> int:
        held = self._holdings
        arrays = held.table.slots, held.runs.words, held.sets.bits, held.sets.header
        return int(kernels.sweep_copies(first, last, *arrays, held.copies.slots))
