"""The load of the fleet: requests in flight on each rank, and cache sizes.

In:  requests that a kernel has accounted for, their first tokens and ends; sizes of caches.
Out: the arrays that the next decision reads (kernels/costing.py, kernels/active_blocks.py).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from itertools import count

import msgspec
import numpy as np
import numpy.typing as npt

from kvplug.errors import UnknownRequestError
from kvplug.hashing import Hashes
from kvplug.index.arrays import ArrayVersion
from kvplug.index.hash_table import HashTable
from kvplug.kernels import active_blocks, costing, forecast
from kvplug.router.cache_forecast import CacheForecast

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

_POPULAR = 4096  # prefixes that are counted at a time


class ActiveRequest(msgspec.Struct, eq=False):
    """A request in flight on a rank, with what was expected of it as it was routed: its prefill
    (tokens by residency alone; milliseconds, blocks that come to the rank, and tokens computed and
    cached, by the forecast; tokens loaded from each tier), tokens to be computed before its own,
    whether others were decoding, leading blocks that the rank's events said it has (in any tier,
    expected ones aside). From `prefill_tokens` on as kernels/routing.py has it.
    """

    rank_number: int
    sequence_hashes: Hashes
    routed_s: float
    deadline_s: float
    prefill_tokens: float = 0.0
    prefill_ms: float = 0.0
    num_coming: float = 0.0
    new_tokens: float = 0.0
    cached_tokens: float = 0.0
    host_tokens: float = 0.0
    disk_tokens: float = 0.0
    pool_tokens: float = 0.0
    ahead_tokens: float = 0.0
    is_busy: float = 0.0
    resident_blocks: float = 0.0
    is_prefilled: bool = False
    first_token_s: float | None = None
    prefilled_before: float = 0.0

    @property
    def lower_tokens(self) -> float:
        """Tokens that have to be loaded from another tier than the device."""
        return self.host_tokens + self.disk_tokens + self.pool_tokens


class ActiveLoad:
    """start, first_token, finish, expire, forget; sizes of caches.

    `ranks`: float64[ranks, NUM_COLUMNS] (kernels/costing.py), of which those of the engine's
    model are kept by kvplug/router/engine_speeds.py; `active`: blocks of live requests; `forecast`:
    of caches; `version` counts when any of the arrays has become another one.
    """

    def __init__(self, request_expiry_s: float, *, counts_sent: bool = False) -> None:
        """`counts_sent`: no events tell what a cache holds, but what was sent there does."""
        self.num_expired, self.counts_sent = 0, counts_sent
        self.version = ArrayVersion()
        self.active = HashTable(self.version)
        self.forecast = CacheForecast(self.version)
        self.ranks: F64 = np.zeros((0, costing.NUM_COLUMNS))
        self.popular_keys: U64 = np.zeros(_POPULAR, dtype=np.uint64)
        self.popular_counts: F64 = np.zeros(2 * _POPULAR)
        self._expiry_s = request_expiry_s
        self._requests: OrderedDict[str, ActiveRequest] = OrderedDict()
        self._waiting: list[deque[ActiveRequest]] = []
        self._prefilled_tokens: list[float] = []
        self._untold: set[int] = set()
        self._presumed: list[tuple[float, int, ActiveRequest]] = []
        self._order = count()

    def __len__(self) -> int:
        """Number of requests in flight."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def request(self, request_id: str) -> ActiveRequest:
        """The request in flight; UnknownRequestError if there is none."""
        try:
            return self._requests[request_id]
        except KeyError as error:
            raise UnknownRequestError(f"request {request_id!r} is not in flight") from error

    def start(
        self, request_id: str, request: ActiveRequest, presumed_s: float | None = None
    ) -> None:
        """A kernel has counted a request. `presumed_s`: when its first token is presumed to come,
        if nobody will report it.
        """
        self._requests[request_id] = request
        self._waiting[request.rank_number].append(request)
        if presumed_s is not None:
            heapq.heappush(self._presumed, (presumed_s, next(self._order), request))

    def first_token(self, request_id: str, now_s: float) -> ActiveRequest | None:
        """The prefill of a request is done; None if that was known, or it is not in flight."""
        request = self._requests.get(request_id)
        if request is None or request.first_token_s is not None:
            return None
        request.first_token_s = now_s
        if not request.is_prefilled:
            self._end_prefill(request, now_s)
        return request

    def finish(self, request_id: str, now_s: float) -> ActiveRequest | None:
        """A request is over; None if it is not in flight."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if not request.is_prefilled:
            self._end_prefill(request, now_s)
        number = request.rank_number
        num_gone = active_blocks.leave(self.active.slots, request.sequence_hashes, number)
        self.ranks[number, costing.ACTIVE_BLOCKS] -= num_gone
        self.ranks[number, costing.CONTEXT_TOKENS] -= request.new_tokens + request.cached_tokens
        self.ranks[number, costing.NUM_RUNNING] -= 1
        return request

    def renew(self, request_id: str, now_s: float) -> None:
        """A request counts for the whole time again; nothing is done if it is not in flight."""
        request = self._requests.get(request_id)
        if request is not None:
            request.deadline_s = self.deadline_s(now_s)
            self._requests.move_to_end(request_id)

    def expire(self, now_s: float) -> None:
        """Presume first tokens that are due. Stop counting requests that were not finished in time;
        they are in the order of their deadlines.
        """
        while self._presumed and self._presumed[0][0] <= now_s:
            _, _, request = heapq.heappop(self._presumed)
            if not request.is_prefilled:
                self._end_prefill(request, now_s)
        while self._requests:
            request_id, request = next(iter(self._requests.items()))
            if request.deadline_s > now_s:
                return
            self.finish(request_id, now_s)
            self.num_expired += 1

    def forget(self, number: int, now_s: float) -> None:
        """The rank is gone, with its requests and all that is known of it."""
        self.reserve(number + 1)
        mine = [i for i, request in self._requests.items() if request.rank_number == number]
        for request_id in mine:
            self.finish(request_id, now_s)
        self.ranks[number, : costing.FIXED_MS] = 0.0
        self.ranks[number, costing.NOTED_MS] = costing.NEVER_MS
        self._untold.discard(number)
        self.empty_cache(number)

    def deadline_s(self, now_s: float) -> float:
        """When a request that starts now stops counting."""
        return now_s + self._expiry_s

    def reserve(self, num_ranks: int, num_blocks: int = 0) -> None:
        """There are so many ranks, and a prompt of so many blocks may come to one."""
        missing = num_ranks - len(self._waiting)
        if missing > 0:
            rows: F64 = np.zeros((missing, costing.NUM_COLUMNS))
            rows[:, costing.NOTED_MS] = costing.NEVER_MS
            rows[:, costing.RESIDENT_BLOCKS] = costing.UNKNOWN_BLOCKS if self.counts_sent else 0.0
            self.ranks = np.vstack([self.ranks, rows])
            self._waiting += [deque() for _ in range(missing)]
            self._prefilled_tokens += [0.0] * missing
            self.version.count += 1
        self.active.reserve(num_blocks)
        self.forecast.reserve(num_ranks, num_blocks)

    def prefilled_since(self, request: ActiveRequest) -> float:
        """Prompt tokens that its rank has computed for others since its own."""
        return self._prefilled_tokens[request.rank_number] - request.prefilled_before

    def set_capacity(self, number: int, num_blocks: float) -> None:
        """The rank's cache has room for so many blocks; 0: unknown."""
        self.reserve(number + 1)
        if self.ranks[number, costing.CAPACITY_BLOCKS] != num_blocks:
            self.version.count += 1  # the usual capacity may have changed
            self.ranks[number, costing.CAPACITY_BLOCKS] = num_blocks
        if self.counts_sent:
            self._presume_resident(number)

    def usual_capacity(self, numbers: I64) -> float:
        """The median of what is known of these ranks; 0 if nothing is."""
        known = self.ranks[numbers, costing.CAPACITY_BLOCKS]
        known = known[known > 0]
        return float(np.sort(known)[len(known) // 2]) if len(known) else 0.0

    def set_resident(self, number: int, num_blocks: int, *, is_told: bool = True) -> None:
        """The rank's device holds so many distinct blocks. `is_told`: whether events keep the
        number up to date; else it becomes unknown when the rank computes something.
        """
        self.ranks[number, costing.RESIDENT_BLOCKS] = num_blocks
        if is_told:
            self._untold.discard(number)
        else:
            self._untold.add(number)

    def empty_cache(self, number: int) -> None:
        """The rank holds nothing any more."""
        self.reserve(number + 1)
        self.forecast.forget(number)
        self.ranks[number, costing.RESIDENT_BLOCKS] = 0
        if self.counts_sent:
            self._presume_resident(number)

    def _presume_resident(self, number: int) -> None:
        """Without events: what was sent there is there, as far as the capacity allows."""
        row, num_blocks = self.ranks[number], self.forecast.num_blocks(number)
        capacity = row[costing.CAPACITY_BLOCKS]
        if num_blocks > capacity - forecast.CHUNK:  # it goes by chunks
            row[costing.RESIDENT_BLOCKS] = capacity
        else:
            row[costing.RESIDENT_BLOCKS] = max(0.0, num_blocks - row[costing.COMING_BLOCKS])
        if not capacity > 0:
            row[costing.RESIDENT_BLOCKS] = costing.UNKNOWN_BLOCKS

    def _end_prefill(self, request: ActiveRequest, now_s: float) -> None:
        number = request.rank_number
        self._prefilled_tokens[number] += request.new_tokens
        request.is_prefilled, request.prefilled_before = True, self._prefilled_tokens[number]
        row, waiting = self.ranks[number], self._waiting[number]
        was_first = bool(waiting) and waiting[0] is request
        waiting.remove(request)
        row[costing.NUM_WAITING] -= 1
        row[costing.WAITING_MS] -= request.prefill_ms
        row[costing.PREFILL_TOKENS] -= request.prefill_tokens
        row[costing.COMING_BLOCKS] -= request.num_coming
        if number in self._untold:
            row[costing.RESIDENT_BLOCKS] = costing.UNKNOWN_BLOCKS
        if not waiting:  # what rounding has left
            row[[costing.WAITING_MS, costing.PREFILL_TOKENS, costing.COMING_BLOCKS]] = 0.0
        elif was_first:
            row[costing.FIRST_MS], row[costing.FIRST_SINCE_MS] = waiting[0].prefill_ms, 1e3 * now_s
        if self.counts_sent:
            self._presume_resident(number)
