"""How fast engines are: a small linear model, fitted to what is observed or given.

In:  times to first token and between tokens, with what the engine had to do for them.
Out: coefficients in milliseconds for each rank, and how good they are.

    time to first token = fixed + token * new tokens + attention * (new tokens x tokens before them)
                          + host, disk, pool * tokens loaded from there
                          + busy, if requests are decoding
    time between tokens = step + sequence * requests in flight + context * tokens of their prompts
                          + token * prompt tokens that were computed in between

`new tokens` are those of the request and of the requests before it; attention is quadratic: each
new token looks at all before it. The engines of a fleet are mostly equal, and two that are taken
for unequal by chance draw traffic from each other; so one model is fitted for all, and each rank
has a factor for prefill and one for decode, which are 1 until they are clearly another.

Fitted is ridge regression towards what is believed beforehand, with weights that forget (after 300
observations, two thirds) and that doubt outliers (Huber 1964). A coefficient below zero would make
work cheap: it is zero, and the others are fitted without it. To load a token from a lower tier is
believed to take a share of what it takes to compute one, and fitted is the difference from that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError
from kvplug.events import Tier
from kvplug.index.block_index import TIER_CREDIT
from kvplug.setting import finite

F64 = npt.NDArray[np.float64]

_KEPT: Final = 0.997
_KEPT_OF_RANK: Final = 0.98
# Ranks within a fifth of each other are taken for equals.
_EQUALS: Final = math.log(1.2)
_WEIGHT_OF_EQUALITY: Final = 5.0  # observations
_MAX_FACTOR: Final = 20.0
_DOUBT_FROM: Final = 2.5  # usual errors
_KILO, _MEGA = 1e3, 1e6
_MIN_TOKEN_MS: Final = 1e-4
# Of the time to compute a token: to load one from the host, from disk, from a pool.
_LOADING: Final = np.array([1 - TIER_CREDIT[Tier.HOST], 1 - TIER_CREDIT[Tier.DISK], 0.1])


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """Milliseconds: per request, per new token, per pair of a new token and one before it, per
    token loaded from each lower tier, per request while others decode; per decoding step, per
    sequence in it and per token of their prompts.

    The defaults are what is believed of an engine before it has answered anything: rather slow, as
    an engine that is taken for too fast is overrun (docs/decisions.md).
    """

    fixed_ms: float = 2.0
    token_ms: float = 0.2
    attention_ms: float = 0.0
    host_ms: float = 0.05
    disk_ms: float = 0.15
    pool_ms: float = 0.02
    busy_ms: float = 10.0
    step_ms: float = 10.0
    sequence_ms: float = 0.1
    context_ms: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not finite(value) >= 0:
                raise ConfigError(
                    f"{field.name} must be a finite number of at least 0, got {value!r}"
                )

    @property
    def row(self) -> F64:
        """float64[10], in the order of the fields (kernels/costing.py)."""
        return np.array([getattr(self, field.name) for field in fields(self)])

    @classmethod
    def from_row(cls, row: F64) -> EngineModel:
        """The model with these numbers."""
        names = [field.name for field in fields(cls)]
        return cls(**dict(zip(names, row.tolist(), strict=True)))


class RidgeFit:
    """add observations; `coefficients`, none below zero but those that may be, and `error`."""

    def __init__(self, prior: F64, strength: F64, num_signed: int = 0) -> None:
        """`strength`: how many observations with a 1 there each prior coefficient is worth. The
        last `num_signed` coefficients may be below zero.
        """
        self.num_observations = 0
        self.coefficients = prior.copy()
        self._prior, self._strength = prior, np.diag(strength)
        self._is_signed = np.arange(len(prior)) >= len(prior) - num_signed
        self._moments = np.zeros((len(prior), len(prior)))
        self._products = np.zeros(len(prior))
        self._mean_error = self._mean_value = self._usual_error = 0.0

    @property
    def error(self) -> float:
        """Mean absolute error of the predictions of late, as a share of what was observed; NaN
        before the first observation.
        """
        return self._mean_error / self._mean_value if self._mean_value > 0 else float("nan")

    def predict(self, features: F64) -> float:
        """What the coefficients say of it."""
        return float(features @ self.coefficients)

    def add(self, features: F64, value: float) -> float:
        """One more observation; returns how far it counts, 0 to 1."""
        miss = abs(value - self.predict(features))
        weight = 1.0
        if self.num_observations >= len(features) and miss > 0:
            weight = min(1.0, _DOUBT_FROM * self._usual_error / miss)
        self._moments = _KEPT * self._moments + weight * np.outer(features, features)
        self._products = _KEPT * self._products + weight * value * features
        self.num_observations += 1
        share = max(1 - _KEPT, 1 / self.num_observations)
        self._mean_error += share * (miss - self._mean_error)
        # The same mean, but outliers do not raise what counts as one.
        self._usual_error += share * (weight * miss - self._usual_error)
        self._mean_value += share * (value - self._mean_value)
        self._solve()
        return weight

    def _solve(self) -> None:
        used = np.arange(len(self._prior))
        while True:
            chosen = np.ix_(used, used)
            strength = self._strength[chosen]
            right = self._products[used] + strength @ self._prior[used]
            solved = np.linalg.solve(self._moments[chosen] + strength, right)
            is_good = self._is_signed[used] | (solved >= 0)
            if is_good.all():
                break
            used = used[is_good]
        self.coefficients = np.zeros(len(self._prior))
        self.coefficients[used] = solved


@dataclass(slots=True)
class _Factor:
    """Observed and predicted milliseconds of one rank, by the model of the fleet."""

    observed_ms: float = 0.0
    predicted_ms: float = 0.0
    num_observations: float = 0.0

    def add(self, observed_ms: float, predicted_ms: float, weight: float) -> None:
        """One more observation."""
        self.observed_ms = _KEPT_OF_RANK * self.observed_ms + weight * observed_ms
        self.predicted_ms = _KEPT_OF_RANK * self.predicted_ms + weight * predicted_ms
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


class Work(NamedTuple):
    """What an engine did for a first token: new tokens of the request and those before them, tokens
    of the requests before it, tokens loaded from host, disk and pools, whether others decoded.
    """

    new_tokens: float
    cached_tokens: float
    ahead_tokens: float
    loaded_tokens: tuple[float, float, float]
    is_busy: bool


class FleetFit:
    """The model of engines that serve one model, as far as their answers tell.

    observe_first_token, observe_answer; rows_of ranks.
    """

    def __init__(self, prior: EngineModel) -> None:
        start = [
            prior.fixed_ms, _KILO * prior.token_ms, _MEGA * prior.attention_ms, prior.busy_ms,
            0.0, 0.0, 0.0,
        ]  # fmt: skip
        strength = np.array([1.0, 0.01, 0.04, 0.25, 0.04, 0.04, 0.04])
        self.first_token = RidgeFit(np.array(start), strength, num_signed=3)
        start = [prior.step_ms, prior.sequence_ms, _KILO * prior.context_ms, _KILO * prior.token_ms]
        self.between = RidgeFit(np.array(start), np.array([0.25, 4.0, 4.0, 0.01]))
        self._of_prefill: defaultdict[int, _Factor] = defaultdict(_Factor)
        self._of_decode: defaultdict[int, _Factor] = defaultdict(_Factor)

    def observe_first_token(self, number: int, ms: float, work: Work) -> None:
        """A first token of rank `number` came after so long."""
        factor, decode = self._of_prefill[number], self._of_decode[number]
        pairs = work.new_tokens * (work.cached_tokens + 0.5 * work.new_tokens)
        loaded = np.array(work.loaded_tokens) / _KILO
        tokens = (work.new_tokens + work.ahead_tokens) / _KILO + float(loaded @ _LOADING)
        prefill = np.array([0.0, tokens, pairs / _MEGA, 0.0, *loaded])
        rest = np.array([1.0, 0.0, 0.0, decode.value * work.is_busy, 0.0, 0.0, 0.0])
        weight = self.first_token.add(factor.value * prefill + rest, ms)
        left_ms = max(0.0, ms - self.first_token.predict(rest))
        factor.add(left_ms, self.first_token.predict(prefill), weight)

    def observe_answer(
        self,
        number: int,
        ms_between_tokens: float,
        *,
        num_running: float,
        context_tokens: float,
        prefilled_tokens: float,
    ) -> None:
        """An answer of rank `number` had its tokens so far apart, with so many requests in flight,
        so many prompt tokens in those, and so many computed in between, per token.
        """
        factor, prefill = self._of_decode[number], self._of_prefill[number]
        steps = np.array([1.0, num_running, context_tokens / _KILO, 0.0])
        work = np.array([0.0, 0.0, 0.0, prefill.value * prefilled_tokens / _KILO])
        weight = self.between.add(factor.value * steps + work, ms_between_tokens)
        left_ms = max(0.0, ms_between_tokens - self.between.predict(work))
        factor.add(left_ms, self.between.predict(steps), weight)

    def factors(self, number: int) -> tuple[float, float]:
        """How many times as long as others the rank takes to prefill, and to decode."""
        return self._of_prefill[number].value, self._of_decode[number].value

    def forget(self, number: int) -> None:
        """The rank is gone."""
        self._of_prefill.pop(number, None)
        self._of_decode.pop(number, None)

    def rows(self, prefill: F64, decode: F64) -> F64:
        """float64[10, n]: EngineModel.row of ranks with these factors."""
        fixed, token, attention, busy, *more = self.first_token.coefficients.tolist()
        step, sequence, context, _ = self.between.coefficients.tolist()
        token_ms = max(_MIN_TOKEN_MS, token / _KILO)
        host, disk, pool = np.maximum(0.0, token_ms * _LOADING + np.array(more) / _KILO).tolist()
        of_prefill = np.array([token_ms, attention / _MEGA, host, disk, pool])
        of_decode = np.array([busy, step, sequence, context / _KILO])
        return np.vstack(
            [
                np.full(len(prefill), fixed),
                np.outer(of_prefill, prefill),
                np.outer(of_decode, decode),
            ]
        )
