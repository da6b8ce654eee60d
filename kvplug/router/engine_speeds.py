"""How fast each rank is taken to be: as its operator says, else as its answers tell.

In:  models that are given; first tokens and ends of requests.
Out: the columns of the load that kernels/costing.py reads; how good the fits are.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.events import Rank
from kvplug.kernels import costing
from kvplug.router.engine_model import EngineModel, FleetFit, Work
from kvplug.router.fleet_index import FleetIndex, Section
from kvplug.router.load import ActiveLoad, ActiveRequest

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_LESSON_S = 0.01  # between two first tokens that a model is fitted to: that takes 100 us


class ModelQuality(NamedTuple):
    """How good the model of a rank's engine is; errors as shares of what was observed, NaN if
    nothing was.

    prefill_factor, decode_factor: how many times as long as the fleet's engines the rank takes.
    """

    is_given: bool
    num_first_tokens: int
    first_token_error: float
    num_answers: int
    answer_error: float
    prefill_factor: float
    decode_factor: float


class EngineSpeeds:
    """give; learn_first_token, learn_answer; model_of, quality_of."""

    def __init__(self, fleet_index: FleetIndex, load: ActiveLoad) -> None:
        self._fleet_index, self._load = fleet_index, load
        self._fits: defaultdict[Section, FleetFit] = defaultdict(lambda: FleetFit(EngineModel()))
        self._given: dict[int, EngineModel] = {}
        self._factors: F64 = np.ones((2, 0))
        self._taught_s = -np.inf

    def give(self, number: int, model: EngineModel) -> None:
        """The rank is so fast; nothing is learnt of it from now on."""
        self._given[number] = model
        self._rows[:, number] = model.row

    def forget(self, number: int) -> None:
        """The rank is gone."""
        for fit in self._fits.values():
            fit.forget(number)
        self._given.pop(number, None)

    def fleet_changed(self) -> None:
        """Ranks came or went, or are in another index now."""
        sections = self._fleet_index.sections
        for gone in [section for section in self._fits if section not in sections]:
            del self._fits[gone]
        self._factors = np.ones((2, len(self._fleet_index.numbers.ranks)))
        for section in sections:
            for number in section.numbers.tolist():
                self._factors[:, number] = self._fits[section].factors(number)
            self._put(section)

    def learn_first_token(self, request: ActiveRequest, now_s: float) -> None:
        """The first token of a request is there."""
        number = request.rank_number
        if number in self._given or now_s < self._taught_s + _LESSON_S:
            return
        self._taught_s, section = now_s, self._section_of(number)
        self._fits[section].observe_first_token(
            number,
            1e3 * (now_s - request.routed_s),
            Work(
                request.new_tokens,
                request.cached_tokens,
                request.ahead_tokens,
                (request.host_tokens, request.disk_tokens, request.pool_tokens),
                request.is_busy > 0,
            ),
        )
        self._factors[:, number] = self._fits[section].factors(number)
        self._put(section)

    def learn_answer(self, request: ActiveRequest, now_s: float, num_tokens: int) -> None:
        """A request is over, with so many tokens; it no longer counts as its rank's load."""
        number, num_steps = request.rank_number, num_tokens - 1
        if number in self._given or request.first_token_s is None or num_steps < 1:
            return
        columns = self._load.columns[:, number]
        own_tokens = request.new_tokens + request.cached_tokens
        self._fits[self._section_of(number)].observe_answer(
            number,
            1e3 * (now_s - request.first_token_s) / num_steps,
            num_running=float(columns[costing.NUM_RUNNING]) + 1,
            context_tokens=float(columns[costing.CONTEXT_TOKENS]) + own_tokens,
            prefilled_tokens=self._load.prefilled_since(request) / num_steps,
        )

    def model_of(self, number: int) -> EngineModel:
        """How fast the rank is taken to be."""
        return EngineModel.from_row(self._rows[:, number])

    def quality_of(self, rank: Rank) -> ModelQuality:
        """How good that is."""
        number = self._fleet_index.numbers.number_of(rank)
        fit = self._fits[self._fleet_index.section_of(rank)]
        return ModelQuality(
            number in self._given,
            fit.first_token.num_observations,
            fit.first_token.error,
            fit.between.num_observations,
            fit.between.error,
            *fit.factors(number),
        )

    @property
    def _rows(self) -> F64:
        """float64[10, ranks]: EngineModel.row of each."""
        return self._load.columns[costing.FIXED_MS : costing.CONTEXT_MS + 1]

    def _section_of(self, number: int) -> Section:
        return self._fleet_index.section_of(self._fleet_index.numbers.rank(number))

    def _put(self, section: Section) -> None:
        """Of all ranks of the section, as one's answers tell of the others, too."""
        numbers = section.numbers
        self._rows[:, numbers] = self._fits[section].rows(*self._factors[:, numbers])
        for number, model in self._given.items():
            self._rows[:, number] = model.row
