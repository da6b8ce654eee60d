"""Router: the worker that already holds a request's prefix, unless it is too busy.

In:  workers, their event batches, token ids.   Out: a Decision per request.

The whole request path is `Router.route`: hash the tokens, look them up, cost every rank, pick one,
account for it. A lock makes it safe to apply events in one thread and route in another.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError, NoWorkerError, UnknownRequestError
from kvplug.events import EventBatch, Namespace, Rank
from kvplug.hashing import Hashes, HashesLike, Tokens, TokensLike, as_hashes, as_tokens, seed_of
from kvplug.index.applied import Applied
from kvplug.index.block_index import BlockIndex
from kvplug.index.snapshot import Snapshot
from kvplug.kernels import routing
from kvplug.records import Records
from kvplug.router.candidates import Candidates
from kvplug.router.capacity import CacheCapacity
from kvplug.router.config import RouterConfig
from kvplug.router.engine_model import EngineModel
from kvplug.router.fleet_index import NOMINAL_BLOCK_SIZE, FleetIndex, Section
from kvplug.router.load import ActiveLoad, ActiveRequest
from kvplug.router.policies import RoundRobin, pick_lowest, pick_softmax
from kvplug.router.prompt import Prompt
from kvplug.router.query_first_lock import QueryFirstLock
from kvplug.router.section_arrays import SectionArrays

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

# Of ingestion in one piece. A query that comes meanwhile waits for the event at hand only.
BLOCKS_PER_SLICE = 2048
_SLOTS_PER_SLICE = 1024
_NO_TOKENS: Tokens = np.empty(0, dtype=np.uint32)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes, and why.

    overlap_blocks: leading blocks that the chosen rank holds, `cached_tokens` in tokens;
    prompt_blocks: full blocks of the prompt; cost: of the chosen rank, in ms or in blocks as
    configured; block_size: how many tokens a block has there; predicted_ttft_ms: by the model of
    the rank's engine (kvplug/router/engine_model.py).
    """

    request_id: str
    rank: Rank
    overlap_blocks: int
    cached_tokens: int
    prompt_blocks: int
    cost: float
    block_size: int
    predicted_ttft_ms: float


class _Call(NamedTuple):
    """A request on its way; `hashes` once they are known."""

    prompt: Prompt
    now_s: float
    max_tokens: int | None
    hashes: Hashes | None = None

    @property
    def answer_tokens(self) -> float:
        """That it may get."""
        return _answer_tokens(self.max_tokens)


class _Batch(NamedTuple):
    """Requests as the kernel takes them."""

    tokens: Tokens
    ends: I64
    seed: int
    hashes: Hashes
    now_s: float
    answer_tokens: float


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
        self._arrays: dict[Section, SectionArrays] = {}
        self._capacities: dict[Rank, CacheCapacity] = {}
        self._candidates = Candidates(self.fleet_index)
        self._round_robin = RoundRobin()
        self._clock = clock
        self._random = random_ or random.Random()
        self._out: F64 = np.zeros(routing.NUM_OUT)
        self._ids = f"{uuid.uuid4().hex[:16]}-", count()

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
            self._fleet_changed()

    def remove_worker(self, worker: str) -> None:
        """Forget the worker, its blocks and its load."""
        with self._lock.patiently:
            for number, rank in enumerate(self.fleet_index.numbers.ranks):
                if rank is not None and rank.worker == worker:
                    self.load.forget(number, self._clock())
                    self._capacities.pop(rank, None)
            self.fleet_index.remove_worker(worker)
            self._fleet_changed()

    def apply(self, rank: Rank, batch: EventBatch) -> Applied:
        """Remember what a rank's engine said; returns what was stored, removed and refused.

        ConfigError in the approximate mode.
        """
        self.require_events(rank)
        with self._lock.patiently:
            num_before = self._num_resident(rank)
            applied = self.fleet_index.apply(rank, batch)
            self._note_cache(rank, num_before, applied)
        return applied

    def apply_packed(self, rank: Rank, payload: bytes) -> Applied:
        """As `apply`, for packed events (kvplug/packed.py): blocks that are hashed already.

        Blocks are taken to have the size of the rank's index. DecodeError, and nothing done, for a
        payload that is none.
        """
        self.require_events(rank)
        with self._lock.patiently:
            num_before = self._num_resident(rank)
            applied = self.fleet_index.apply_packed(rank, payload)
            self._note_cache(rank, num_before, applied)
        return applied

    def apply_records(self, rank: Rank, records: Records) -> Applied:
        """As `apply`, for many plain events at once; queries in other threads go in between."""
        self.require_events(rank)
        applied, at = Applied(), 0
        with self._lock.patiently as turn:
            while at < records.num_events:
                at = self._apply_slice(rank, records, at, applied)
                turn.give_way()
        return applied

    def _apply_slice(self, rank: Rank, records: Records, first: int, applied: Applied) -> int:
        num_before, num_removed = self._num_resident(rank), applied.num_removed
        at = self.fleet_index.apply_records(rank, records, first, BLOCKS_PER_SLICE, applied)
        self._note_cache(rank, num_before, Applied(num_removed=applied.num_removed - num_removed))
        return at

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
            self.load.empty_cache(self.fleet_index.numbers.number_of(rank))
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
        max_tokens: int | None = None,
    ) -> Decision:
        """Choose a rank for a prompt and count the request as its load until `finish`.

        `model` and `workers` narrow the choice; `max_tokens` is how long its answer may get.
        Raises NoWorkerError if nobody can take it, HashingError for token ids outside u32,
        ConfigError for a request id that is in flight already.
        """
        prompt = Prompt(as_tokens(token_ids), seed_of(namespace))
        return self._route(prompt, request_id, model, workers, max_tokens)

    def route_hashed(
        self,
        sequence_hashes: HashesLike,
        num_tokens: int,
        *,
        request_id: str | None = None,
        model: str = "",
        workers: Collection[str] | None = None,
        max_tokens: int | None = None,
    ) -> Decision:
        """As `route`, for a prompt of so many tokens whose full blocks are hashed already.

        ConfigError for a fleet with several block sizes.
        """
        hashes = as_hashes(sequence_hashes)
        if len({section.block_size for section in self.fleet_index.sections}) > 1:
            raise ConfigError("hashes are of one block size, the fleet has several: give tokens")
        prompt = Prompt(_NO_TOKENS, 0, hashes, num_tokens)
        return self._route(prompt, request_id, model, workers, max_tokens)

    def route_many(
        self,
        prompts: Sequence[TokensLike],
        *,
        namespace: Namespace = Namespace(),  # noqa: B008 - immutable
        model: str = "",
        workers: Collection[str] | None = None,
        max_tokens: int | None = None,
    ) -> list[Decision]:
        """As `route` for each, in their order; in one call of a kernel if the fleet has one index.

        Nothing is routed if one of them cannot be.
        """
        arrays, seed = [as_tokens(prompt) for prompt in prompts], seed_of(namespace)
        with self._lock:
            now_s = self._clock()
            candidates = self._candidates_for(model, workers, now_s)
            sections = list(self.fleet_index.asked(candidates))
            if self._is_simple(sections):
                return self._route_at_once(arrays, seed, candidates, sections[0], now_s, max_tokens)
            return [
                self._route_prompt(Prompt(array, seed), None, candidates, now_s, max_tokens)
                for array in arrays
            ]

    def first_token(self, request_id: str) -> None:
        """The prefill is done: its tokens no longer weigh on the rank, whose speed is learnt."""
        with self._lock:
            self.load.first_token(request_id, self._clock())

    def finish(self, request_id: str, num_tokens: int | None = None) -> None:
        """The request is over, for whatever reason; `num_tokens`: how long the answer was.

        UnknownRequestError if it is not in flight.
        """
        with self._lock:
            request = self.load.request(request_id)
            if not self.load.finish(request_id, self._clock(), num_tokens):
                raise UnknownRequestError(
                    f"cannot finish request {request_id!r}: it is not in flight "
                    "(finished before, or expired)"
                )
            if request is not None and num_tokens is not None:
                rank = self.fleet_index.numbers.rank(request.rank_number)
                self._arrays_of(self.fleet_index.section_of(rank)).note_answer(num_tokens)

    def set_cache_capacity(self, rank: Rank, num_blocks: float) -> None:
        """The rank's engine says that its device has room for so many blocks.

        What cannot be is named in the log and ignored: the capacity is learnt then.
        """
        with self._lock:
            if rank in self.fleet_index.numbers:
                self._capacity_of(rank).say(num_blocks)
                self._put_capacity(rank)

    def cache_capacity(self, rank: Rank) -> CacheCapacity:
        """What is known of the size of the rank's cache."""
        with self._lock:
            return replace(self._capacity_of(rank))

    def set_engine_model(self, rank: Rank, model: EngineModel) -> None:
        """The rank's engine is so fast; nothing is learnt of it from now on."""
        with self._lock:
            self.load.set_model(self.fleet_index.numbers.number_of(rank), model)

    def _block_size(self) -> int | None:
        """Without events nobody would tell the block size."""
        known = self.config.block_size
        return known if known or self.config.use_kv_events else NOMINAL_BLOCK_SIZE

    def _route(
        self,
        prompt: Prompt,
        request_id: str | None,
        model: str,
        workers: Collection[str] | None,
        max_tokens: int | None,
    ) -> Decision:
        with self._lock:
            now_s = self._clock()
            candidates = self._candidates_for(model, workers, now_s)
            return self._route_prompt(prompt, request_id, candidates, now_s, max_tokens)

    def _candidates_for(self, model: str, workers: Collection[str] | None, now_s: float) -> I64:
        self.load.expire(now_s)
        candidates = self._candidates.of(model, workers)
        if not len(candidates):
            known = ", ".join(str(rank) for rank in self.ranks) or "none"
            what = f"model {model!r}" if model else "the request"
            raise NoWorkerError(f"no worker can take {what}; known workers: {known}")
        return candidates

    def _route_prompt(
        self,
        prompt: Prompt,
        request_id: str | None,
        candidates: I64,
        now_s: float,
        max_tokens: int | None,
    ) -> Decision:
        if request_id is None:
            request_id = self._new_id()
        elif request_id in self.load:
            raise ConfigError(f"cannot route request {request_id!r}: this id is in flight already")
        if self.config.mode == "round_robin":
            candidates = np.array([self._round_robin.pick(candidates)])
        sections = list(self.fleet_index.asked(candidates))
        call = _Call(prompt, now_s, max_tokens)
        if len(sections) == 1:
            hashes = self._call(routing.BOTH, call, sections[0], candidates)
            return self._accept(request_id, sections[0], hashes, self._out, now_s)
        return self._route_among(sections, request_id, call, candidates)

    def _route_among(
        self, sections: list[Section], request_id: str, call: _Call, candidates: I64
    ) -> Decision:
        """A request that workers of several indexes can take: score on each, then pick."""
        costs, hashes = np.full(len(self.fleet_index.numbers.ranks), np.inf), {}
        for section in sections:
            mine = candidates[np.isin(candidates, section.numbers)]
            hashes[section] = self._call(routing.SCORE, call, section, mine)
            unit = 1 if self.config.is_cost_in_ms else section.block_size  # else in tokens
            costs[mine] = self._arrays_of(section).costs[mine] * unit
        number = self._pick(candidates, costs[candidates])
        section = self.fleet_index.section_of(self.fleet_index.numbers.rank(number))
        known = call._replace(hashes=hashes[section])
        self._call(routing.ACCOUNT, known, section, np.array([number]))
        return self._accept(request_id, section, hashes[section], self._out, call.now_s)

    def _pick(self, candidates: I64, costs: F64) -> int:
        if self.config.temperature > 0:
            return pick_softmax(candidates, costs, self.config.temperature, self._random)
        return pick_lowest(candidates, costs, self._random)

    def _call(self, stages: int, call: _Call, section: Section, candidates: I64) -> Hashes:
        """Call the kernel for one request; its hashes. What comes of it is in `_out`."""
        prompt, hashes, tokens = call.prompt, call.hashes, call.prompt.tokens
        if hashes is None:
            hashes = prompt.known_hashes(section.index.hasher)
        if hashes is None:
            hashes = np.empty(len(prompt) // section.block_size, dtype=np.uint64)
        else:
            tokens = _NO_TOKENS
        ends = np.array([len(prompt)])
        request = _Batch(tokens, ends, prompt.seed, hashes, call.now_s, call.answer_tokens)
        while not self._call_kernel(stages, request, section, candidates, self._out):
            number = int(candidates[0]) if stages == routing.ACCOUNT else None
            self._make_room(section, candidates, number, len(hashes))
        return hashes

    def _call_kernel(
        self, stages: int, batch: _Batch, section: Section, candidates: I64, out: F64
    ) -> int:
        """How many requests are done."""
        arrays = self._arrays_of(section)
        random = np.uint64(self._random.getrandbits(64))
        return int(routing.route(
            stages, batch.tokens, batch.ends, section.block_size, np.uint64(batch.seed),
            batch.now_s, random, batch.answer_tokens, candidates,
            arrays.index, arrays.fleet, batch.hashes, arrays.held, out,
        ))  # fmt: skip

    def _make_room(
        self, section: Section, candidates: I64, number: int | None, num_blocks: int
    ) -> None:
        """For a prompt of so many blocks, on whichever rank it goes to."""
        num_ranks = len(self.fleet_index.numbers.ranks)
        highest = int(candidates.max()) if number is None else number
        self._arrays_of(section).reserve(highest, num_blocks, num_ranks)

    def _route_at_once(
        self,
        prompts: list[Tokens],
        seed: int,
        candidates: I64,
        section: Section,
        now_s: float,
        max_tokens: int | None,
    ) -> list[Decision]:
        tokens = np.concatenate(prompts) if prompts else _NO_TOKENS
        lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        num_blocks = lengths // section.block_size
        hashes = np.empty(int(num_blocks.sum()), dtype=np.uint64)
        outs = np.zeros((len(prompts), routing.NUM_OUT))
        ends, hash_ends, done = np.cumsum(lengths), np.cumsum(num_blocks), 0
        decisions: list[Decision] = []
        while done < len(prompts):
            first, first_hash = (
                int(ends[done] - lengths[done]),
                int(hash_ends[done] - num_blocks[done]),
            )
            batch = _Batch(
                tokens[first:], ends[done:] - first, seed, hashes[first_hash:], now_s,
                _answer_tokens(max_tokens),
            )  # fmt: skip
            more = self._call_kernel(
                routing.BOTH, batch, section, candidates, outs[done:].reshape(-1)
            )
            for i in range(done, done + more):
                mine = hashes[int(hash_ends[i] - num_blocks[i]) : int(hash_ends[i])]
                decisions.append(self._accept(self._new_id(), section, mine, outs[i], now_s))
            done += more
            if done < len(prompts):
                self._make_room(section, candidates, None, int(num_blocks[done]))
        return decisions

    def _accept(
        self, request_id: str, section: Section, hashes: Hashes, out: F64, now_s: float
    ) -> Decision:
        (
            number, cost, depth, own_ms, prefill_ms, coming, new_tokens, cached, ahead, is_busy,
        ) = out.tolist()  # fmt: skip
        cached_tokens = int(depth) * section.block_size
        request = ActiveRequest(
            rank_number=int(number),
            sequence_hashes=hashes,
            prefill_tokens=new_tokens + cached - cached_tokens,
            prefill_ms=prefill_ms,
            num_coming=coming,
            routed_s=now_s,
            deadline_s=self.load.deadline_s(now_s),
            new_tokens=new_tokens,
            cached_tokens=cached,
            ahead_tokens=ahead,
            is_busy=is_busy > 0,
        )
        self.load.start(request_id, request)
        return Decision(
            request_id=request_id,
            rank=self.fleet_index.numbers.rank(int(number)),
            overlap_blocks=int(depth),
            cached_tokens=cached_tokens,
            prompt_blocks=len(hashes),
            cost=cost,
            block_size=section.block_size,
            predicted_ttft_ms=own_ms,
        )

    def _is_simple(self, sections: list[Section]) -> bool:
        """Whether one kernel call does all of a request."""
        is_kv = self.config.mode == "kv"
        return is_kv and len(sections) == 1 and not sections[0].index.bigrams

    def _arrays_of(self, section: Section) -> SectionArrays:
        arrays = self._arrays.get(section)
        if arrays is None:
            arrays = self._arrays[section] = SectionArrays(self.config, section, self.load)
        arrays.refresh(len(self.fleet_index.numbers.ranks))
        return arrays

    def _fleet_changed(self) -> None:
        self._candidates.clear()
        sections = self.fleet_index.sections
        self._arrays = {each: arrays for each, arrays in self._arrays.items() if each in sections}
        self.load.reserve(len(self.fleet_index.numbers.ranks))
        for rank in self.ranks:  # who moved to another index holds nothing
            self.load.set_resident(
                self.fleet_index.numbers.number_of(rank), self._num_resident(rank)
            )

    def _num_resident(self, rank: Rank) -> int:
        if rank not in self.fleet_index.numbers:
            return 0
        return self.fleet_index.section_of(rank).index.num_resident(rank)

    def _note_cache(self, rank: Rank, num_before: int, applied: Applied) -> None:
        """What events tell of the rank's cache: how full it is, and how large."""
        if rank not in self.fleet_index.numbers:
            return
        number, num_now = self.fleet_index.numbers.number_of(rank), self._num_resident(rank)
        self.load.set_resident(number, num_now)
        if applied.was_cleared:
            self.load.empty_cache(number)
        evicts = applied.num_removed > 0
        if self._capacity_of(rank).see(max(num_before, num_now), evicts=evicts):
            self._put_capacity(rank)

    def _capacity_of(self, rank: Rank) -> CacheCapacity:
        capacity = self._capacities.get(rank)
        if capacity is None:
            capacity = self._capacities[rank] = CacheCapacity(rank)
        return capacity

    def _put_capacity(self, rank: Rank) -> None:
        number = self.fleet_index.numbers.number_of(rank)
        self.load.set_capacity(number, self._capacities[rank].num_blocks)

    def _new_id(self) -> str:
        prefix, numbers = self._ids
        return f"{prefix}{next(numbers)}"


def _answer_tokens(max_tokens: int | None) -> float:
    return np.inf if max_tokens is None else float(max_tokens)
