"""One rank out of the candidates: by lowest cost, by softmax, or by turns.

In:  candidate rank numbers, and what they cost.   Out: one of them.

In `kv` mode, where all candidates are in one index, kernels/routing.py picks, in the same ways;
what is here picks among several indexes.
"""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from kvplug.kernels.scoring import LAST_RESORT

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


def pick_cheapest(candidates: I64, costs: F64, random_: random.Random) -> int:
    """The candidate with the lowest cost; exact ties are broken at random."""
    best = candidates[costs == costs.min()]
    return int(best[0] if len(best) == 1 else random_.choice(best.tolist()))


def pick_softmax(candidates: I64, costs: F64, temperature: float, random_: random.Random) -> int:
    """A candidate with probability ~ exp(-cost / temperature), costs rescaled to [0, 1].

    Rescaled, a temperature means the same under any load: at 1 the best candidate is e times
    likelier than the worst. Equal costs give equal chances. A candidate that misses an objective
    has none while another does not.
    """
    meets = costs < costs.min() + 0.5 * LAST_RESORT
    candidates, costs = candidates[meets], costs[meets]
    span = costs.max() - costs.min()
    scaled = (costs - costs.min()) / span if span > 0 else np.zeros_like(costs)
    # Rescaled costs start at 0, so the best weight is 1: nothing overflows at low temperatures.
    weights = np.exp(-scaled / temperature)
    return int(random_.choices(candidates.tolist(), weights.tolist())[0])


class RoundRobin:
    """The candidates by turns; a rank that was away just misses its turns."""

    def __init__(self) -> None:
        self._last = -1

    def pick(self, candidates: I64) -> int:
        """The candidate after the one picked last, by rank number."""
        later = candidates[candidates > self._last]
        self._last = int(later.min() if len(later) else candidates.min())
        return self._last
