"""How fast the workers of Heimdall's example were, by its row of random routing alone.

In:  a setting.   Out: the setting with the prefill rate that fits best, and how well it fits.

One number is fitted to three percentiles: the rate at which predicted and published ones differ by
no common factor (their geometric mean ratio is 1). What is left is how far the shape is off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tests.benchmarks.heimdall_run import Job, Setting, run

F64 = npt.NDArray[np.float64]

RANDOM_S: Final = np.array([4.464611, 9.292547, 17.961767])
PRECISE_S: Final = np.array([0.217383, 0.718785, 1.106871])
"""P50, P75, P90 of the time to first token, as published: random, prefix cache-aware routing."""

SEED: Final = 0
NUM_STEPS: Final = 6
LEAST_RATE, GREATEST_RATE = 4_000.0, 120_000.0
_CLOSE: Final = 0.02


@dataclass(frozen=True, slots=True)
class Fit:
    """`error`: by which factor, less one, a percentile is off on (logarithmic) average."""

    setting: Setting
    percentiles_s: F64
    error: float
    num_steps: int


def fit(setting: Setting, num_steps: int = NUM_STEPS) -> Fit:
    """Calibrate on the random row."""

    def predict(rate: float) -> F64:
        return run(Job(setting=setting.with_rate(rate), policy="random", seed=SEED)).percentiles_s()

    rate, percentiles_s, steps = solve(predict, num_steps)
    return Fit(setting.with_rate(rate), percentiles_s, error_of(percentiles_s), steps)


def error_of(percentiles_s: F64) -> float:
    """0.2: predictions are off by a fifth."""
    logs = np.log(percentiles_s / RANDOM_S)
    return float(np.exp(np.sqrt(np.mean(logs**2))) - 1)


def solve(predict: Callable[[float], F64], num_steps: int) -> tuple[float, F64, int]:
    """(rate, its percentiles, steps): bisection, where one can, by secants in logarithms.

    The best of the rates that were tried, if none is close.
    """
    low, high = np.log(LEAST_RATE), np.log(GREATEST_RATE)
    tried: list[tuple[float, float, F64]] = []  # log rate, mean log ratio, percentiles
    at = (low + high) / 2
    for _ in range(num_steps):
        percentiles_s = predict(float(np.exp(at)))
        tried.append((at, float(np.mean(np.log(percentiles_s / RANDOM_S))), percentiles_s))
        if abs(tried[-1][1]) < _CLOSE:
            break
        low, high = (at, high) if tried[-1][1] > 0 else (low, at)  # slower than published: faster
        at = _next(tried, low, high)
    best = min(tried, key=lambda each: abs(each[1]))
    return float(np.exp(best[0])), best[2], len(tried)


def _next(tried: list[tuple[float, float, F64]], low: float, high: float) -> float:
    """Between the nearest on both sides; in the middle while there is one side only."""
    above = [each for each in tried if each[1] > 0]
    below = [each for each in tried if each[1] <= 0]
    if not above or not below:
        return (low + high) / 2
    (x, y, _), (u, v, _) = max(above), min(below)
    secant = x + (u - x) * y / (y - v)
    margin = 0.1 * (high - low)
    return float(np.clip(secant, low + margin, high - margin))
