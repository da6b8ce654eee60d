"""How fast engines are: a small linear model, fitted to what is observed or given.

In:  times to first token and between tokens, with what the engine had to do for them.
Out: coefficients in milliseconds for each rank, and how good they are.

    time to first token = fixed + token * new tokens + attention * (new tokens x tokens before them)
                          + busy, if requests are decoding
    time between tokens = step + sequence * requests in flight
                          + token * prompt tokens that were computed in between

`new tokens` are those of the request and of the requests before it; attention is quadratic: each
new token looks at all before it. The engines of a fleet are mostly equal, and two that are taken
for unequal by chance draw traffic from each other; so one model is fitted for all, and each rank
has a factor for prefill and one for decode, which are 1 until they are clearly another.

Fitted is ridge regression towards what is believed beforehand, with weights that forget (after 300
observations, two thirds) and that doubt outliers (Huber 1964). A coefficient below zero would make
work cheap: it is zero, and the others are fitted without it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, fields
from typing import Final

import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError
from kvplug.setting import finite

F64 = npt.NDArray[np.float64]

_KEPT: Final = 0.997
_KEPT_OF_RANK: Final = 0.98
# Ranks within a fifth of each other are taken for equals.
_EQUALS: Final = math.log(1.2)
_WEIGHT_OF_EQUALITY: Final = 5.0  # observations
_MAX_FACTOR: Final = 20.0
_DOUBT_FROM: Final = 2.5  # mean absolute errors
_KILO, _MEGA = 1e3, 1e6
_MIN_TOKEN_MS: Final = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """Milliseconds: per request, per new token, per pair of a new token and one before it, per
    request while others decode; per decoding step, and per sequence in it.

    The defaults are what is believed of an engine before it has answered anything: rather slow, as
    an engine that is taken for too fast is overrun (docs/decisions.md).
    """

    fixed_ms: float = 2.0
    token_ms: float = 0.2
    attention_ms: float = 0.0
    busy_ms: float = 10.0
    step_ms: float = 10.0
    sequence_ms: float = 0.1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not finite(value) >= 0:
                raise ConfigError(
                    f"{field.name} must be a finite number of at least 0, got {value!r}"
                )

    @property
    def row(self) -> F64:
        """float64[6], in the order of the fields (kernels/costing.py)."""
        return np.array([getattr(self, field.name) for field in fields(self)])

    @classmethod
    def from_row(cls, row: F64) -> EngineModel:
        """The model with these numbers."""
        names = [field.name for field in fields(cls)]
        return cls(**dict(zip(names, row.tolist(), strict=True)))


class RidgeFit:
    """add observations; `coefficients`, none below zero, and `error`."""

    def __init__(self, prior: F64, strength: F64) -> None:
        """`strength`: how many observations with a 1 there each prior coefficient is worth."""
        self.num_observations = 0
        self.coefficients = prior.copy()
        self._prior, self._strength = prior, np.diag(strength)
        self._moments = np.zeros((len(prior), len(prior)))
        self._products = np.zeros(len(prior))
        self._mean_error = self._mean_value = 0.0

    @property
    def error(self) -> float:
        """Mean absolute error of the predictions of late, as a share of what was observed; NaN
        before the first observation.
        """
        return self._mean_error / self._mean_value if self._mean_value > 0 else float("nan")

    def predict(self, features: F64) -> float:
        """What the coefficients say of it."""
        return float(features @ self.coefficients)

    def add(self, features: F64, value: float) -> None:
        """One more observation."""
        miss = abs(value - self.predict(features))
        weight = 1.0
        if self.num_observations >= len(features) and miss > 0:
            weight = min(1.0, _DOUBT_FROM * self._mean_error / miss)
        self._moments = _KEPT * self._moments + weight * np.outer(features, features)
        self._products = _KEPT * self._products + weight * value * features
        self.num_observations += 1
        share = max(1 - _KEPT, 1 / self.num_observations)
        self._mean_error += share * (miss - self._mean_error)
        self._mean_value += share * (value - self._mean_value)
        self._solve()

    def _solve(self) -> None:
        used = np.arange(len(self._prior))
        while True:
            chosen = np.ix_(used, used)
            strength = self._strength[chosen]
            right = self._products[used] + strength @ self._prior[used]
            solved = np.linalg.solve(self._moments[chosen] + strength, right)
            if (solved >= 0).all():
                break
            used = used[solved >= 0]
        self.coefficients = np.zeros(len(self._prior))
        self.coefficients[used] = solved


@dataclass(slots=True)
class _Factor:
    """Observed and predicted milliseconds of one rank, by the model of the fleet."""

    observed_ms: float = 0.0
    predicted_ms: float = 0.0
    num_observations: float = 0.0

    def add(self, observed_ms: float, predicted_ms: float) -> None:
        """One more observation."""
        self.observed_ms = _KEPT_OF_RANK * self.observed_ms + observed_ms
        self.predicted_ms = _KEPT_OF_RANK * self.predicted_ms + predicted_ms
        self.num_observations = _KEPT_OF_RANK * self.num_observations + 1

    @property
    def value(self) -> float:
        """How many times as long as the fleet's model says."""
        if not self.num_observations or self.predicted_ms <= 0:
            return 1.0
        equal = _WEIGHT_OF_EQUALITY * self.predicted_ms / self.num_observations
        far = math.log((self.observed_ms + equal) / (self.predicted_ms + equal))
        beyond = max(0.0, abs(far) - _EQUALS)
        return min(_MAX_FACTOR, max(1 / _MAX_FACTOR, math.exp(math.copysign(beyond, far))))


class FleetFit:
    """The model of engines with one model and block size, as far as their answers tell.

    observe_first_token, observe_answer; row_of a rank.
    """

    def __init__(self, prior: EngineModel) -> None:
        fixed, token, attention, busy, step, sequence = prior.row.tolist()
        start = np.array([fixed, _KILO * token, _MEGA * attention, busy])
        self.first_token = RidgeFit(start, np.array([1.0, 0.01, 0.04, 0.25]))
        start = np.array([step, sequence, _KILO * token])
        self.between = RidgeFit(start, np.array([0.25, 4.0, 0.01]))
        self._of_prefill: defaultdict[int, _Factor] = defaultdict(_Factor)
        self._of_decode: defaultdict[int, _Factor] = defaultdict(_Factor)

    def observe_first_token(
        self,
        number: int,
        ms: float,
        *,
        new_tokens: float,
        cached_tokens: float,
        ahead_tokens: float,
        busy: bool,
    ) -> None:
        """A first token of rank `number` came after so long; `ahead_tokens` were to be computed
        before the request's own, `busy` says whether requests were decoding.
        """
        factor, decode = self._of_prefill[number], self._of_decode[number]
        pairs = new_tokens * (cached_tokens + 0.5 * new_tokens)
        work = np.array([0.0, (new_tokens + ahead_tokens) / _KILO, pairs / _MEGA, 0.0])
        rest = np.array([1.0, 0.0, 0.0, decode.value * busy])
        self.first_token.add(factor.value * work + rest, ms)
        left_ms = max(0.0, ms - self.first_token.predict(rest))
        factor.add(left_ms, self.first_token.predict(work))

    def observe_answer(
        self,
        number: int,
        ms_between_tokens: float,
        *,
        num_running: float,
        prefilled_tokens: float,
    ) -> None:
        """An answer of rank `number` had its tokens so far apart, with so many requests in flight
        and so many prompt tokens computed in between, per token.
        """
        factor, prefill = self._of_decode[number], self._of_prefill[number]
        steps = np.array([1.0, num_running, 0.0])
        work = np.array([0.0, 0.0, prefill.value * prefilled_tokens / _KILO])
        self.between.add(factor.value * steps + work, ms_between_tokens)
        left_ms = max(0.0, ms_between_tokens - self.between.predict(work))
        factor.add(left_ms, self.between.predict(steps))

    def factors(self, number: int) -> tuple[float, float]:
        """How many times as long as others the rank takes to prefill, and to decode."""
        return self._of_prefill[number].value, self._of_decode[number].value

    def forget(self, number: int) -> None:
        """The rank is gone."""
        self._of_prefill.pop(number, None)
        self._of_decode.pop(number, None)

    def row_of(self, number: int) -> F64:
        """float64[6]: EngineModel.row of a rank by all that was observed."""
        fixed, token, attention, busy = self.first_token.coefficients.tolist()
        step, sequence, _ = self.between.coefficients.tolist()
        prefill, decode = self.factors(number)
        token_ms = max(_MIN_TOKEN_MS, token / _KILO)
        return np.array(
            [
                fixed,
                prefill * token_ms,
                prefill * attention / _MEGA,
                decode * busy,
                decode * step,
                decode * sequence,
            ]
        )
