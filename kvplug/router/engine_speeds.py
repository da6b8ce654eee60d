"""How fast each rank is: as its operator says, else as measured from its answers.

In:  given models; first tokens and ends of requests.
Out: the columns of the load that kernels/costing.py reads, and how good the fits are.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.events import Rank
from kvplug.kernels import costing
from kvplug.router.engine_model import Decoding, EngineModel, FleetFit, Work
from kvplug.router.fleet_index import FleetIndex
from kvplug.router.index_group import IndexGroup
from kvplug.router.load import ActiveLoad, ActiveRequest

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_LOADING_COLUMNS: Final = (costing.HOST_MS, costing.DISK_MS, costing.POOL_MS)
# Between two fits, as one takes 100 us: while engines get known, and later, when one observation
# among hundreds changes little.
_MIN_PAUSE_S, _LATER_PAUSE_S, _NUM_UNTIL_KNOWN = 0.005, 0.02, 700


class ModelQuality(NamedTuple):
    """How good the model of a rank's engine is; errors as shares of what was observed, NaN if
    nothing was.

    num_wholes: answers of which only the end was seen; prefill_factor, decode_factor: how many
    times as long as the fleet's engines the rank takes.
    """

    is_given: bool
    num_first_tokens: int
    num_answers: int
    num_wholes: int
    first_token_error: float
    answer_error: float
    whole_error: float
    prefill_factor: float
    decode_factor: float


class EngineSpeeds:
    """give; learn_first_token, learn_answer; model_of, quality_of."""

    def __init__(
        self,
        fleet_index: FleetIndex,
        load: ActiveLoad,
        credits: tuple[float | None, float | None, float | None] = (None, None, None),
    ) -> None:
        """`credits`: of a token in host memory, on disk, in a pool, if somebody has set them: to
        load it takes the rest of the time to compute it, whatever is measured.
        """
        self._fleet_index, self._load, self._credits = fleet_index, load, credits
        self._fits: defaultdict[IndexGroup, FleetFit] = defaultdict(lambda: FleetFit(EngineModel()))
        self._given: dict[int, EngineModel] = {}
        self._factors: F64 = np.ones((2, 0))
        self._fitted_s, self._num_fits = -np.inf, 0

    def give(self, number: int, model: EngineModel) -> None:
        """The rank is so fast; nothing is learnt of it from now on."""
        self._given[number] = model
        self._rows[number] = model.row
        self._apply_credits()

    def forget(self, number: int) -> None:
        """The rank is gone."""
        for fit in self._fits.values():
            fit.forget(number)
        self._given.pop(number, None)

    def fleet_changed(self) -> None:
        """Ranks came or went, or are in another index now."""
        groups = self._fleet_index.groups
        self._num_fits = 0  # who is new gets known soon
        for gone in [group for group in self._fits if group not in groups]:
            del self._fits[gone]
        self._factors = np.ones((2, len(self._fleet_index.numbers.ranks)))
        for group in groups:
            for number in group.numbers.tolist():
                self._factors[:, number] = self._fits[group].factors(number)
            self._put(group)

    def learn_first_token(self, request: ActiveRequest, now_s: float) -> None:
        """The first token of a request is there."""
        number = request.rank_number
        if not request.is_timed or not self._may_learn(number, now_s):
            return
        fit, ms = self._fits[self._group_of(number)], 1e3 * (now_s - request.routed_s)
        fit.observe_first_token(number, ms, _work_of(request))
        self._put_learned(number, fit)

    def learn_answer(self, request: ActiveRequest, now_s: float, num_tokens: int) -> None:
        """A request is over, with so many tokens; it no longer counts as its rank's load."""
        number = request.rank_number
        if not request.is_timed or num_tokens < 1 or not self._may_learn(number, now_s):
            return
        fit, num_steps = self._fits[self._group_of(number)], num_tokens - 1
        decoding = self._decoding_of(request, max(1, num_steps))
        if request.first_token_s is None:
            ms = 1e3 * (now_s - request.routed_s)
            fit.observe_whole(number, ms, _work_of(request), num_steps, decoding)
        elif num_steps:
            ms = 1e3 * (now_s - request.first_token_s) / num_steps
            fit.observe_answer(number, ms, decoding)
        self._put_learned(number, fit)

    def model_of(self, number: int) -> EngineModel:
        """How fast the rank is taken to be."""
        return EngineModel.from_row(self._rows[number])

    def quality_of(self, rank: Rank) -> ModelQuality:
        """How good that is."""
        number = self._fleet_index.numbers.number_of(rank)
        fit = self._fits[self._fleet_index.group_of(rank)]
        prefill_factor, decode_factor = fit.factors(number)
        return ModelQuality(
            is_given=number in self._given,
            num_first_tokens=fit.first_tokens.num_observations,
            num_answers=fit.answers.num_observations,
            num_wholes=fit.wholes.num_observations,
            first_token_error=fit.first_tokens.share,
            answer_error=fit.answers.share,
            whole_error=fit.wholes.share,
            prefill_factor=prefill_factor,
            decode_factor=decode_factor,
        )

    @property
    def _rows(self) -> F64:
        """float64[ranks, 10]: EngineModel.row of each."""
        return self._load.ranks[:, costing.FIXED_MS : costing.CONTEXT_MS + 1]

    def _may_learn(self, number: int, now_s: float) -> bool:
        pause_s = _MIN_PAUSE_S if self._num_fits < _NUM_UNTIL_KNOWN else _LATER_PAUSE_S
        if number in self._given or now_s < self._fitted_s + pause_s:
            return False
        self._fitted_s = now_s
        self._num_fits += 1
        return True

    def _decoding_of(self, request: ActiveRequest, num_steps: int) -> Decoding:
        columns = self._load.ranks[request.rank_number]
        own_tokens = request.new_tokens + request.cached_tokens
        return Decoding(
            num_running=float(columns[costing.NUM_RUNNING]) + 1,
            context_tokens=float(columns[costing.CONTEXT_TOKENS]) + own_tokens,
            prefilled_tokens=self._load.prefilled_since(request) / num_steps,
        )

    def _put_learned(self, number: int, fit: FleetFit) -> None:
        self._factors[:, number] = fit.factors(number)
        self._put(self._group_of(number))

    def _group_of(self, number: int) -> IndexGroup:
        return self._fleet_index.group_of(self._fleet_index.numbers.rank(number))

    def _put(self, group: IndexGroup) -> None:
        """For all ranks of the group: answers of one rank tell about the others, too."""
        numbers = group.numbers
        self._rows[numbers] = self._fits[group].rows(*self._factors[:, numbers])
        for number, model in self._given.items():
            self._rows[number] = model.row
        self._apply_credits()

    def _apply_credits(self) -> None:
        ranks = self._load.ranks
        for column, credit in zip(_LOADING_COLUMNS, self._credits, strict=True):
            if credit is not None:
                ranks[:, column] = (1.0 - credit) * ranks[:, costing.TOKEN_MS]


def _work_of(request: ActiveRequest) -> Work:
    return Work(
        request.new_tokens,
        request.cached_tokens,
        request.ahead_tokens,
        (request.host_tokens, request.disk_tokens, request.pool_tokens),
        request.is_busy > 0,
    )
