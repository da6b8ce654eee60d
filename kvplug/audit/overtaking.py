"""Two requests with one prefix that reached their engine in the other order.

In:  answers with more cached tokens than expected.   Out: whether one of them explains a shortfall.

The router sends A, which will compute a prefix, and right behind it B, which counts on that. On
two connections B may arrive first: then B computes the prefix and A finds it. The rank computes it
once, as foreseen. A's surplus is the evidence, and excuses one shortfall.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple

from kvplug.audit.expectation import Expectation
from kvplug.events import Rank

_MAX_SURPLUSES = 4096


class _Surplus(NamedTuple):
    decided_s: float
    answered_s: float
    reported: int
    limit: int


class Surpluses:
    """note each answer, take the one that explains a shortfall; forget ranks that are gone."""

    def __init__(self) -> None:
        self._surpluses: OrderedDict[tuple[Rank, int], _Surplus] = OrderedDict()

    def note(self, expectation: Expectation, cached_tokens: int, now_s: float) -> None:
        """Keep an answer that had more than was expected."""
        if expectation.error(cached_tokens) >= 0:
            return
        reported = expectation.reported(cached_tokens)
        surplus = _Surplus(expectation.decided_s, now_s, reported, expectation.limit)
        self._surpluses[_key(expectation, expectation.predicted)] = surplus
        if len(self._surpluses) > _MAX_SURPLUSES:
            self._surpluses.popitem(last=False)

    def take(self, expectation: Expectation, cached_tokens: int) -> bool:
        """Whether a request that was in flight at the decision had found what was missing."""
        key = _key(expectation, expectation.reported(cached_tokens))
        surplus = self._surpluses.get(key)
        if surplus is None:
            return False
        was_in_flight = surplus.decided_s <= expectation.decided_s <= surplus.answered_s
        wanted = min(expectation.predicted, expectation.limit, surplus.limit)
        if not was_in_flight or surplus.reported < wanted:
            return False
        del self._surpluses[key]
        return True

    def forget(self, ranks: Collection[Rank]) -> None:
        """These ranks are gone."""
        for key in [key for key in self._surpluses if key[0] in ranks]:
            del self._surpluses[key]


def _key(expectation: Expectation, num_blocks: int) -> tuple[Rank, int]:
    """The block after so many blocks of the prompt, on its rank."""
    return expectation.rank, int(expectation.sequence_hashes[num_blocks])
