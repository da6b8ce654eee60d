"""Continuous batching: who runs in a step, and with how many tokens.

In:  requests; per step, the tokens that a model would have sampled.
Out: the chunks of a step, the requests it preempted, the tokens it emitted.

It follows vLLM 0.32 (v1/core/sched/scheduler.py: first come, first served; chunked prefill; whole
prompts must fit; no speculative decoding, no asynchronous scheduling). Running requests go first,
in order of admission. If one finds no room, the last admitted is preempted: it gives up its blocks
and starts over, at the head of the queue. Nothing is admitted in a step that preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvplug.errors import ConfigError
from kvplug.sim.kv_cache import KvCache
from kvplug.sim.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The sizes of an engine, named as vLLM's flags.

    num_gpu_blocks counts vLLM's null block. A request of max_model_len tokens must fit alone.
    """

    num_gpu_blocks: int = 2048
    block_size: int = 16
    max_model_len: int = 8192
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        num_needed = 1 - (-self.max_model_len // self.block_size)
        if self.num_gpu_blocks < num_needed:
            raise ConfigError(
                f"num_gpu_blocks must be at least {num_needed}, for one request of max_model_len "
                f"{self.max_model_len} and the null block, got {self.num_gpu_blocks}"
            )


class Chunk(NamedTuple):
    """What one request computes in a step."""

    request: Request
    num_tokens: int

    @property
    def is_decode(self) -> bool:
        """Whether it is the one token that was sampled last, and not a (repeated) prefill."""
        return self.num_tokens == 1 and self.request.num_output_tokens > 0


class Plan(NamedTuple):
    """One step, before it runs."""

    chunks: list[Chunk]
    preempted: list[Request]


class Emitted(NamedTuple):
    """A token that a step produced. `finish_reason` is None while more will follow."""

    request: Request
    token_id: int
    finish_reason: str | None


class Scheduler:
    """add requests; per step, plan and then complete."""

    def __init__(self, config: SchedulerConfig, cache: KvCache) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._config, self._cache = config, cache

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self.waiting.append(request)

    def drop(self, request: Request) -> bool:
        """Forget a request, wherever it is; False if it is not here."""
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
                self._cache.free(request)
                return True
        return False

    def plan(self) -> Plan:
        """Decide on the next step, and allocate what it needs."""
        plan = Plan([], [])
        budget = self._plan_running(plan, self._config.max_num_batched_tokens)
        if not plan.preempted:
            self._plan_waiting(plan, budget)
        return plan

    def complete(self, plan: Plan, sample: Callable[[Request], int]) -> list[Emitted]:
        """The step has run: `sample` gives the next token of each request that is up to date."""
        emitted = []
        for request, num_tokens in plan.chunks:
            if request not in self._cache:
                continue  # dropped while the step ran
            request.num_computed += num_tokens
            if request.num_computed == request.num_tokens:
                emitted.append(self._emit(request, sample(request)))
        return emitted

    def _plan_running(self, plan: Plan, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            num_tokens = min(request.num_tokens - request.num_computed, budget)
            if not self._make_room(request, num_tokens, plan):
                break
            plan.chunks.append(Chunk(request, num_tokens))
            budget -= num_tokens
            index += 1
        return budget

    def _make_room(self, request: Request, num_tokens: int, plan: Plan) -> bool:
        """Preempt from the end until it fits; False if it was the last one itself."""
        while not self._cache.allocate(request, num_tokens):
            victim = self.running.pop()
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._cache.free(request)
        request.num_computed = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _plan_waiting(self, plan: Plan, budget: int) -> None:
        while self.waiting and budget and len(self.running) < self._config.max_num_seqs:
            request = self.waiting[0]
            hits = self._cache.find_hits(request)
            num_hit_tokens = len(hits) * self._config.block_size
            num_tokens = min(request.num_tokens - num_hit_tokens, budget)
            if not request.num_preemptions:
                request.num_cached_tokens = num_hit_tokens
            if not self._cache.allocate(request, num_tokens, hits, whole_must_fit=True):
                break
            self._cache.count_lookup(request, num_hit_tokens)
            self.running.append(self.waiting.popleft())
            request.num_computed = num_hit_tokens
            plan.chunks.append(Chunk(request, num_tokens))
            budget -= num_tokens

    def _emit(self, request: Request, token_id: int) -> Emitted:
        request.append(token_id)
        is_last = (
            request.num_output_tokens >= request.max_tokens
            or request.num_tokens >= self._config.max_model_len
        )
        if is_last:
            self.running.remove(request)
            self._cache.free(request)
        return Emitted(request, token_id, "length" if is_last else None)
