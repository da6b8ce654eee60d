"""Deciding: a prompt to a rank, with the request counted as its load.

In:  token ids or hashes, candidates.   Out: Decisions.

All of it is one call of a kernel (kernels/routing.py) where the candidates are in one index; where
they are in several, each is asked, and the picked one told.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from copy import copy
from itertools import count
from typing import Any, NamedTuple, assert_never

import msgspec
import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError
from kvplug.events import Rank
from kvplug.hashing import Hashes, Tokens
from kvplug.kernels import costing, routing
from kvplug.kernels.candidates import least_loaded
from kvplug.router.config import RouterConfig
from kvplug.router.constraints import Constraints
from kvplug.router.first_tokens import UnreportedFirstTokens
from kvplug.router.fleet_index import FleetIndex
from kvplug.router.group_arrays import Adjustment, GroupArrays
from kvplug.router.index_group import IndexGroup
from kvplug.router.load import ActiveLoad, ActiveRequest
from kvplug.router.moe import aligned_blocks
from kvplug.router.options import NO_OPTIONS, RequestOptions
from kvplug.router.policies import (
    RendezvousHash,
    RoundRobin,
    draw_two,
    pick_cheapest,
    pick_random,
    pick_softmax,
)
from kvplug.router.prompt import NO_TOKENS, Prompt
from kvplug.setting import shown

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


class RankCost(NamedTuple):
    """A candidate, and what the request costs there."""

    rank: Rank
    cost: float


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes, and why.

    overlap_blocks: leading blocks that the chosen rank holds, `cached_tokens` in tokens;
    prompt_blocks: full blocks of the prompt; cost: of the chosen rank, in ms or in blocks as
    configured; block_size: how many tokens a block has there; predicted_ttft_ms: by the model of
    the rank's engine (kvplug/router/engine_model.py); ranked: the chosen rank, then others by their
    costs, as many as were asked for.
    """

    request_id: str
    rank: Rank
    overlap_blocks: int
    cached_tokens: int
    prompt_blocks: int
    cost: float
    block_size: int
    predicted_ttft_ms: float
    ranked: tuple[RankCost, ...] = ()


class Plan(NamedTuple):
    """Of a request: who may take it, and what it says of them, if anything."""

    candidates: I64
    adjustment: Adjustment | None = None


class _Requests(msgspec.Struct, gc=False):
    """As the kernel takes them: the tokens of all, their hashes, a row of each."""

    tokens: Tokens
    seed: Any  # an int: a kernel takes it in less time than np.uint64
    hashes: Hashes
    rows: F64


class Decider:
    """plan, then decide, or decide_many; fleet_changed. Not thread-safe.

    `on_decision` is called with each decision and its request as soon as they are made.
    """

    def __init__(
        self,
        config: RouterConfig,
        fleet_index: FleetIndex,
        load: ActiveLoad,
        random_: random.Random | None,
    ) -> None:
        self._config, self._fleet_index, self._load = config, fleet_index, load
        self._random = random_ or random.Random()
        self._wanted: Adjustment | None = None  # by the request at hand
        self._usual_plan: Plan | None = None  # of requests that say nothing of themselves
        self._constraints = Constraints(config, fleet_index, load)
        self._round_robin, self._rendezvous = RoundRobin(), RendezvousHash()
        self._arrays: dict[IndexGroup, GroupArrays] = {}
        self.unreported = UnreportedFirstTokens(fleet_index, load)
        self._row: F64 = np.zeros(routing.REQUEST_WIDTH)
        self._prefix, self._numbers = uuid.uuid4().hex[:16], count()
        self.on_decision: Callable[[Decision, ActiveRequest], None] = _unobserved

    def fleet_changed(self) -> None:
        """Ranks came or went, or are in another index now."""
        self._constraints.clear()
        self._usual_plan = None
        self._wanted = None  # factors of the former ranks
        self._rendezvous.fleet_changed(self._fleet_index.numbers.ranks)
        groups = self._fleet_index.groups
        self._arrays = {each: arrays for each, arrays in self._arrays.items() if each in groups}
        self._load.reserve(len(self._fleet_index.numbers.ranks))

    def note_last_request(self, now_ms: float) -> None:
        """Another process of this router has routed a request: the time between two requests is
        that between any two of them.
        """
        for arrays in self._arrays.values():
            if arrays.traffic[costing.NUM_ROUTED] > 0:
                last = max(arrays.traffic[costing.LAST_MS], now_ms)
                arrays.traffic[costing.LAST_MS] = last

    def plan(self, prompt: Prompt, options: RequestOptions, now_s: float) -> Plan:
        """Who may take a request; NoWorkerError names the constraint that leaves nobody."""
        if options is NO_OPTIONS and self._usual_plan is not None:
            return self._usual_plan
        candidates = self._constraints.candidates(options)
        if options is NO_OPTIONS:
            if self._constraints.is_never_busy:
                self._usual_plan = Plan(candidates)
            return Plan(candidates)
        override = options.override
        preference = self._constraints.preference(options.preferred_taints)
        if override is None:
            return Plan(candidates, preference)
        if not self._config.needs_index and (override.overlap_score_weight or override.moe_query):
            raise ConfigError(
                f"cannot route a request with {shown(override)}: expected a router with an "
                "overlap_score_weight above 0, this one has 0 and builds no index"
            )
        bonus: F64 | None = None
        if (query := override.moe_query) is not None:
            aligned = aligned_blocks(self._fleet_index, prompt, query.label, now_s)
            bonus = np.asarray(self._config.moe_boost * aligned, dtype=np.float64)
            if not query.fallback_to_unlabeled:
                text = f"expected one with blocks of the prompt that are labelled {query.label}"
                aligned_candidates = candidates[aligned[candidates] > 0]
                candidates = self._constraints.require_left(aligned_candidates, "moe_query", text)
        weight, temperature = override.overlap_score_weight, override.router_temperature
        factors = None if preference is None else preference.factors
        return Plan(candidates, Adjustment(weight, temperature, factors, bonus))

    def decide(
        self,
        prompt: Prompt,
        request_id: str | None,
        plan: Plan,
        options: RequestOptions,
        now_s: float,
    ) -> Decision:
        """Choose, and account; ConfigError for a request id that is in flight."""
        if request_id is None:
            request_id = self._new_id()
        elif request_id in self._load:
            self.require_new(request_id, "route")
        candidates, self._wanted = plan
        if self._config.mode != "kv":
            candidates = np.array([self._pick_by_mode(candidates, options.session)])
        groups = self._fleet_index.groups_with(candidates)
        if len(groups) > 1:
            return self._decide_among(prompt, request_id, candidates, now_s, options)
        request = self._request(prompt, groups[0], now_s, options)
        self._call(routing.BOTH, request, groups[0], candidates)
        ranked: tuple[RankCost, ...] = ()
        if options.num_ranked:
            number = int(self._row[routing.RANK])
            ranked = self._ranked(options.num_ranked, number, candidates)
        return self._accept(
            request_id, groups[0], request.hashes, self._row, now_s, options, ranked
        )

    def require_new(self, request_id: str, attempt: str) -> None:
        """ConfigError for a request id that is in flight."""
        if request_id in self._load:
            raise ConfigError(
                f"cannot {attempt} request {request_id!r}: this id is in flight already"
            )

    def peek(self, prompt: Prompt, plan: Plan, options: RequestOptions, now_s: float) -> Decision:
        """As `decide`, with nothing counted and nothing learnt; the decision has no request id."""
        candidates, self._wanted = plan
        if self._config.mode != "kv":
            turns = copy(self._round_robin)
            candidates = np.array([self._pick_by_mode(candidates, options.session)])
            self._round_robin = turns
        stages = routing.SCORE | routing.PEEK
        costs, requests = self._score(stages, prompt, candidates, now_s, options)
        number = self._pick(candidates, costs[candidates])
        group, arrays = self._group_of(number), self._arrays_of(self._group_of(number))
        depth = int(arrays.depth[number])
        return Decision(
            request_id="",
            rank=self._fleet_index.numbers.rank(number),
            overlap_blocks=depth,
            cached_tokens=depth * group.block_size,
            prompt_blocks=len(requests[group].hashes),
            cost=float(arrays.costs[number]),
            block_size=group.block_size,
            predicted_ttft_ms=float(arrays.own_ms[number]),
            ranked=self._ranked(options.num_ranked, number, candidates),
        )

    def new_tokens(self, prompt: Prompt, now_s: float) -> I64:
        """int64[ranks]: tokens of a prompt that each rank would have to compute, as far as anybody
        knows; nothing is counted or learnt.
        """
        self._wanted = None
        new: I64 = np.full(len(self._fleet_index.numbers.ranks), len(prompt), dtype=np.int64)
        ranks = [n for n, rank in enumerate(self._fleet_index.numbers.ranks) if rank is not None]
        here = np.array(ranks, dtype=np.int64)
        if len(here):
            _, requests = self._score(routing.SCORE | routing.PEEK, prompt, here, now_s, NO_OPTIONS)
            for group in requests:
                depth = self._arrays_of(group).depth[group.numbers]
                new[group.numbers] -= group.block_size * depth
        return new

    def book(
        self, prompt: Prompt, number: int, now_s: float, *, is_new: bool
    ) -> tuple[ActiveRequest, float]:
        """Count a request as load of a rank that somebody else has chosen; it, and its predicted
        time to first token in ms. `is_new`: it was not counted before, and tells of the traffic.
        """
        group, here, self._wanted = self._group_of(number), np.array([number]), None
        request = self._request(prompt, group, now_s, NO_OPTIONS)
        self._make_room(group, here, len(request.hashes))
        traffic = self._arrays_of(group).traffic
        before = traffic.copy()
        self._call(routing.SCORE, request, group, here)
        self._call(routing.ACCOUNT, request, group, here)
        if not is_new:
            traffic[:] = before
        booked = self._active_request(request.hashes, self._row, now_s)
        return booked, booked.own_ms

    def _pick_by_mode(self, candidates: I64, session: str) -> int:
        """The number of a rank, in a mode that does not go by cost."""
        match self._config.mode:
            case "round_robin":
                return self._round_robin.pick(candidates)
            case "random":
                return pick_random(candidates, self._random)
            case "power_of_two":
                return self._least_loaded(draw_two(candidates, self._random))
            case "rendezvous_hash" if session:
                return self._rendezvous.pick(candidates, session)
            case "least_loaded" | "direct" | "rendezvous_hash":
                return self._least_loaded(candidates)
            case "kv":
                raise AssertionError("the kernel picks by cost")
            case never:
                assert_never(never)

    def _least_loaded(self, candidates: I64) -> int:
        random_: Any = self._random.getrandbits(63)
        return int(least_loaded(candidates, self._load.ranks.reshape(-1), random_))

    def decide_many(
        self, prompts: list[Tokens], seed: int, options: RequestOptions, now_s: float
    ) -> list[Decision]:
        """As `decide` for each, with ids of ours; nothing is decided if one cannot be."""
        if not prompts:
            self.plan(Prompt(NO_TOKENS, seed), options, now_s)  # which refuses what it would
            return []
        given = [Prompt(tokens, seed) for tokens in prompts]
        has_query = options.override is not None and options.override.moe_query is not None
        num_plans = len(given) if has_query else 1
        plans = [self.plan(prompt, options, now_s) for prompt in given[:num_plans]]
        plans += [plans[0]] * (len(given) - num_plans)
        groups = self._fleet_index.groups_with(plans[0].candidates)
        is_alike = self._config.mode == "kv" and len(groups) == 1 and not has_query
        if is_alike and not groups[0].index.bigrams and not options.num_ranked:
            candidates, self._wanted = plans[0]
            return self._decide_at_once(prompts, seed, candidates, groups[0], now_s, options)
        return [
            self.decide(prompt, None, plan, options, now_s)
            for prompt, plan in zip(given, plans, strict=True)
        ]

    def expire_expected(self, request: ActiveRequest, now_s: float) -> None:
        """A request is over: drop twice as many overdue blocks as it may have brought. The next
        request would have to do it while somebody waits.
        """
        rank = self._fleet_index.numbers.rank(request.rank_number)
        expected = self._fleet_index.group_of(rank).index.speculative
        expected.expire(now_s, 2 * len(request.sequence_hashes) + expected.max_more_expired)

    def note_answer(self, request: ActiveRequest, num_tokens: int, now_s: float) -> None:
        """A request is over, answered with so many tokens."""
        rank = self._fleet_index.numbers.rank(request.rank_number)
        # Of an answer that came as a whole, nobody knows when its first token was there.
        began_s = request.routed_s if request.first_token_s is None else request.first_token_s
        arrays = self._arrays_of(self._fleet_index.group_of(rank))
        arrays.note_answer(num_tokens, 1e3 * (now_s - began_s))

    def _decide_among(
        self, prompt: Prompt, request_id: str, candidates: I64, now_s: float,
        options: RequestOptions,
    ) -> Decision:  # fmt: skip
        costs, requests = self._score(routing.SCORE, prompt, candidates, now_s, options)
        number = self._pick(candidates, costs[candidates])
        ranked = self._ranked(options.num_ranked, number, candidates)
        group = self._group_of(number)
        chosen = requests[group]
        self._call(routing.ACCOUNT, chosen, group, np.array([number]))
        return self._accept(request_id, group, chosen.hashes, self._row, now_s, options, ranked)

    def _score(
        self, stages: int, prompt: Prompt, candidates: I64, now_s: float, options: RequestOptions
    ) -> tuple[F64, dict[IndexGroup, _Requests]]:
        """float64[ranks], costs in one unit; the request as each index takes it."""
        costs, requests = np.full(len(self._fleet_index.numbers.ranks), np.inf), {}
        groups = self._fleet_index.groups_with(candidates)
        candidates_in = {each: candidates[np.isin(candidates, each.numbers)] for each in groups}
        for group, mine in candidates_in.items():
            requests[group] = self._request(prompt, group, now_s, options)
            # Before anything is scored: arrays that grow lose their scores.
            self._make_room(group, mine, len(requests[group].hashes))
        for group, mine in candidates_in.items():
            self._call(stages, requests[group], group, mine)
            costs[mine] = self._arrays_of(group).costs[mine] * self._unit(group)
        return costs, requests

    def _unit(self, group: IndexGroup) -> int:
        """Costs of indexes with several block sizes compare in milliseconds, or else in tokens."""
        return 1 if self._arrays_of(group).is_cost_in_ms else group.block_size

    def _ranked(self, num_ranked: int, chosen: int, candidates: I64) -> tuple[RankCost, ...]:
        """The chosen rank and then the cheapest others, as they were scored last."""
        if not num_ranked:
            return ()
        groups = {number: self._group_of(number) for number in candidates.tolist()}
        costs = {n: float(self._arrays_of(group).costs[n]) for n, group in groups.items()}
        order = sorted(groups, key=lambda n: (n != chosen, costs[n] * self._unit(groups[n])))
        numbers = self._fleet_index.numbers
        return tuple(RankCost(numbers.rank(n), costs[n]) for n in order[:num_ranked])

    def _group_of(self, number: int) -> IndexGroup:
        return self._fleet_index.group_of(self._fleet_index.numbers.rank(number))

    def _pick(self, candidates: I64, costs: F64) -> int:
        temperature = self._config.temperature
        if self._wanted is not None and self._wanted.temperature is not None:
            temperature = self._wanted.temperature
        if temperature > 0:
            return pick_softmax(candidates, costs, temperature, self._random)
        return pick_cheapest(candidates, costs, self._random)

    def _request(
        self, prompt: Prompt, group: IndexGroup, now_s: float, options: RequestOptions
    ) -> _Requests:
        """One request, in `_row`, whose hashes the kernel computes unless they are known."""
        hashes, tokens, row = prompt.known_hashes(group.index.hasher), NO_TOKENS, self._row
        if hashes is None:
            hashes, tokens = np.empty(len(prompt) // group.block_size, np.uint64), prompt.tokens
        row[routing.NUM_TOKENS], row[routing.NOW_S] = len(prompt), now_s
        row[routing.MAX_ANSWER_TOKENS] = options.max_answer_tokens
        return _Requests(tokens, prompt.seed, hashes, row)

    def _call(self, stages: int, request: _Requests, group: IndexGroup, candidates: I64) -> None:
        while not self._call_kernel(stages, request, group, candidates):
            self._make_room(group, candidates, len(request.hashes))

    def _call_kernel(
        self, stages: int, requests: _Requests, group: IndexGroup, candidates: I64
    ) -> int:
        """How many of the requests are done."""
        random_: Any = self._random.getrandbits(63)  # as `seed`
        return int(routing.route(
            stages, requests.seed, random_, requests.tokens, candidates,
            self._arrays_of(group).bundle, requests.hashes, requests.rows,
        ))  # fmt: skip

    def _make_room(self, group: IndexGroup, candidates: I64, num_blocks: int) -> None:
        """For a prompt of so many blocks, on whichever of the candidates it goes to."""
        num_ranks = len(self._fleet_index.numbers.ranks)
        self._arrays_of(group).reserve(candidates, num_blocks, num_ranks)

    def _decide_at_once(
        self, prompts: list[Tokens], seed: int, candidates: I64, group: IndexGroup, now_s: float,
        options: RequestOptions,
    ) -> list[Decision]:  # fmt: skip
        lengths = np.array([len(tokens) for tokens in prompts], dtype=np.int64)
        tokens = np.concatenate([NO_TOKENS, *prompts])
        ends, hash_ends = np.cumsum(lengths), np.cumsum(lengths // group.block_size)
        hashes = np.empty(int(hash_ends[-1]) if prompts else 0, dtype=np.uint64)
        rows, done = np.zeros((len(prompts), routing.REQUEST_WIDTH)), 0
        rows[:, routing.NUM_TOKENS], rows[:, routing.NOW_S] = lengths, now_s
        rows[:, routing.MAX_ANSWER_TOKENS] = options.max_answer_tokens
        decisions: list[Decision] = []
        while done < len(prompts):
            first, first_hash = (int(e[done - 1]) if done else 0 for e in (ends, hash_ends))
            rest = _Requests(tokens[first:], seed, hashes[first_hash:], rows[done:].reshape(-1))
            done += self._call_kernel(routing.BOTH, rest, group, candidates)
            for row in rows[len(decisions) : done]:
                at = len(decisions)
                mine = hashes[int(hash_ends[at - 1]) if at else 0 : int(hash_ends[at])]
                decisions.append(self._accept(self._new_id(), group, mine, row, now_s, options))
            if done < len(prompts):
                self._make_room(group, candidates, len(prompts[done]) // group.block_size)
        return decisions

    def _accept(  # noqa: PLR0913 - what becomes of one request
        self, request_id: str, group: IndexGroup, hashes: Hashes, row: F64, now_s: float,
        options: RequestOptions, ranked: tuple[RankCost, ...] = (),
    ) -> Decision:  # fmt: skip
        request = self._active_request(hashes, row, now_s)
        presumed_s = None
        if not options.reports_first_token:
            presumed_s = self.unreported.expect(request, request.own_ms)
        self._load.start(request_id, request, presumed_s)
        decision = Decision(
            request_id=request_id,
            rank=self._fleet_index.numbers.rank(request.rank_number),
            overlap_blocks=request.depth,
            cached_tokens=request.depth * group.block_size,
            prompt_blocks=len(hashes),
            cost=float(row[routing.COST]),
            block_size=group.block_size,
            predicted_ttft_ms=request.own_ms,
            ranked=ranked,
        )
        self.on_decision(decision, request)
        return decision

    def _active_request(self, hashes: Hashes, row: F64, now_s: float) -> ActiveRequest:
        """What a kernel has counted."""
        _, _, _, number, _, depth, own_ms, *prefill = row.tolist()
        deadline_s = self._load.deadline_s(now_s)
        request = ActiveRequest(int(number), hashes, now_s, deadline_s, *prefill)
        request.depth, request.own_ms = int(depth), own_ms
        return request

    def _arrays_of(self, group: IndexGroup) -> GroupArrays:
        arrays = self._arrays.get(group)
        if arrays is None:
            arrays = self._arrays[group] = GroupArrays(self._config, group, self._load)
        arrays.refresh(len(self._fleet_index.numbers.ranks))
        if arrays.adjustment is not self._wanted:
            arrays.adjust(self._wanted)
        return arrays

    def _new_id(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"


def _unobserved(decision: Decision, request: ActiveRequest) -> None:
    pass
