"""Who may take a request: the numbers of ranks, remembered by what narrows the choice.

In:  a model, names of workers.   Out: rank numbers.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from kvplug.router.fleet_index import FleetIndex

I64 = npt.NDArray[np.int64]

_MAX_REMEMBERED = 256


class Candidates:
    """of; `clear` when the fleet has changed."""

    def __init__(self, fleet_index: FleetIndex) -> None:
        self._fleet_index = fleet_index
        self._known: dict[tuple[str, frozenset[str] | None], I64] = {}

    def clear(self) -> None:
        """Somebody came or went, or has another model."""
        self._known.clear()

    def of(self, model: str, workers: Collection[str] | None) -> I64:
        """int64[n]: ranks of these workers that have the model; "" and None leave the choice."""
        asked = model, None if workers is None else frozenset(workers)
        numbers = self._known.get(asked)
        if numbers is None:
            if len(self._known) >= _MAX_REMEMBERED:
                self._known.clear()
            numbers = self._known[asked] = self._find(model, asked[1])
        return numbers

    def _find(self, model: str, workers: frozenset[str] | None) -> I64:
        allowed: Collection[str] | None = workers
        if model:
            allowed = self._fleet_index.workers_with(model, workers)
        ranks = enumerate(self._fleet_index.numbers.ranks)
        numbers = [
            number
            for number, rank in ranks
            if rank is not None and (allowed is None or rank.worker in allowed)
        ]
        return np.array(numbers, dtype=np.int64)
