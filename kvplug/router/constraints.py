"""Who may take a request: the ranks that are left by each constraint in turn.

In:  the fleet, the load, what a request demands.   Out: numbers of ranks, and factors for those
that it prefers; NoWorkerError names the constraint that left nobody.

    model           workers that serve another model are out
    workers         only these
    worker          only this one, and only its rank `dp_rank`, if that is named
    required_taints only workers that have all of them
    busy            ranks beyond a threshold of the configuration are out for now
    moe_query       only ranks with a labelled block of the prompt, if the query wants no others

A preferred taint scales the cost of the workers that have it by exp(-tanh(sum of the weights)), as
in Dynamo 1.6.1: between 0.37 and 2.7, whatever the weights; a weight below zero avoids them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError, NoWorkerError
from kvplug.events import Rank
from kvplug.kernels.candidates import keep_idle
from kvplug.router.config import RouterConfig
from kvplug.router.fleet_index import FleetIndex
from kvplug.router.group_arrays import Adjustment
from kvplug.router.load import ActiveLoad
from kvplug.router.options import NO_OPTIONS, RequestOptions
from kvplug.setting import finite, shown

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

_MAX_REMEMBERED: Final = 256
_NONE_REQUIRED: Final[frozenset[str]] = frozenset()


def checked_names(names: Collection[str], what: str) -> frozenset[str]:
    """A set of names; ConfigError for anything else, a single name included."""
    is_collection = isinstance(names, Collection) and not isinstance(names, str)
    if not is_collection or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{what} must be a collection of names, got {shown(names)}")
    return frozenset(names)


class _Demand(NamedTuple):
    """What a request demands of ranks, whatever they are busy with."""

    model: str = ""
    workers: frozenset[str] | None = None
    worker: str = ""
    dp_rank: int | None = None
    required_taints: frozenset[str] = _NONE_REQUIRED


class Constraints:
    """candidates, preference; call `clear` when the fleet has changed. Not thread-safe.

    is_never_busy: whether no threshold is set, so that candidates depend on the fleet alone.
    """

    def __init__(self, config: RouterConfig, fleet_index: FleetIndex, load: ActiveLoad) -> None:
        self._fleet_index, self._load = fleet_index, load
        most = (config.active_prefill_tokens_threshold, config.active_decode_blocks_threshold)
        self._most_tokens, self._most_share = (np.inf if each is None else each for each in most)
        self.is_never_busy = most == (None, None)
        self._all: I64 | None = None  # of a request that demands nothing: most do
        self._candidates: dict[tuple[object, ...], I64] = {}
        self._preferences: dict[tuple[object, ...], Adjustment] = {}

    def clear(self) -> None:
        """Somebody came or went, or has another model or other taints."""
        self._all = None
        self._candidates.clear()
        self._preferences.clear()

    def candidates(self, options: RequestOptions) -> I64:
        """int64[n], n > 0: the ranks that may take a request; NoWorkerError if there are none."""
        numbers = self._all if options is NO_OPTIONS else self._known(options)
        if numbers is None:
            demand = _demand_of(options)
            numbers = self._find(demand)
            self._remember(demand, numbers)
            if options is NO_OPTIONS:
                self._all = numbers
        return numbers if self.is_never_busy else self._without_busy(numbers)

    def _known(self, options: RequestOptions) -> I64 | None:
        """What an equal demand came to before."""
        required = options.required_taints or _NONE_REQUIRED
        said = (options.model, options.workers, options.worker, options.dp_rank, required)
        try:
            numbers = self._candidates.get(said)
        except TypeError:  # a list or a set
            return self._candidates.get(_demand_of(options))
        if numbers is None:
            numbers = self._candidates.get(_demand_of(options))
            if numbers is not None:
                self._remember(said, numbers)
        return numbers

    def _remember(self, said: tuple[object, ...], numbers: I64) -> None:
        if len(self._candidates) >= _MAX_REMEMBERED:
            self._candidates.clear()
        self._candidates[said] = numbers

    def preference(self, taints: Mapping[str, float] | None) -> Adjustment | None:
        """Factors of the cost by preferred taints; None if a request prefers nobody.

        Equal taints have the same object, as long as the fleet does not change.
        """
        if not taints:
            return None
        key = _key_of(taints)
        preference = self._preferences.get(key)
        if preference is None:
            weights = _checked_weights(taints)
            if len(self._preferences) >= _MAX_REMEMBERED:
                self._preferences.clear()
            preference = Adjustment(factors=self._find_factors(weights))
            self._preferences[key] = preference
        return preference

    def require_left(self, numbers: I64, constraint: str, demanded: str) -> I64:
        """The numbers, if there are any; else NoWorkerError."""
        if not len(numbers):
            known = ", ".join(str(rank) for rank in self._ranks.values()) or "none"
            raise NoWorkerError(
                f"no worker can take the request: {demanded}; known workers: {known}",
                constraint=constraint,
            )
        return numbers

    @property
    def _ranks(self) -> dict[int, Rank]:
        ranks = enumerate(self._fleet_index.numbers.ranks)
        return {number: rank for number, rank in ranks if rank is not None}

    def _find(self, demand: _Demand) -> I64:
        left = self._left(self._ranks, lambda _: True, "workers", "the fleet has none")
        if demand.model:
            serving = self._fleet_index.workers_with(demand.model, None)
            text = f"expected one that serves model {demand.model!r}"
            left = self._left(left, lambda rank: rank.worker in serving, "model", text)
        if (workers := demand.workers) is not None:
            text = f"expected one of workers {shown(sorted(workers))}"
            left = self._left(left, lambda rank: rank.worker in workers, "workers", text)
        if demand.worker:
            text = f"expected worker {demand.worker!r}"
            left = self._left(left, lambda rank: rank.worker == demand.worker, "worker", text)
        if demand.dp_rank is not None:
            text = f"expected data-parallel rank {demand.dp_rank}"
            left = self._left(left, lambda rank: rank.dp_rank == demand.dp_rank, "dp_rank", text)
        if taints := demand.required_taints:
            text = f"expected one with the taints {shown(sorted(taints))}"
            left = self._left(
                left,
                lambda rank: taints <= self._fleet_index.taints_of(rank.worker),
                "required_taints",
                text,
            )
        return np.array(list(left), dtype=np.int64)

    def _left(
        self, ranks: dict[int, Rank], may: Callable[[Rank], bool], constraint: str, text: str
    ) -> dict[int, Rank]:
        left = {number: rank for number, rank in ranks.items() if may(rank)}
        if not left and 0 < len(ranks) < len(self._ranks):  # others before it have left few
            text += f" among {', '.join(map(str, ranks.values()))}"
        self.require_left(np.array(list(left), dtype=np.int64), constraint, text)
        return left

    def _without_busy(self, numbers: I64) -> I64:
        ranks, idle = self._load.ranks.reshape(-1), np.empty_like(numbers)
        num_idle = keep_idle(numbers, ranks, self._most_tokens, self._most_share, idle)
        if num_idle == len(numbers):
            return numbers
        text = "expected one below the busy thresholds, all that could take it are beyond them"
        return self.require_left(idle[:num_idle], "busy", text)

    def _find_factors(self, weights: Mapping[str, float]) -> F64:
        factors = np.ones(len(self._fleet_index.numbers.ranks))
        for number, rank in self._ranks.items():
            taints = self._fleet_index.taints_of(rank.worker)
            total = sum(weight for taint, weight in weights.items() if taint in taints)
            factors[number] = np.exp(-np.tanh(total))
        return factors


def _demand_of(options: RequestOptions) -> _Demand:
    workers, required = options.workers, options.required_taints
    return _Demand(
        options.model,
        None if workers is None else checked_names(workers, "workers"),
        options.worker,
        options.dp_rank,
        checked_names(required, "required_taints") if required else _NONE_REQUIRED,
    )


def _key_of(weights: Mapping[str, float]) -> tuple[object, ...]:
    """What equal weights have in common; of what is no mapping of names, nothing is remembered."""
    try:
        key = tuple(weights.items())
        hash(key)
    except (AttributeError, TypeError):
        return ()
    return key


def _checked_weights(weights: object) -> dict[str, float]:
    if not isinstance(weights, Mapping) or not all(
        isinstance(taint, str) and np.isfinite(finite(weight)) for taint, weight in weights.items()
    ):
        expected = "a weight, a finite number, by name"
        raise ConfigError(f"preferred_taints must have {expected}, got {shown(weights)}")
    return {taint: float(weight) for taint, weight in weights.items()}
