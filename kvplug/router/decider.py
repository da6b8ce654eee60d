"""Deciding: a prompt to a rank, with the request counted as its load.

In:  token ids or hashes, candidates.   Out: Decisions.

All of it is one call of a kernel (kernels/routing.py) where the candidates are in one index; where
they are in several, each is asked, and the picked one told.
"""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Callable, Collection
from itertools import count
from typing import Any, Final, NamedTuple, assert_never

import msgspec
import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError, NoWorkerError
from kvplug.events import Rank
from kvplug.hashing import BlockHasher, Hashes, Tokens
from kvplug.kernels import routing
from kvplug.router.config import RouterConfig
from kvplug.router.fleet_index import FleetIndex, IndexGroup
from kvplug.router.group_arrays import GroupArrays
from kvplug.router.load import ActiveLoad, ActiveRequest
from kvplug.router.policies import RoundRobin, pick_cheapest, pick_softmax
from kvplug.setting import finite, shown, whole

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

NO_TOKENS: Tokens = np.empty(0, dtype=np.uint32)

MAX_TOKENS: Final = 10_000_000
"""Of a prompt or an answer: far more than any engine takes, and what the fitted models can bear."""

_MAX_REMEMBERED: Final = 256


def checked_num_tokens(
    value: object, name: str, attempt: str, most: float = float(MAX_TOKENS)
) -> int:
    """A number of tokens that a caller gave; ConfigError if it cannot be one."""
    number = whole(value)
    if not 0 <= finite(number) <= most:
        bounds = f"0 to {most:,.0f}" if math.isfinite(most) else "0 or more"
        expected = f"expected {name} to be a whole number of tokens, {bounds}"
        raise ConfigError(f"cannot {attempt}: {expected}, got {shown(value)}")
    return int(number)


class Prompt:
    """What a request asks to be prefilled: len(prompt) tokens, and their hashes if no kernel
    computes them.
    """

    __slots__ = ("_given", "_hashes", "_num_tokens", "seed", "tokens")

    def __init__(
        self,
        tokens: Tokens,
        namespace_seed: int,
        hashes: Hashes | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """`hashes` of `num_tokens` tokens, which then need not be given."""
        self.tokens, self.seed, self._given = tokens, namespace_seed, hashes
        self._num_tokens = len(tokens) if num_tokens is None else num_tokens
        self._hashes: dict[tuple[int, int], Hashes] = {}

    def __len__(self) -> int:
        return self._num_tokens

    def known_hashes(self, hasher: BlockHasher) -> Hashes | None:
        """uint64[hasher.num_blocks(len(self))]; None if the routing kernel computes them."""
        if self._given is not None:
            return self._given
        if hasher.window == hasher.block_size:
            return None
        asked = hasher.block_size, hasher.window
        hashes = self._hashes.get(asked)
        if hashes is None:
            hashes = self._hashes[asked] = hasher.sequence_hashes(self.tokens, self.seed)
        return hashes


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


class Answer(NamedTuple):
    """What the caller says of the answer: how long it may get, whether `first_token` will be called
    when its first token comes.
    """

    max_tokens: int | None = None
    reports_first_token: bool = True

    @property
    def limit(self) -> float:
        """Tokens at most; ConfigError if that is no number of tokens."""
        if self.max_tokens is None:
            return math.inf
        limit = checked_num_tokens(self.max_tokens, "max_tokens", "route a request", math.inf)
        return float(min(limit, MAX_TOKENS))


class _Candidates:
    """Who may take a request: the numbers of ranks, remembered by what narrows the choice.

    Call `clear` when the fleet has changed.
    """

    def __init__(self, fleet_index: FleetIndex) -> None:
        self._fleet_index = fleet_index
        self._known: dict[tuple[str, frozenset[str] | None], I64] = {}

    def clear(self) -> None:
        """Somebody came or went, or has another model."""
        self._known.clear()

    def of(self, model: str, workers: Collection[str] | None) -> I64:
        """int64[n]: ranks of these workers that have the model; "" and None leave the choice."""
        asked = model, None if workers is None else frozenset(workers)
        numbers = self._known.get(asked)
        if numbers is None:
            if len(self._known) >= _MAX_REMEMBERED:
                self._known.clear()
            numbers = self._known[asked] = self._find(model, asked[1])
        return numbers

    def _find(self, model: str, workers: frozenset[str] | None) -> I64:
        allowed: Collection[str] | None = workers
        if model:
            allowed = self._fleet_index.workers_with(model, workers)
        ranks = enumerate(self._fleet_index.numbers.ranks)
        numbers = [
            number
            for number, rank in ranks
            if rank is not None and (allowed is None or rank.worker in allowed)
        ]
        return np.array(numbers, dtype=np.int64)


class _Requests(msgspec.Struct, gc=False):
    """As the kernel takes them: the tokens of all, their hashes, a row of each."""

    tokens: Tokens
    seed: Any  # an int: a kernel takes it in less time than np.uint64
    hashes: Hashes
    rows: F64


class Decider:
    """candidates, then decide or decide_many; fleet_changed. Not thread-safe.

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
        self._candidates = _Candidates(fleet_index)
        self._round_robin = RoundRobin()
        self._arrays: dict[IndexGroup, GroupArrays] = {}
        self._row: F64 = np.zeros(routing.REQUEST_WIDTH)
        self._prefix, self._numbers = uuid.uuid4().hex[:16], count()
        self.on_decision: Callable[[Decision, ActiveRequest], None] = _unobserved

    def fleet_changed(self) -> None:
        """Ranks came or went, or are in another index now."""
        self._candidates.clear()
        groups = self._fleet_index.groups
        self._arrays = {each: arrays for each, arrays in self._arrays.items() if each in groups}
        self._load.reserve(len(self._fleet_index.numbers.ranks))

    def candidates(self, model: str, workers: Collection[str] | None) -> I64:
        """Numbers of the ranks that can take a request; NoWorkerError if there are none."""
        if isinstance(workers, str):  # a collection of letters, which are workers of nobody
            raise ConfigError(f"workers must be a collection of names, got {shown(workers)}")
        candidates = self._candidates.of(model, workers)
        if not len(candidates):
            ranks = self._fleet_index.numbers.ranks
            known = ", ".join(str(rank) for rank in ranks if rank is not None) or "none"
            what = f"model {model!r}" if model else "the request"
            raise NoWorkerError(f"no worker can take {what}; known workers: {known}")
        return candidates

    def decide(
        self,
        prompt: Prompt,
        request_id: str | None,
        candidates: I64,
        now_s: float,
        answer: Answer,
    ) -> Decision:
        """Choose, and account; ConfigError for a request id that is in flight."""
        if request_id is None:
            request_id = self._new_id()
        elif request_id in self._load:
            raise ConfigError(f"cannot route request {request_id!r}: this id is in flight already")
        candidates = self._left_by_mode(candidates)
        groups = self._fleet_index.groups_with(candidates)
        if len(groups) > 1:
            return self._decide_among(groups, prompt, request_id, candidates, now_s, answer)
        request = self._request(prompt, groups[0], now_s, answer)
        self._call(routing.BOTH, request, groups[0], candidates)
        return self._accept(request_id, groups[0], request.hashes, self._row, now_s, answer)

    def _left_by_mode(self, candidates: I64) -> I64:
        """All of them, for the kernel to pick by cost, or the one that the mode has picked."""
        match self._config.mode:
            case "kv":
                return candidates
            case "round_robin":
                return np.array([self._round_robin.pick(candidates)])
            case never:
                assert_never(never)

    def decide_many(
        self, prompts: list[Tokens], seed: int, candidates: I64, now_s: float,
        answer: Answer,
    ) -> list[Decision]:  # fmt: skip
        """As `decide` for each, with ids of ours."""
        groups = self._fleet_index.groups_with(candidates)
        if self._config.mode == "kv" and len(groups) == 1 and not groups[0].index.bigrams:
            return self._decide_at_once(prompts, seed, candidates, groups[0], now_s, answer)
        return [
            self.decide(Prompt(tokens, seed), None, candidates, now_s, answer) for tokens in prompts
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
        self,
        groups: tuple[IndexGroup, ...],
        prompt: Prompt,
        request_id: str,
        candidates: I64,
        now_s: float,
        answer: Answer,
    ) -> Decision:
        costs, requests = np.full(len(self._fleet_index.numbers.ranks), np.inf), {}
        candidates_in = {each: candidates[np.isin(candidates, each.numbers)] for each in groups}
        for group, mine in candidates_in.items():
            requests[group] = self._request(prompt, group, now_s, answer)
            # Before anything is scored: arrays that grow lose their scores.
            self._make_room(group, mine, len(requests[group].hashes))
        for group, mine in candidates_in.items():
            self._call(routing.SCORE, requests[group], group, mine)
            unit = 1 if self._config.is_cost_in_ms else group.block_size  # else in tokens
            costs[mine] = self._arrays_of(group).costs[mine] * unit
        number = self._pick(candidates, costs[candidates])
        group = self._fleet_index.group_of(self._fleet_index.numbers.rank(number))
        chosen = requests[group]
        self._call(routing.ACCOUNT, chosen, group, np.array([number]))
        return self._accept(request_id, group, chosen.hashes, self._row, now_s, answer)

    def _pick(self, candidates: I64, costs: F64) -> int:
        if self._config.temperature > 0:
            return pick_softmax(candidates, costs, self._config.temperature, self._random)
        return pick_cheapest(candidates, costs, self._random)

    def _request(
        self, prompt: Prompt, group: IndexGroup, now_s: float, answer: Answer
    ) -> _Requests:
        """One request, in `_row`, whose hashes the kernel computes unless they are known."""
        hashes, tokens, row = prompt.known_hashes(group.index.hasher), NO_TOKENS, self._row
        if hashes is None:
            hashes, tokens = np.empty(len(prompt) // group.block_size, np.uint64), prompt.tokens
        row[routing.NUM_TOKENS], row[routing.NOW_S] = len(prompt), now_s
        row[routing.MAX_ANSWER_TOKENS] = answer.limit
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
        answer: Answer,
    ) -> list[Decision]:  # fmt: skip
        lengths = np.array([len(tokens) for tokens in prompts], dtype=np.int64)
        tokens = np.concatenate([NO_TOKENS, *prompts])
        ends, hash_ends = np.cumsum(lengths), np.cumsum(lengths // group.block_size)
        hashes = np.empty(int(hash_ends[-1]) if prompts else 0, dtype=np.uint64)
        rows, done = np.zeros((len(prompts), routing.REQUEST_WIDTH)), 0
        rows[:, routing.NUM_TOKENS], rows[:, routing.NOW_S] = lengths, now_s
        rows[:, routing.MAX_ANSWER_TOKENS] = answer.limit
        decisions: list[Decision] = []
        while done < len(prompts):
            first, first_hash = (int(e[done - 1]) if done else 0 for e in (ends, hash_ends))
            rest = _Requests(tokens[first:], seed, hashes[first_hash:], rows[done:].reshape(-1))
            done += self._call_kernel(routing.BOTH, rest, group, candidates)
            for row in rows[len(decisions) : done]:
                at = len(decisions)
                mine = hashes[int(hash_ends[at - 1]) if at else 0 : int(hash_ends[at])]
                decisions.append(self._accept(self._new_id(), group, mine, row, now_s, answer))
            if done < len(prompts):
                self._make_room(group, candidates, len(prompts[done]) // group.block_size)
        return decisions

    def _accept(
        self, request_id: str, group: IndexGroup, hashes: Hashes, row: F64, now_s: float,
        answer: Answer,
    ) -> Decision:  # fmt: skip
        _, _, _, number, cost, depth, own_ms, *prefill = row.tolist()
        number, depth = int(number), int(depth)
        deadline_s = self._load.deadline_s(now_s)
        request = ActiveRequest(number, hashes, now_s, deadline_s, *prefill)
        presumed_s = None if answer.reports_first_token else now_s + own_ms / 1e3
        self._load.start(request_id, request, presumed_s)
        decision = Decision(
            request_id=request_id,
            rank=self._fleet_index.numbers.rank(number),
            overlap_blocks=depth,
            cached_tokens=depth * group.block_size,
            prompt_blocks=len(hashes),
            cost=cost,
            block_size=group.block_size,
            predicted_ttft_ms=own_ms,
        )
        self.on_decision(decision, request)
        return decision

    def _arrays_of(self, group: IndexGroup) -> GroupArrays:
        arrays = self._arrays.get(group)
        if arrays is None:
            arrays = self._arrays[group] = GroupArrays(self._config, group, self._load)
        arrays.refresh(len(self._fleet_index.numbers.ranks))
        return arrays

    def _new_id(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"


def _unobserved(decision: Decision, request: ActiveRequest) -> None:
    pass
