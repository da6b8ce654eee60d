"""The load of the fleet: requests in flight on each rank, and cache sizes.

In:  requests that a kernel has accounted for, their first tokens, answers and ends; the load of
     others; sizes of caches.
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
from kvplug.kernels import active_blocks, costing, forecast, peer_load
from kvplug.kernels.peer_load import NUM_BUSY
from kvplug.router.cache_forecast import CacheForecast
from kvplug.router.output_blocks import OutputBlocks, OutputShare
from kvplug.router.reported_load import NO_OTHERS, OthersLoad, ReportedLoad, others_of

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

_POPULAR = 4096  # prefixes that are counted at a time
_WAITING_COLUMNS = [costing.WAITING_MS, costing.PREFILL_TOKENS, costing.COMING_BLOCKS]
# Where the load of others is counted beside the router's own.
_OTHERS_COLUMNS = (
    (costing.NUM_RUNNING, "num_in_flight"),
    (costing.NUM_WAITING, "num_waiting"),
    (costing.PREFILL_TOKENS, "tokens"),
    (costing.WAITING_MS, "ms"),
    (costing.COMING_BLOCKS, "coming"),
    (costing.ACTIVE_BLOCKS, "blocks"),
)


class ActiveRequest(msgspec.Struct, eq=False):
    """A request in flight on a rank, with what was expected of it as it was routed: its prefill
    (tokens by residency alone; milliseconds, blocks that come to the rank, and tokens computed and
    cached, by the forecast; tokens loaded from each tier), tokens to be computed before its own,
    whether others were decoding, leading blocks that the rank's events said it has (in any tier,
    expected ones aside). From `prefill_tokens` on as kernels/routing.py has it.

    `number`: of the request, among all that were started; `is_timed`: whether `routed_s` is when it
    was sent to the rank, so that its times tell how fast the rank is; `shows_in_event`: whether an
    event of the rank will show the end of its prefill; `depth`: leading blocks that the rank had,
    expected ones included; `own_ms`: its predicted time to first token.
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
    reports_first_token: bool = True
    is_timed: bool = True
    shows_in_event: bool = False
    number: int = -1
    depth: int = 0
    own_ms: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Of the prompt."""
        return round(self.new_tokens + self.cached_tokens)

    @property
    def lower_tokens(self) -> float:
        """Tokens that have to be loaded from another tier than the device."""
        return self.host_tokens + self.disk_tokens + self.pool_tokens


class LoadListener:
    """Is told of requests as they come and go, under the router's lock; as it is it wants nothing.

    The load counts the change already.
    """

    def started(self, request: ActiveRequest) -> None:
        """A request was sent to its rank, or has moved there."""

    def prefilled(self, request: ActiveRequest) -> None:
        """Its prefill counts as done."""

    def left(self, request: ActiveRequest) -> None:
        """It is over, or not on its rank any more."""


class ActiveLoad:
    """start, first_token, add_output_block, finish, expire, forget; set_others; sizes of caches.

    `ranks`: float64[ranks, NUM_COLUMNS] (kernels/costing.py), of which those of the engine's
    model are kept by kvplug/router/engine_speeds.py; `active`: blocks of live requests; `forecast`:
    of caches; `peers`: float64[ranks, NUM_BUSY], what of `ranks` other processes and replicas have
    sent there (`set_peers`); `version` counts when any of the arrays has become another one;
    `listener` is told of requests.
    """

    def __init__(self, request_expiry_s: float, *, counts_sent: bool = False) -> None:
        """`counts_sent`: no events tell what a cache holds, but what was sent there does."""
        self.num_expired, self.counts_sent = 0, counts_sent
        self.version = ArrayVersion()
        self.listener = LoadListener()
        self.active = HashTable(self.version)
        self.forecast = CacheForecast(self.version)
        self.ranks: F64 = np.zeros((0, costing.NUM_COLUMNS))
        self.peers: F64 = np.zeros((0, NUM_BUSY))
        self._has_peers, self._scratch = False, np.zeros(NUM_BUSY)
        self.popular_keys: U64 = np.zeros(_POPULAR, dtype=np.uint64)
        self.popular_counts: F64 = np.zeros(2 * _POPULAR)
        self._expiry_s = request_expiry_s
        self._requests: OrderedDict[str, ActiveRequest] = OrderedDict()
        self._waiting: list[deque[ActiveRequest]] = []
        self._outputs: list[OutputBlocks] = []
        self._counted_outputs: list[int] = []
        self._others: dict[int, OthersLoad] = {}
        self._others_first: set[int] = set()
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

    def find(self, request_id: str) -> ActiveRequest | None:
        """The request in flight, None if there is none."""
        return self._requests.get(request_id)

    def waiting_on(self, number: int) -> list[ActiveRequest]:
        """Requests on the rank without a first token, in the order in which they came."""
        return list(self._waiting[number])

    def start(
        self, request_id: str, request: ActiveRequest, presumed_s: float | None = None
    ) -> None:
        """A kernel has counted a request. `presumed_s`: when its first token is presumed to come,
        if nobody will report it.
        """
        self._requests[request_id] = request
        number, request.number = request.rank_number, next(self._order)
        self._waiting[number].append(request)
        is_behind = number in self._others and number not in self._others_first
        if is_behind and len(self._waiting[number]) == 1:  # others wait, nobody says for how long
            self._put_first(number, request.routed_s)
        if presumed_s is not None:
            heapq.heappush(self._presumed, (presumed_s, request.number, request))
        self.listener.started(request)

    def first_token(self, request_id: str, now_s: float) -> ActiveRequest | None:
        """The prefill of a request is done; None if that was known, or it is not in flight."""
        request = self._requests.get(request_id)
        if request is None or request.first_token_s is not None:
            return None
        request.first_token_s = now_s
        self.end_prefill(request, now_s)
        return request

    def end_prefill(self, request: ActiveRequest, now_s: float) -> None:
        """The rank has computed the prompt; nothing is done if that was known."""
        if not request.is_prefilled:
            self._prefilled_tokens[request.rank_number] += request.new_tokens
            self._end_waiting(request, now_s)

    def add_output_block(self, request_id: str, fraction_left: float | None = None) -> bool:
        """The answer has filled a block; False if the request is not in flight. `fraction_left`: of
        the answer, which is how much the request's own blocks count from now on.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        share = self._outputs[request.rank_number].share_of(request.number)
        share.add()
        if fraction_left is not None:
            share.decay(fraction_left, self._num_own(request))
        self._put_outputs(request.rank_number)
        return True

    def set_prefill(self, request: ActiveRequest, num_tokens: int, block_size: int) -> None:
        """So many tokens of a request in flight are to be computed, not as many as were found."""
        row = self.ranks[request.rank_number]
        new, cached = float(num_tokens), float(request.num_tokens - num_tokens)
        ms = row[costing.TOKEN_MS] * new + row[costing.ATTENTION_MS] * new * (cached + 0.5 * new)
        wanted = float(ms), new, new / block_size
        known = request.prefill_ms, request.prefill_tokens, request.num_coming
        row[_WAITING_COLUMNS] += np.subtract(wanted, known)
        request.prefill_ms, request.prefill_tokens, request.num_coming = wanted
        request.new_tokens, request.cached_tokens = new, cached
        is_first = self._waiting[request.rank_number][0] is request
        if is_first and request.rank_number not in self._others_first:
            row[costing.FIRST_MS] = ms

    def take_outputs(self, request: ActiveRequest, share: OutputShare) -> None:
        """A request in flight has come from another rank, with the blocks of its answer."""
        share.own(self._num_own(request))
        self._outputs[request.rank_number].put(request.number, share)
        self._put_outputs(request.rank_number)

    def finish(self, request_id: str, now_s: float) -> ActiveRequest | None:
        """A request is over; None if it is not in flight."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        self.end_prefill(request, now_s)
        self._leave(request)
        return request

    def withdraw(self, request_id: str, now_s: float) -> tuple[ActiveRequest, OutputShare | None]:
        """A request in flight leaves its rank, which need not have computed any of its prompt; it,
        and the blocks of its answer.
        """
        request = self._requests.pop(request_id)
        if not request.is_prefilled:
            self._end_waiting(request, now_s)
        return request, self._leave(request)

    def renew(self, request_id: str, now_s: float) -> bool:
        """A request counts for the whole time again; False if it is not in flight."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        request.deadline_s = self.deadline_s(now_s)
        self._requests.move_to_end(request_id)
        return True

    def expire(self, now_s: float) -> None:
        """Presume first tokens that are due. Stop counting requests that were not finished in time;
        they are in the order of their deadlines.
        """
        while self._presumed and self._presumed[0][0] <= now_s:
            _, _, request = heapq.heappop(self._presumed)
            self.end_prefill(request, now_s)
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
        self._others.pop(number, None)
        self._others_first.discard(number)
        self.ranks[number, : costing.FIXED_MS] = 0.0
        self.peers[number] = 0.0
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
            self.peers = np.vstack([self.peers, np.zeros((missing, NUM_BUSY))])
            self._waiting += [deque() for _ in range(missing)]
            self._outputs += [OutputBlocks() for _ in range(missing)]
            self._counted_outputs += [0] * missing
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

    def set_others(
        self, number: int, reported: ReportedLoad, block_size: int, now_s: float
    ) -> None:
        """The rank's engine reports its load: what exceeds the router's own counts beside it."""
        self.reserve(number + 1)
        row, own = self.ranks[number], self._own(number, self.others(number))
        known = self._with_peers(own, number) if self._has_peers else own
        others = others_of(reported, known, float(row[costing.TOKEN_MS]), block_size)
        self._others.pop(number, None)
        for column, name in _OTHERS_COLUMNS:
            at_peers = self.peers[number, column]
            row[column] = getattr(own, name) + getattr(others, name) + at_peers
        if others != NO_OTHERS:
            self._others[number] = others
        if number in self._others_first or not self._waiting[number]:
            self._put_first(number, now_s)

    def set_peers(self, rows: F64, own: int, num_processes: int, slots: I64) -> None:
        """Count what other processes or replicas of this router have sent beside its own, as they
        show it in `rows` (kernels/peer_load.py).
        """
        self._has_peers = True
        ranks, peers = self.ranks.reshape(-1), self.peers.reshape(-1)
        peer_load.take(rows, own, num_processes, slots, ranks, peers, self._scratch)

    def note_peer_prefill(self, number: int, num_tokens: float, now_s: float) -> None:
        """The rank has computed prompt tokens of a peer: until now it was at work on these."""
        self._prefilled_tokens[number] += num_tokens
        if self._waiting[number]:
            row, now_ms = self.ranks[number], 1e3 * now_s
            row[costing.FIRST_SINCE_MS] = max(row[costing.FIRST_SINCE_MS], now_ms)

    def show_own(self, slots: I64, out_rows: F64) -> bool:
        """Show them what this one has sent there; whether that has changed."""
        ranks, others = self.ranks, self._others.copy()  # reports and ranks may come meanwhile
        if others:  # of which the engine tells each of them
            ranks = ranks.copy()
            for number, each in others.items():
                if number < len(ranks):
                    for column, name in _OTHERS_COLUMNS:
                        ranks[number, column] -= getattr(each, name)
        return bool(peer_load.show(slots, ranks.reshape(-1), self.peers.reshape(-1), out_rows))

    def others(self, number: int) -> OthersLoad:
        """Of the rank, as reported last."""
        return self._others.get(number, NO_OTHERS)

    def _own(self, number: int, others: OthersLoad) -> OthersLoad:
        """What the router has sent to the rank itself, in the same columns."""
        row, is_idle = self.ranks[number], not self._waiting[number]
        row = row[:NUM_BUSY] - self.peers[number]
        own = {name: row[column] - getattr(others, name) for column, name in _OTHERS_COLUMNS}
        if is_idle:  # not what rounding has left
            own.update(ms=0.0, tokens=0.0, coming=0.0)
        return OthersLoad(**{name: float(value) for name, value in own.items()})

    def _with_peers(self, own: OthersLoad, number: int) -> OthersLoad:
        """What an engine counts, too, and is not the load of others."""
        peers = self.peers[number]
        both = {name: getattr(own, name) + float(peers[at]) for at, name in _OTHERS_COLUMNS}
        return OthersLoad(**both)

    def _put_first(self, number: int, now_s: float) -> None:
        """The rank begins with what others wait for; with the oldest request if they do not."""
        others, waiting, row = self.others(number), self._waiting[number], self.ranks[number]
        if others.ms > 0 and (not waiting or number in self._others_first):
            self._others_first.add(number)
            row[costing.FIRST_MS] = others.ms
        else:
            self._others_first.discard(number)
            row[costing.FIRST_MS] = waiting[0].prefill_ms if waiting else 0.0
        row[costing.FIRST_SINCE_MS] = 1e3 * now_s

    def _num_own(self, request: ActiveRequest) -> int:
        """Last blocks of the prompt that no other request on the rank has."""
        slots, hashes = self.active.slots, request.sequence_hashes
        return int(active_blocks.num_exclusive(slots, hashes, request.rank_number))

    def _put_outputs(self, number: int) -> None:
        """Count the blocks of answers on the rank as they are now."""
        num_blocks = self._outputs[number].num_blocks
        self.ranks[number, costing.ACTIVE_BLOCKS] += num_blocks - self._counted_outputs[number]
        self._counted_outputs[number] = num_blocks

    def _leave(self, request: ActiveRequest) -> OutputShare | None:
        """The request is not on its rank any more; the blocks of its answer, None without one."""
        number = request.rank_number
        num_gone = active_blocks.leave(self.active.slots, request.sequence_hashes, number)
        self.ranks[number, costing.ACTIVE_BLOCKS] -= num_gone
        self.ranks[number, costing.CONTEXT_TOKENS] -= request.new_tokens + request.cached_tokens
        self.ranks[number, costing.NUM_RUNNING] -= 1
        share = self._outputs[number].end(request.number)
        if share is not None:
            self._put_outputs(number)
        self.listener.left(request)
        return share

    def _end_waiting(self, request: ActiveRequest, now_s: float) -> None:
        number = request.rank_number
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
            others = self._others.get(number, NO_OTHERS)
            row[_WAITING_COLUMNS] = others.ms, others.tokens, others.coming
            if self._has_peers:
                peers = self.peers[number].tolist()
                for column in _WAITING_COLUMNS:
                    row[column] += peers[column]
                for column in (costing.FIRST_MS, costing.FIRST_SINCE_MS):
                    row[column] = peers[column]
        if was_first and number not in self._others_first and (waiting or number in self._others):
            self._put_first(number, now_s)
        if self.counts_sent:
            self._presume_resident(number)
        self.listener.prefilled(request)
