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

Fitted is ridge regression towards what is believed beforehand, with weights that forget (after 700
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
from kvplug.index.prefix_query import TierCredits
from kvplug.setting import finite

F64 = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

_KEPT: Final = 0.9985
_KEPT_OF_RANK: Final = 0.98
# Ranks within a fifth of each other are taken for equals.
_EQUALS: Final = math.log(1.2)
_WEIGHT_OF_EQUALITY: Final = 5.0  # observations
_MAX_FACTOR: Final = 20.0
_DOUBT_FROM: Final = 2.5  # usual errors
_KILO, _MEGA = 1e3, 1e6
_MIN_TOKEN_MS: Final = 1e-4
# Where noise hides what a token costs, this share of the mean time to first token is laid to the
# tokens, of so many observations on: if recomputing seemed free, nothing would stay cached.
_LEAST_SHARE, _LEAST_OBSERVATIONS = 0.25, 8
# Of the time to compute a token: to load one from the host, from disk, from a pool.
_LOADING: Final = 1 - np.array(TierCredits())


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


@dataclass(slots=True)
class FitErrors:
    """How far off predictions of one kind have been, of late."""

    num_observations: int = 0
    mean_ms: float = 0.0
    mean_observed_ms: float = 0.0
    usual_ms: float = 0.0  # the mean, but outliers do not raise what counts as one

    @property
    def share(self) -> float:
        """Mean absolute error as a share of what was observed; NaN before the first observation."""
        return self.mean_ms / self.mean_observed_ms if self.mean_observed_ms > 0 else math.nan

    def weight(self, miss_ms: float, num_at_first: int) -> float:
        """How far an observation counts that was predicted so badly (Huber 1964)."""
        if self.num_observations < num_at_first or miss_ms <= 0:
            return 1.0
        return min(1.0, _DOUBT_FROM * self.usual_ms / miss_ms)

    def add(self, miss_ms: float, observed_ms: float, weight: float) -> None:
        """One more."""
        self.num_observations += 1
        share = max(1 - _KEPT, 1 / self.num_observations)
        self.mean_ms += share * (miss_ms - self.mean_ms)
        self.usual_ms += share * (weight * miss_ms - self.usual_ms)
        self.mean_observed_ms += share * (observed_ms - self.mean_observed_ms)


class RidgeFit:
    """add observations; `coefficients`, none below zero but those that may be."""

    def __init__(self, prior: F64, strength: F64, is_signed: BoolArray) -> None:
        """`strength`: how many observations with a 1 there each prior coefficient is worth."""
        self.coefficients = prior.copy()
        self._prior, self._strength, self._is_signed = prior, np.diag(strength), is_signed
        self._moments = np.zeros((len(prior), len(prior)))
        self._products = np.zeros(len(prior))

    def predict(self, features: F64) -> float:
        """What the coefficients say of it."""
        return float(features @ self.coefficients)

    def add(self, features: F64, value: float, errors: FitErrors) -> float:
        """One more observation; returns how far it counts, 0 to 1."""
        miss = abs(value - self.predict(features))
        weight = errors.weight(miss, num_at_first=int(np.count_nonzero(features)))
        errors.add(miss, value, weight)
        self._moments = _KEPT * self._moments + weight * np.outer(features, features)
        self._products = _KEPT * self._products + weight * value * features
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


class Decoding(NamedTuple):
    """What an engine did from one token of an answer to the next: requests in flight, tokens of
    their prompts, prompt tokens computed in between.
    """

    num_running: float
    context_tokens: float
    prefilled_tokens: float


# Coefficients: of a first token, then of the time between tokens.
_FIXED, _TOKEN, _ATTENTION, _BUSY, _HOST, _DISK, _POOL, _STEP, _SEQUENCE, _CONTEXT = range(10)
_STRENGTH: Final = np.array([1.0, 0.01, 0.04, 0.25, 0.04, 0.04, 0.04, 0.25, 4.0, 4.0])
_IS_SIGNED: Final = np.isin(np.arange(10), (_HOST, _DISK, _POOL))


class FleetFit:
    """The model of engines that serve one model, as far as their answers tell.

    observe_first_token, observe_answer; observe_whole where only the end of an answer was seen;
    rows of ranks. `first_tokens`, `answers`, `wholes`: how far off predictions are.
    """

    def __init__(self, prior: EngineModel) -> None:
        start = np.zeros(10)
        start[[_FIXED, _BUSY, _STEP, _SEQUENCE]] = (
            prior.fixed_ms, prior.busy_ms, prior.step_ms, prior.sequence_ms,
        )  # fmt: skip
        start[[_TOKEN, _CONTEXT]] = _KILO * prior.token_ms, _KILO * prior.context_ms
        start[_ATTENTION] = _MEGA * prior.attention_ms
        self.first_tokens, self.answers, self.wholes = FitErrors(), FitErrors(), FitErrors()
        self._fit = RidgeFit(start, _STRENGTH, _IS_SIGNED)
        self._sums: F64 = np.zeros(2)  # of first tokens: milliseconds, tokens computed for them
        self._of_prefill: defaultdict[int, _Factor] = defaultdict(_Factor)
        self._of_decode: defaultdict[int, _Factor] = defaultdict(_Factor)

    def observe_first_token(self, number: int, ms: float, work: Work) -> None:
        """A first token of rank `number` came after so long."""
        prefill, decode = self.factors(number)
        computing, waiting = _prefill_features(work), _waiting_features(work, decode)
        weight = self._fit.add(prefill * computing + waiting, ms, self.first_tokens)
        left_ms = max(0.0, ms - self._fit.predict(waiting))
        self._of_prefill[number].add(left_ms, self._fit.predict(computing), weight)
        self._sums = _KEPT * self._sums + weight * np.array((ms, computing[_TOKEN] * _KILO))

    def observe_answer(self, number: int, ms_between_tokens: float, decoding: Decoding) -> None:
        """An answer of rank `number` had its tokens so far apart."""
        prefill, decode = self.factors(number)
        steps, between = _decode_features(decoding), _between_features(decoding, prefill)
        weight = self._fit.add(decode * steps + between, ms_between_tokens, self.answers)
        left_ms = max(0.0, ms_between_tokens - self._fit.predict(between))
        self._of_decode[number].add(left_ms, self._fit.predict(steps), weight)

    def observe_whole(
        self, number: int, ms: float, work: Work, num_steps: int, decoding: Decoding
    ) -> None:
        """An answer of rank `number`, so many tokens after its first one, took so long."""
        prefill, decode = self.factors(number)
        computing, steps = _prefill_features(work), num_steps * _decode_features(decoding)
        rest = _waiting_features(work, decode)
        rest += num_steps * _between_features(decoding, prefill)
        weight = self._fit.add(prefill * computing + decode * steps + rest, ms, self.wholes)
        prefill_ms, steps_ms = self._fit.predict(computing), self._fit.predict(steps)
        predicted_ms = max(1e-9, prefill * prefill_ms + decode * steps_ms)
        longer = max(0.0, ms - self._fit.predict(rest)) / predicted_ms
        self._of_prefill[number].add(longer * prefill * prefill_ms, prefill_ms, weight)
        self._of_decode[number].add(longer * decode * steps_ms, steps_ms, weight)

    def factors(self, number: int) -> tuple[float, float]:
        """How many times as long as others the rank takes to prefill, and to decode."""
        return self._of_prefill[number].value, self._of_decode[number].value

    def forget(self, number: int) -> None:
        """The rank is gone."""
        self._of_prefill.pop(number, None)
        self._of_decode.pop(number, None)

    @property
    def _least_token_ms(self) -> float:
        total_ms, num_tokens = self._sums.tolist()
        is_known = self.first_tokens.num_observations >= _LEAST_OBSERVATIONS and num_tokens > 0
        return _LEAST_SHARE * total_ms / num_tokens if is_known else 0.0

    def rows(self, prefill: F64, decode: F64) -> F64:
        """float64[n, 10]: EngineModel.row of ranks with these factors."""
        known = self._fit.coefficients
        token_ms = max(_MIN_TOKEN_MS, known[_TOKEN] / _KILO, self._least_token_ms)
        loading_ms = np.maximum(0.0, token_ms * _LOADING + known[[_HOST, _DISK, _POOL]] / _KILO)
        of_prefill = np.array([token_ms, known[_ATTENTION] / _MEGA, *loading_ms])
        of_decode = known[[_BUSY, _STEP, _SEQUENCE, _CONTEXT]] / np.array([1.0, 1.0, 1.0, _KILO])
        fixed = np.full(len(prefill), known[_FIXED])
        return np.column_stack([fixed, np.outer(prefill, of_prefill), np.outer(decode, of_decode)])


def _prefill_features(work: Work) -> F64:
    """That take as long as the rank takes to prefill."""
    loaded = np.array(work.loaded_tokens) / _KILO
    features = np.zeros(len(_STRENGTH))
    features[_TOKEN] = (work.new_tokens + work.ahead_tokens) / _KILO + loaded @ _LOADING
    pairs = work.new_tokens * (work.cached_tokens + 0.5 * work.new_tokens)
    features[_ATTENTION] = pairs / _MEGA
    features[[_HOST, _DISK, _POOL]] = loaded
    return features


def _waiting_features(work: Work, decode: float) -> F64:
    features = np.zeros(len(_STRENGTH))
    features[_FIXED], features[_BUSY] = 1.0, decode * work.is_busy
    return features


def _decode_features(decoding: Decoding) -> F64:
    """That take as long as the rank takes to decode."""
    features = np.zeros(len(_STRENGTH))
    features[_STEP], features[_SEQUENCE] = 1.0, decoding.num_running
    features[_CONTEXT] = decoding.context_tokens / _KILO
    return features


def _between_features(decoding: Decoding, prefill: float) -> F64:
    features = np.zeros(len(_STRENGTH))
    features[_TOKEN] = prefill * decoding.prefilled_tokens / _KILO
    return features
