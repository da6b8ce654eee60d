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
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError, NoWorkerError, UnknownRequestError
from kvplug.events import EventBatch, Namespace, Rank
from kvplug.hashing import Hashes, TokensLike, as_tokens, seed_of
from kvplug.index.applied import Applied
from kvplug.index.block_index import BlockIndex
from kvplug.index.overlap import Overlap
from kvplug.index.snapshot import Snapshot
from kvplug.records import Records
from kvplug.router.config import RouterConfig
from kvplug.router.cost import cost_per_rank, price
from kvplug.router.fleet_index import NOMINAL_BLOCK_SIZE, FleetIndex, Section
from kvplug.router.load import ActiveLoad, ActiveRequest
from kvplug.router.policies import RoundRobin, pick_lowest, pick_softmax
from kvplug.router.prompt import Prompt
from kvplug.router.query_first_lock import QueryFirstLock

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

# Of ingestion in one piece. A query that comes meanwhile waits for the event at hand only.
BLOCKS_PER_SLICE = 2048
_SLOTS_PER_SLICE = 1024


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes, and why.

    overlap_blocks: leading blocks that the chosen rank holds, `cached_tokens` in tokens;
    prompt_blocks: full blocks of the prompt; cost: of the chosen rank, in blocks; block_size: how
    many tokens a block has there.
    """

    request_id: str
    rank: Rank
    overlap_blocks: int
    cached_tokens: int
    prompt_blocks: int
    cost: float
    block_size: int


class _Offer(NamedTuple):
    """What the ranks of one section would do for a request: cost in its blocks, by rank number."""

    section: Section
    hashes: Hashes
    overlap: Overlap
    costs: F64


class Router:
    """Following workers: add_worker, apply, clear, remove_worker. Requests: route, first_token,
    finish. `fleet_index` and `load` may be read for inspection.
    """

    def __init__(
        self,
        config: RouterConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        random_: random.Random | None = None,
    ) -> None:
        self.config = config or RouterConfig()
        self._lock = QueryFirstLock()
        self.fleet_index = FleetIndex(
            self._block_size(),
            speculative_ttl_s=self.config.routed_ttl_s,
            is_wanted=self._lock.is_wanted,
            bounds=self.config.bounds,
        )
        self.load = ActiveLoad(self.config.request_expiry_s)
        self._round_robin = RoundRobin()
        self._clock = clock
        self._random = random_ or random.Random()

    @property
    def ranks(self) -> list[Rank]:
        """The ranks that can be chosen."""
        return [rank for rank in self.fleet_index.numbers.ranks if rank is not None]

    @property
    def index(self) -> BlockIndex:
        """The index of a fleet with one model and one block size; ConfigError if it has more."""
        only = self.fleet_index.only
        if only is None:
            raise ConfigError("the fleet has several indexes: ask index_of(rank)")
        return only.index

    def index_of(self, rank: Rank) -> BlockIndex:
        """The index of the rank's model and block size; an empty one's if the rank is unknown."""
        return self.fleet_index.section_of(rank).index

    def add_worker(
        self, worker: str, *, dp_size: int = 1, model: str = "", block_size: int | None = None
    ) -> None:
        """Route to this worker from now on; it has `dp_size` data-parallel ranks.

        Without a `block_size` of its own it has the one of the config, and without that the one of
        the first blocks that it stores. Called again, it adds to what is known of the worker.
        """
        with self._lock.patiently:  # a worker does not change its index within a run of events
            self.fleet_index.add_worker(worker, dp_size, model, block_size)

    def remove_worker(self, worker: str) -> None:
        """Forget the worker, its blocks and its load."""
        with self._lock.patiently:
            for number, rank in enumerate(self.fleet_index.numbers.ranks):
                if rank is not None and rank.worker == worker:
                    self.load.forget(number)
            self.fleet_index.remove_worker(worker)

    def apply(self, rank: Rank, batch: EventBatch) -> Applied:
        """Remember what a rank's engine said; returns what was stored, removed and refused.

        ConfigError in the approximate mode.
        """
        self.require_events(rank)
        with self._lock.patiently:
            return self.fleet_index.apply(rank, batch)

    def apply_records(self, rank: Rank, records: Records) -> Applied:
        """As `apply`, for many plain events at once; queries in other threads go in between."""
        self.require_events(rank)
        applied, at = Applied(), 0
        with self._lock.patiently as turn:
            while at < records.num_events:
                at = self.fleet_index.apply_records(rank, records, at, BLOCKS_PER_SLICE, applied)
                turn.give_way()
        return applied

    def require_events(self, rank: Rank) -> None:
        """ConfigError in the approximate mode, which goes by its own decisions alone."""
        if not self.config.use_kv_events:
            raise ConfigError(
                f"cannot apply events of {rank}: expected a router with use_kv_events=True, "
                "this one has False and goes by its own decisions"
            )

    def set_worth(self, rank: Rank, worth: float) -> None:
        """What the rank's blocks count for in costs, 0 to 1; 1 until it is said otherwise.

        For ranks of whose blocks not everything is known (kvplug/ingest/trust.py).
        """
        with self._lock:
            self.fleet_index.set_worth(rank, worth)

    def clear(self, rank: Rank) -> int:
        """The rank holds nothing (it restarted, or its events are lost); returns what it had."""
        with self._lock.patiently as turn:
            if rank not in self.fleet_index.numbers:
                return 0
            clearing = self.fleet_index.start_clear(rank)
            while not clearing.is_done:
                clearing.advance(_SLOTS_PER_SLICE)
                turn.give_way()
            self.fleet_index.end_clear(rank)
            return clearing.num_dropped

    def save_index(self, path: Path) -> None:
        """Write the index to a file (kvplug/index/snapshot.py); requests are routed meanwhile,
        events wait.

        SnapshotError if that cannot be, and a former file stays; ConfigError for a fleet with
        several indexes.
        """
        with self._lock.patiently as turn:
            snapshot = Snapshot(self.index)
            with turn.standing_aside():
                snapshot.write(path)

    def route(
        self,
        token_ids: TokensLike,
        *,
        request_id: str | None = None,
        namespace: Namespace = Namespace(),  # noqa: B008 - immutable
        model: str = "",
        workers: Collection[str] | None = None,
    ) -> Decision:
        """Choose a rank for a prompt and count the request as its load until `finish`.

        `model` and `workers` narrow the choice. Raises NoWorkerError if nobody can take it,
        HashingError for token ids outside u32, ConfigError for a request id that is in flight
        already.
        """
        prompt = Prompt(as_tokens(token_ids), seed_of(namespace))
        request_id = request_id or uuid.uuid4().hex
        with self._lock:
            now_s = self._clock()
            self.load.expire(now_s)
            self._refuse_duplicate(request_id)
            candidates = self._candidates(model, workers)
            asked = self.fleet_index.asked(candidates)
            offers = [self._offer(section, prompt, now_s) for section in asked]
            number = self._pick(candidates, _comparable(offers)[candidates])
            return self._accept(request_id, prompt, number, offers, now_s)

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

    def _block_size(self) -> int | None:
        """Without events nobody would tell the block size."""
        known = self.config.block_size
        return known if known or self.config.use_kv_events else NOMINAL_BLOCK_SIZE

    def _offer(self, section: Section, prompt: Prompt, now_s: float) -> _Offer:
        weight = self.config.overlap_score_weight
        if section.fleet_numbers is None and not section.index.bigrams:
            return _Offer(
                section, *price(prompt.tokens, prompt.seed, section.index, self.load, now_s, weight)
            )
        num_ranks = len(self.fleet_index.numbers.ranks)
        hashes = prompt.hashes(section.index.hasher)
        overlap = section.overlap(hashes, now_s, num_ranks)
        load = self.load.of(hashes, num_ranks)
        costs = cost_per_rank(len(prompt), section.block_size, overlap, load, weight)
        return _Offer(section, hashes, overlap, costs)

    def _accept(
        self, request_id: str, prompt: Prompt, number: int, offers: list[_Offer], now_s: float
    ) -> Decision:
        rank = self.fleet_index.numbers.rank(number)
        offer = offers[0]
        if len(offers) > 1:
            section = self.fleet_index.section_of(rank)
            offer = next(each for each in offers if each.section is section)
        depth = int(offer.overlap.depth[number])
        # What events do not confirm is renewed by each request that has it.
        first = depth if self.config.use_kv_events else 0
        offer.section.expect(number, offer.hashes[first:], now_s)
        cached_tokens = depth * offer.section.block_size
        deadline_s = self.load.deadline_s(now_s)
        prefill_tokens = len(prompt) - cached_tokens
        request = ActiveRequest(number, offer.hashes, prefill_tokens, deadline_s)
        self.load.start(request_id, request)
        return Decision(
            request_id=request_id,
            rank=rank,
            overlap_blocks=depth,
            cached_tokens=cached_tokens,
            prompt_blocks=len(offer.hashes),
            cost=float(offer.costs[number]),
            block_size=offer.section.block_size,
        )

    def _refuse_duplicate(self, request_id: str) -> None:
        if request_id in self.load:
            raise ConfigError(f"cannot route request {request_id!r}: this id is in flight already")

    def _candidates(self, model: str, workers: Collection[str] | None) -> I64:
        if model:
            workers = self.fleet_index.workers_with(model, workers)
        numbers = [
            number
            for number, rank in enumerate(self.fleet_index.numbers.ranks)
            if rank is not None and (workers is None or rank.worker in workers)
        ]
        if not numbers:
            known = ", ".join(str(rank) for rank in self.ranks) or "none"
            what = f"model {model!r}" if model else "the request"
            raise NoWorkerError(f"no worker can take {what}; known workers: {known}")
        return np.array(numbers, dtype=np.int64)

    def _pick(self, candidates: I64, costs: F64) -> int:
        if self.config.mode == "round_robin":
            return self._round_robin.pick(candidates)
        if self.config.temperature > 0:
            return pick_softmax(candidates, costs, self.config.temperature, self._random)
        return pick_lowest(candidates, costs, self._random)


def _comparable(offers: list[_Offer]) -> F64:
    """float64[ranks]: in blocks while one section is asked, else in tokens.

    An offer's arrays have all ranks of the fleet; only those of its section mean anything.
    """
    if len(offers) == 1:
        return offers[0].costs
    costs = np.empty_like(offers[0].costs)
    for offer in offers:
        mine = offer.section.numbers
        costs[mine] = offer.costs[mine] * offer.section.block_size
    return costs
