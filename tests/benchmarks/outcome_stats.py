"""kvplug's defaults against the best peer: ratios with their intervals.

In:  the runs of a case.   Out: for each metric how many times better kvplug is.

Each seed has a ratio; the row's is their geometric mean, with Student's 95 % interval. The best
peer is the one with the best mean over the seeds, metric by metric.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Final

from tests.benchmarks.outcome_routers import KVPLUG, ROUTERS
from tests.benchmarks.outcome_run import Run

UNITS: Final = {"rps": "requests/s", "ttft_mean": "ms", "ttft_p90": "ms", "cached": "share"}
HIGHER_IS_BETTER: Final = ("rps", "cached")
JUDGED: Final = ("rps", "ttft_mean", "ttft_p90")
"""What kvplug must not be worse in."""
TOLERANCE: Final = 0.97
# Student's t, 97.5 %, for 1, 2, ... degrees of freedom.
# fmt: off
_T: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)
# fmt: on
_T_OF_MANY: Final = 2.09
PEERS: Final = tuple(router.name for router in ROUTERS if router.is_peer)


@dataclass(frozen=True, slots=True)
class Comparison:
    """`ratio`: times better than the peer; `interval` is infinite with one seed."""

    metric: str
    kvplug: float
    peer: float
    peer_name: str
    ratio: float
    interval: tuple[float, float]

    @property
    def verdict(self) -> str:
        """`worse` if even the good end of the interval is more than 3 % below the peer."""
        low, high = self.interval
        if high < TOLERANCE:
            return "worse"
        if low > 1:
            return "better"
        return "even" if low >= TOLERANCE else "uncertain"

    def as_json(self) -> dict[str, Any]:
        """The entry in the file; an interval that is infinite is null."""
        interval = [round(end, 3) for end in self.interval] if _is_finite(self.interval) else None
        return {
            "kvplug": round(self.kvplug, 3),
            "peer": round(self.peer, 3),
            "peer_name": self.peer_name,
            "ratio": round(self.ratio, 3),
            "interval": interval,
            "unit": UNITS[self.metric],
        }


def compare(runs: Sequence[Run], metric: str) -> Comparison | None:
    """Over the seeds that all have; None without kvplug or without a peer that answered all."""
    values = {name: _by_seed(runs, name, metric) for name in (KVPLUG, *PEERS)}
    # A peer that left requests out did less work.
    values = {name: v for name, v in values.items() if v and not num_failed(runs, name)}
    seeds = sorted(set.intersection(*map(set, values.values()))) if values else []
    peers = [name for name in values if name != KVPLUG]
    if KVPLUG not in values or not peers or not seeds:
        return None
    sign = 1 if metric in HIGHER_IS_BETTER else -1
    means = {name: fmean(of_name[seed] for seed in seeds) for name, of_name in values.items()}
    best = max(peers, key=lambda name: sign * means[name])
    ratios = [_ratio(values[KVPLUG][seed], values[best][seed]) ** sign for seed in seeds]
    ratio, interval = geometric_interval(ratios)
    return Comparison(metric, means[KVPLUG], means[best], best, ratio, interval)


def num_failed(runs: Iterable[Run], router: str) -> int:
    """Requests without a whole answer."""
    return sum(run.failed for run in runs if run.router == router)


def geometric_interval(ratios: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The geometric mean, and its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    middle = fmean(logs)
    if len(logs) < 2:
        return math.exp(middle), (0.0, math.inf)
    freedom = len(logs) - 1
    t = _T[freedom - 1] if freedom <= len(_T) else _T_OF_MANY
    half = t * stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle), (math.exp(middle - half), math.exp(middle + half))


def _by_seed(runs: Iterable[Run], router: str, metric: str) -> dict[int, float]:
    return {run.seed: getattr(run, metric) for run in runs if run.router == router}


def _ratio(ours: float, theirs: float) -> float:
    # Without sharing nothing is cached on either side.
    return 1.0 if ours == theirs else max(ours, 1e-9) / max(theirs, 1e-9)


def _is_finite(interval: tuple[float, float]) -> bool:
    return all(map(math.isfinite, interval))
