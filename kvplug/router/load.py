"""What each rank is busy with, how fast it is, and how large its cache: the load of the fleet.

In:  requests that a kernel has accounted for, their first tokens and ends; sizes of caches.
Out: the arrays that the next decision reads (kernels/costing.py, kernels/active_blocks.py).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvplug.hashing import Hashes
from kvplug.index.changes import Changes
from kvplug.index.hash_table import HashTable
from kvplug.kernels import active_blocks, costing
from kvplug.router.cache_forecast import CacheForecast
from kvplug.router.engine_model import EngineModel, FleetFit

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

_POPULAR = 4096  # prefixes that are counted at a time
_LESSON_S = 0.01  # between two first tokens that the model is fitted to: that takes 100 us


@dataclass(slots=True, kw_only=True, eq=False)
class ActiveRequest:
    """A request in flight on a rank, with what was expected of it."""

    rank_number: int
    sequence_hashes: Hashes
    prefill_tokens: float
    prefill_ms: float
    num_coming: float
    routed_s: float
    deadline_s: float
    new_tokens: float = 0.0
    cached_tokens: float = 0.0
    ahead_tokens: float = 0.0
    is_busy: bool = False
    first_token_s: float | None = None
    prefilled_before: float = 0.0


class ActiveLoad:
    """start, first_token, finish, expire, forget; capacities and models of ranks.

    `columns`: float64[NUM_COLUMNS, ranks] (kernels/costing.py); `active`: blocks of live requests;
    `forecast`: of caches;
    `changes` counts when any of the arrays has become another one.
    """

    def __init__(self, request_expiry_s: float) -> None:
        self.num_expired = 0
        self.changes = Changes()
        self.active = HashTable(self.changes)
        self.forecast = CacheForecast(self.changes)
        self.columns: F64 = np.zeros((costing.NUM_COLUMNS, 0))
        self.popular_keys: U64 = np.zeros(_POPULAR, dtype=np.uint64)
        self.popular_counts: F64 = np.zeros(2 * _POPULAR)
        self._expiry_s = request_expiry_s
        self._requests: OrderedDict[str, ActiveRequest] = OrderedDict()
        self._waiting: list[deque[ActiveRequest]] = []
        self.fit = FleetFit(EngineModel())
        self._prefilled_tokens: list[float] = []
        self._given: dict[int, EngineModel] = {}
        self._taught_s = -np.inf

    def __len__(self) -> int:
        """Number of requests in flight."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def request(self, request_id: str) -> ActiveRequest | None:
        """A request in flight."""
        return self._requests.get(request_id)

    def start(self, request_id: str, request: ActiveRequest) -> None:
        """A kernel has accounted for a request."""
        self._requests[request_id] = request
        self._waiting[request.rank_number].append(request)

    def first_token(self, request_id: str, now_s: float) -> None:
        """The prefill of a request is done; later calls do nothing."""
        request = self._requests.get(request_id)
        if request is None or request.first_token_s is not None:
            return
        self._prefilled_tokens[request.rank_number] += request.new_tokens
        request.first_token_s = now_s
        request.prefilled_before = self._prefilled_tokens[request.rank_number]
        self._end_prefill(request, now_s)
        self._learn_first_token(request, now_s)

    def finish(self, request_id: str, now_s: float, num_tokens: int | None = None) -> bool:
        """A request is over, with so many tokens if that is known; False if it is not in flight."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if request.first_token_s is None:
            self._end_prefill(request, now_s)
        elif num_tokens is not None and num_tokens > 1:
            self._learn_answer(request, now_s, num_tokens)
        number = request.rank_number
        num_gone = active_blocks.leave(self.active.slots, request.sequence_hashes, number)
        self.columns[costing.ACTIVE_BLOCKS, number] -= num_gone
        self.columns[costing.NUM_RUNNING, number] -= 1
        return True

    def expire(self, now_s: float) -> None:
        """Stop counting requests that nobody finished in time; they started in order."""
        while self._requests:
            request_id, request = next(iter(self._requests.items()))
            if request.deadline_s > now_s:
                return
            self.finish(request_id, now_s)
            self.num_expired += 1

    def forget(self, number: int, now_s: float) -> None:
        """The rank is gone, and with it whatever it was busy with and is known of it."""
        self.reserve(number + 1)
        mine = [i for i, request in self._requests.items() if request.rank_number == number]
        for request_id in mine:
            self.finish(request_id, now_s)
        self.empty_cache(number)
        self.fit.forget(number)
        self._given.pop(number, None)
        self.columns[:, number] = 0.0
        self._put_model(number, self.fit.row_of(number))

    def deadline_s(self, now_s: float) -> float:
        """When a request that starts now stops counting."""
        return now_s + self._expiry_s

    def reserve(self, num_ranks: int, num_blocks: int = 0) -> None:
        """There are so many ranks, and a prompt of so many blocks may come to one."""
        missing = num_ranks - len(self._waiting)
        if missing > 0:
            self.columns = np.hstack([self.columns, np.zeros((costing.NUM_COLUMNS, missing))])
            self._waiting += [deque() for _ in range(missing)]
            self._prefilled_tokens += [0.0] * missing
            self._put_fitted()
            self.changes.count += 1
        self.active.reserve(num_blocks)
        self.forecast.reserve(num_ranks, num_blocks)

    def set_capacity(self, number: int, num_blocks: float) -> None:
        """The rank's cache has room for so many blocks; 0: nobody knows."""
        self.reserve(number + 1)
        self.changes.count += 1  # what is usual may be another number now
        self.columns[costing.CAPACITY_BLOCKS, number] = num_blocks

    def usual_capacity(self, numbers: I64) -> float:
        """The median of what is known of these ranks; 0 if nothing is."""
        known = self.columns[costing.CAPACITY_BLOCKS, numbers]
        known = known[known > 0]
        return float(np.sort(known)[len(known) // 2]) if len(known) else 0.0

    def set_resident(self, number: int, num_blocks: int) -> None:
        """The rank's device holds so many distinct blocks."""
        self.columns[costing.RESIDENT_BLOCKS, number] = num_blocks

    def empty_cache(self, number: int) -> None:
        """The rank holds nothing any more."""
        self.reserve(number + 1)
        self.forecast.forget(number)
        self.set_resident(number, 0)

    def set_model(self, number: int, model: EngineModel) -> None:
        """The rank is so fast; nothing is learnt of it from now on."""
        self.reserve(number + 1)
        self._given[number] = model
        self._put_model(number, model.row)

    def model(self, number: int) -> EngineModel:
        """How fast the rank is taken to be."""
        return EngineModel.from_row(self._model_row(number))

    def _end_prefill(self, request: ActiveRequest, now_s: float) -> None:
        number = request.rank_number
        row, waiting = self.columns[:, number], self._waiting[number]
        was_first = bool(waiting) and waiting[0] is request
        waiting.remove(request)
        row[costing.NUM_WAITING] -= 1
        row[costing.WAITING_MS] -= request.prefill_ms
        row[costing.PREFILL_TOKENS] -= request.prefill_tokens
        row[costing.COMING_BLOCKS] -= request.num_coming
        if not waiting:  # what rounding has left
            row[[costing.WAITING_MS, costing.PREFILL_TOKENS, costing.COMING_BLOCKS]] = 0.0
        elif was_first:
            row[costing.FIRST_MS], row[costing.FIRST_SINCE_MS] = waiting[0].prefill_ms, 1e3 * now_s

    def _learn_first_token(self, request: ActiveRequest, now_s: float) -> None:
        number = request.rank_number
        if number in self._given or now_s < self._taught_s + _LESSON_S:
            return
        self._taught_s = now_s
        self.fit.observe_first_token(
            number,
            1e3 * (now_s - request.routed_s),
            new_tokens=request.new_tokens,
            cached_tokens=request.cached_tokens,
            ahead_tokens=request.ahead_tokens,
            busy=request.is_busy,
        )
        self._put_fitted()

    def _learn_answer(self, request: ActiveRequest, now_s: float, num_tokens: int) -> None:
        number = request.rank_number
        if number in self._given or request.first_token_s is None:
            return
        num_steps = num_tokens - 1
        prefilled = self._prefilled_tokens[number] - request.prefilled_before
        self.fit.observe_answer(
            number,
            1e3 * (now_s - request.first_token_s) / num_steps,
            num_running=float(self.columns[costing.NUM_RUNNING, number]),
            prefilled_tokens=prefilled / num_steps,
        )

    def _put_fitted(self) -> None:
        """Of all ranks, as one's answers tell of the others, too."""
        for number in range(len(self._waiting)):
            if number not in self._given:
                self._put_model(number, self.fit.row_of(number))

    def _model_row(self, number: int) -> F64:
        return self.columns[costing.FIXED_MS : costing.SEQUENCE_MS + 1, number]

    def _put_model(self, number: int, row: F64) -> None:
        self._model_row(number)[:] = row
