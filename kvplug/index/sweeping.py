"""Many blocks leave the index in slices, so that queries can come in between.

In:  holders to be cleared; kvplug/index/evicting.py shares the sweep.
Out: block store and hash spaces without their blocks.

    clear     the holders leave the sets of all runs           a step per run
    sweep     blocks that no run has leave the table           a step per slot, if there are any
              engine hashes of blocks that no rank of the
              hash space has leave its table                   a step per slot
              counts of copies that nobody has go              a step per slot, if there are any

Between two slices queries find what is left, and nothing else may change the index.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvplug.index.block_store import BlockStore, HashSpaceArrays
from kvplug.kernels import sweeping as kernels

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
_EVERYTHING = 2**62


class Sweep(ABC):
    """advance until `is_done`."""

    def __init__(self, block_store: BlockStore) -> None:
        self.block_store = block_store
        self.is_done = False
        self._steps: Iterator[bool] | None = None
        self._budget = 0

    def advance(self, max_steps: int) -> None:
        """Look at so many more runs or slots."""
        if self.is_done:
            return
        self._budget = max_steps
        self._steps = self._steps or self._run()
        self.is_done = next(self._steps, True)
        if self.is_done:
            # A suspended generator and its sweep refer to each other: together they would keep
            # all arrays of the sweep until the next garbage collection.
            self._steps = None

    def finish(self) -> None:
        """All the rest at once."""
        self.advance(_EVERYTHING)

    @abstractmethod
    def _run(self) -> Iterator[bool]:
        """Does the work, and yields False where the budget is used up, True at the end."""

    def _pass(
        self, num_steps: int, step: Callable[[int, int], object], at: int = 0
    ) -> Iterator[bool]:
        """Calls step(first, last) for slices of the budget."""
        while at < num_steps:
            last = min(at + self._budget, num_steps)
            step(at, last)
            self._budget -= last - at
            at = last
            if self._budget <= 0:
                yield False

    def _sweep_copies(self) -> Iterator[bool]:
        held = self.block_store
        if len(held.copies):
            yield from self._pass(
                held.copies.capacity,
                lambda first, last: kernels.sweep_copies(first, last, held.bundle),
            )


class Clearing(Sweep):
    """The holders have nothing any more once it is done; `num_dropped` counts their copies so far.

    `hash_space` is that of their rank.
    """

    def __init__(
        self, block_store: BlockStore, hash_space: HashSpaceArrays, holders: Sequence[int]
    ) -> None:
        super().__init__(block_store)
        self._slots, self._members = hash_space
        # Those that have nothing cost no sweep; a number that no set has room for is in none.
        num_numbers, num_held = 64 * block_store.sets.words, block_store.num_held
        holders = [each for each in holders if each < num_numbers and num_held(each)]
        self._holders: I64 = np.array(holders, dtype=np.int64)
        self._counts: I64 = np.zeros(2, dtype=np.int64)
        self.is_done = not holders

    @property
    def num_dropped(self) -> int:
        """Copies that are gone, those of one block in one tier counted once."""
        return int(self._counts[kernels.NUM_COPIES])

    def _run(self) -> Iterator[bool]:
        held = self.block_store
        yield from self._cut_holders()
        if self._counts[kernels.NUM_BLOCKS]:
            runs, table = held.runs.words, held.table.slots
            yield from self._pass(
                held.table.capacity,
                lambda first, last: kernels.sweep_blocks(first, last, runs, table),
            )
            kernels.free_dead_runs(runs)
        if self._counts[kernels.NUM_BLOCKS] or (self.num_dropped and len(self._members)):
            yield from self._sweep_engine_hashes()
        if self.num_dropped:
            yield from self._sweep_copies()
        yield True

    def _cut_holders(self) -> Iterator[bool]:
        held, at = self.block_store, 1
        while at < held.runs.capacity:
            held.sets.reserve(0, 1)
            last = min(at + self._budget, held.runs.capacity)
            end = kernels.cut_holders(at, last, self._holders, held.bundle, self._counts)
            self._budget -= int(end) - at
            at = int(end)
            if self._budget <= 0:
                yield False

    def _sweep_engine_hashes(self) -> Iterator[bool]:
        held = self.block_store
        yield from self._pass(
            len(self._slots) // 2 - 1,
            lambda first, last: kernels.sweep_engine_hashes(
                first, last, self._slots, self._members, held.bundle
            ),
        )
