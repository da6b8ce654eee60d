"""What happens to each message of an event stream, by seed.

In:  odds and a seed.   Out: per message a fault and its size, the same in every run.
"""

from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import NamedTuple


class Fault(StrEnum):
    PASS = "passed"
    DROP = "dropped"
    DUPLICATE = "duplicated"
    HOLD = "held back"
    DELAY = "delayed"


class Verdict(NamedTuple):
    """`size` is the number of later messages that overtake it, or the delay in seconds."""

    fault: Fault
    size: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Odds:
    """Per message, the probability that the fault begins with it.

    A drop takes 1 to max_burst messages in a row; what is held back, and the second copy of a
    duplicate, comes after up to max_overtaken later messages; a delay holds the whole stream up.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    hold: float = 0.0
    delay: float = 0.0
    max_burst: int = 1
    max_overtaken: int = 5
    max_delay_s: float = 0.1


class FaultPlan:
    """Ask `next` once per message."""

    def __init__(self, odds, seed):
        self._odds, self._random = odds, Random(seed)
        self._num_to_drop = 0

    def next(self):
        if self._num_to_drop:
            self._num_to_drop -= 1
            return Verdict(Fault.DROP)
        return self._draw()

    def _draw(self):
        odds, draw = self._odds, self._random.random()
        for fault in (Fault.DROP, Fault.DUPLICATE, Fault.HOLD, Fault.DELAY):
            draw -= getattr(odds, fault.name.lower())
            if draw < 0:
                return self._begin(fault)
        return Verdict(Fault.PASS)

    def _begin(self, fault):
        odds = self._odds
        if fault is Fault.DROP:
            self._num_to_drop = self._random.randint(1, odds.max_burst) - 1
            return Verdict(fault)
        if fault is Fault.DELAY:
            return Verdict(fault, self._random.uniform(0, odds.max_delay_s))
        fewest = 0 if fault is Fault.DUPLICATE else 1  # a copy may follow at once
        return Verdict(fault, self._random.randint(fewest, odds.max_overtaken))


NO_FAULTS = FaultPlan(Odds(), seed=0)
