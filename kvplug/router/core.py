"""Router: the worker that already holds a request's prefix, unless it is too busy.

In:  workers, their event batches, token ids.   Out: a Decision per request.

The whole request path is `Router.route`: hash the tokens, look them up, cost every rank, pick one,
account for it. A lock makes it safe to apply events in one thread and route in another.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Collection

import msgspec
import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError, NoWorkerError, UnknownRequestError
from kvplug.events import EventBatch, Namespace, Rank
from kvplug.hashing import Hashes, Tokens, TokensLike, as_tokens, seed_of
from kvplug.index.applied import Applied
from kvplug.index.block_index import BlockIndex, Overlap
from kvplug.records import Records
from kvplug.router.config import RouterConfig
from kvplug.router.cost import cost_per_rank
from kvplug.router.load import ActiveLoad, ActiveRequest
from kvplug.router.policies import RoundRobin, pick_lowest, pick_softmax
from kvplug.router.query_first_lock import QueryFirstLock

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

# Of ingestion, for which a query may have to wait: about 15 us.
_BLOCKS_PER_SLICE = 96
_SLOTS_PER_SLICE = 1024


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes, and why.

    overlap_blocks: leading blocks that the chosen rank holds, `cached_tokens` in tokens;
    prompt_blocks: full blocks of the prompt; cost: of the chosen rank, in blocks.
    """

    request_id: str
    rank: Rank
    overlap_blocks: int
    cached_tokens: int
    prompt_blocks: int
    cost: float


class Router:
    """Following workers: add_worker, apply, clear, remove_worker. Requests: route, first_token,
    finish. `index` and `load` may be read for inspection.
    """

    def __init__(
        self,
        config: RouterConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        random_: random.Random | None = None,
    ) -> None:
        self.config = config or RouterConfig()
        self.index = BlockIndex(
            self.config.block_size, speculative_ttl_s=self.config.speculative_ttl_s
        )
        self.load = ActiveLoad(self.config.request_expiry_s)
        self._round_robin = RoundRobin()
        self._clock = clock
        self._random = random_ or random.Random()
        self._lock = QueryFirstLock()

    @property
    def ranks(self) -> list[Rank]:
        """The ranks that can be chosen."""
        return [rank for rank in self.index.numbers.ranks if rank is not None]

    def add_worker(self, worker: str, *, dp_size: int = 1) -> None:
        """Route to this worker from now on; it has `dp_size` data-parallel ranks."""
        if dp_size < 1:
            raise ConfigError(f"worker {worker!r}: dp_size must be at least 1, got {dp_size}")
        with self._lock:
            for dp_rank in range(dp_size):
                self.index.add_rank(Rank(worker, dp_rank))

    def remove_worker(self, worker: str) -> None:
        """Forget the worker, its blocks and its load."""
        with self._lock:
            for number, rank in enumerate(self.index.numbers.ranks):
                if rank is not None and rank.worker == worker:
                    self.load.forget(number)
            self.index.remove_worker(worker)

    def apply(self, rank: Rank, batch: EventBatch) -> Applied:
        """Remember what a rank's engine said; returns what was stored, removed and refused."""
        with self._lock.patiently:
            return self.index.apply(rank, batch)

    def apply_records(self, rank: Rank, records: Records) -> Applied:
        """As `apply`, for many plain events at once; queries in other threads go in between."""
        applied, at = Applied(), 0
        with self._lock.patiently as turn:
            while at < records.num_events:
                at = self.index.apply_records(rank, records, at, _BLOCKS_PER_SLICE, applied)
                turn.give_way()
        return applied

    def set_worth(self, rank: Rank, worth: float) -> None:
        """What the rank's blocks count for in costs, 0 to 1; 1 until it is said otherwise.

        For ranks of whose blocks not everything is known (kvplug/ingest/trust.py).
        """
        with self._lock:
            if rank in self.index.numbers:
                self.index.set_worth(rank, worth)

    def clear(self, rank: Rank) -> int:
        """The rank holds nothing (it restarted, or its events are lost); returns what it had."""
        with self._lock.patiently as turn:
            if rank not in self.index.numbers:
                return 0
            clearing = self.index.start_clear(rank)
            while not clearing.is_done:
                clearing.advance(_SLOTS_PER_SLICE)
                turn.give_way()
            return clearing.num_dropped

    def route(
        self,
        token_ids: TokensLike,
        *,
        request_id: str | None = None,
        namespace: Namespace = Namespace(),  # noqa: B008 - immutable
        workers: Collection[str] | None = None,
    ) -> Decision:
        """Choose a rank for a prompt and count the request as its load until `finish`.

        `workers` narrows the choice. Raises NoWorkerError if nobody can take it, HashingError for
        token ids outside u32, ConfigError for a request id that is in flight already.
        """
        tokens = as_tokens(token_ids)
        hashes = self.index.hasher.sequence_hashes(tokens, seed_of(namespace))
        request_id = request_id or uuid.uuid4().hex
        with self._lock:
            now_s = self._clock()
            self.load.expire(now_s)
            self._refuse_duplicate(request_id)
            candidates = self._candidates(workers)
            overlap = self.index.overlap(hashes, now_s)
            costs = self._costs(tokens, hashes, overlap)
            number = self._pick(candidates, costs[candidates])
            depth = int(overlap.depth[number])
            self.index.speculative.insert(number, hashes[depth:], now_s)
            self._account(request_id, number, tokens, hashes, depth)
            return Decision(
                request_id=request_id,
                rank=self.index.numbers.rank(number),
                overlap_blocks=depth,
                cached_tokens=depth * self.index.block_size,
                prompt_blocks=len(hashes),
                cost=float(costs[number]),
            )

    def first_token(self, request_id: str) -> None:
        """The prefill is done: its tokens no longer weigh on the rank."""
        with self._lock:
            self.load.first_token(request_id)

    def finish(self, request_id: str) -> None:
        """The request is over, for whatever reason. UnknownRequestError if it is not in flight."""
        with self._lock:
            if not self.load.finish(request_id):
                raise UnknownRequestError(
                    f"cannot finish request {request_id!r}: it is not in flight "
                    "(finished before, or expired)"
                )

    def _costs(self, tokens: Tokens, hashes: Hashes, overlap: Overlap) -> F64:
        load = self.load.of(hashes, len(overlap.depth))
        weight = self.config.overlap_score_weight
        return cost_per_rank(len(tokens), self.index.block_size, overlap, load, weight)

    def _account(
        self, request_id: str, number: int, tokens: Tokens, hashes: Hashes, depth: int
    ) -> None:
        prefill_tokens = len(tokens) - depth * self.index.block_size
        deadline_s = self.load.deadline_s(self._clock())
        self.load.start(request_id, ActiveRequest(number, hashes, prefill_tokens, deadline_s))

    def _refuse_duplicate(self, request_id: str) -> None:
        if request_id in self.load:
            raise ConfigError(f"cannot route request {request_id!r}: this id is in flight already")

    def _candidates(self, workers: Collection[str] | None) -> I64:
        numbers = [
            number
            for number, rank in enumerate(self.index.numbers.ranks)
            if rank is not None and (workers is None or rank.worker in workers)
        ]
        if not numbers:
            known = ", ".join(str(rank) for rank in self.ranks) or "none"
            raise NoWorkerError(f"no worker can take the request; known workers: {known}")
        return np.array(numbers, dtype=np.int64)

    def _pick(self, candidates: I64, costs: F64) -> int:
        if self.config.mode == "round_robin":
            return self._round_robin.pick(candidates)
        if self.config.temperature > 0:
            return pick_softmax(candidates, costs, self.config.temperature, self._random)
        return pick_lowest(candidates, costs, self._random)
