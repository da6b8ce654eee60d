"""One rank out of the candidates, for each router mode.

In:  candidate rank numbers; costs, or requests in flight, or a session.   Out: one of them.

In `kv` mode, where all candidates are in one index, kernels/routing.py picks, in the same ways as
`pick_cheapest` and `pick_softmax`; what is here picks among several indexes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvplug.events import Rank
from kvplug.kernels.scoring import LAST_RESORT

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]

_LEAST_TEMPERATURE = 1e-9  # where the best candidate is all but certain
_27, _30, _31 = (np.uint64(n) for n in (27, 30, 31))
# splitmix64 (Steele, Lea, Flood 2014)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


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
    weights = np.exp(-scaled / max(temperature, _LEAST_TEMPERATURE))
    return int(random_.choices(candidates.tolist(), weights.tolist())[0])


def pick_random(candidates: I64, random_: random.Random) -> int:
    """Any of them."""
    return int(candidates[random_.randrange(len(candidates))])


def draw_two(candidates: I64, random_: random.Random) -> I64:
    """Two different candidates at random, all if there are no more (Mitzenmacher 2001)."""
    if len(candidates) <= 2:
        return candidates
    first = random_.randrange(len(candidates))
    second = random_.randrange(len(candidates) - 1)
    return candidates[[first, second + (second >= first)]]


class RoundRobin:
    """The candidates by turns; a rank that was away just misses its turns."""

    def __init__(self) -> None:
        self._last = -1

    def pick(self, candidates: I64) -> int:
        """The candidate after the one picked last; their numbers rise."""
        following = int(np.searchsorted(candidates, self._last, side="right"))
        self._last = int(candidates[following if following < len(candidates) else 0])
        return self._last


class RendezvousHash:
    """The same rank for a session as long as it is a candidate; a rank that comes or goes moves
    only the sessions that go to it (highest random weight: Thaler, Ravishankar 1998).
    """

    def __init__(self) -> None:
        self._ranks: U64 = np.empty(0, dtype=np.uint64)

    def fleet_changed(self, ranks: Sequence[Rank | None]) -> None:
        """`ranks`, by number; None where there is none. A rank is told by its name."""
        names = ["" if rank is None else f"{rank.worker}#{rank.dp_rank}" for rank in ranks]
        self._ranks = np.array(
            [xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass")) for name in names],
            dtype=np.uint64,
        )

    def pick(self, candidates: I64, session: str) -> int:
        """The candidate whose weight for the session is highest."""
        seed = np.uint64(xxhash.xxh3_64_intdigest(session.encode("utf-8", "surrogatepass")))
        return int(candidates[np.argmax(_mixed(self._ranks[candidates] ^ seed))])


def _mixed(words: U64) -> U64:
    words = (words ^ (words >> _30)) * _MIX_1
    words = (words ^ (words >> _27)) * _MIX_2
    return words ^ (words >> _31)
