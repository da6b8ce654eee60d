"""A simulated engine in virtual time: no clock, no thread, no socket.

In:  requests, and the time at which a step begins.
Out: tokens and events, and the time at which the step ends.

    engine = SimulatedEngine(SchedulerConfig(num_gpu_blocks=100, max_model_len=1024), TimeModel())
    engine.submit(range(64), max_tokens=4)
    while step := engine.step(now):
        now = step.ended_at

The HTTP server runs the same code in real time: begin_step, wait for as long as the step takes,
finish_step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import xxhash

from kvplug.errors import ConfigError
from kvplug.events import Event, EventBatch
from kvplug.sim.engine_config import TimeModel
from kvplug.sim.kv_cache import KvCache
from kvplug.sim.request import Request
from kvplug.sim.scheduler import Chunk, Emitted, Plan, Scheduler, SchedulerConfig
from kvplug.vllm_hashes import Lora

__all__ = ["Lora", "Request", "SchedulerConfig", "SimulatedEngine", "Step", "TimeModel"]

_VOCABULARY = range(32_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step did. Tokens and events are there when it has ended."""

    started_at: float
    ended_at: float
    chunks: tuple[Chunk, ...]
    preempted: tuple[Request, ...]
    emitted: tuple[Emitted, ...]
    events: tuple[Event, ...]

    def batch(self, dp_rank: int = 0) -> EventBatch:
        """The events as the engine would publish them."""
        return EventBatch(events=self.events, ts=self.ended_at, dp_rank=dp_rank)


class _Begun(NamedTuple):
    plan: Plan
    started_at: float
    ended_at: float


class SimulatedEngine:
    """submit, then step until it returns None. Generated tokens are taken from `vocabulary`."""

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        time_model: TimeModel | None = None,
        *,
        vocabulary: Sequence[int] = _VOCABULARY,
    ) -> None:
        self.config = config or SchedulerConfig()
        self.time_model = time_model or TimeModel()
        self.cache = KvCache(
            self.config.num_gpu_blocks, self.config.block_size, self.config.max_model_len
        )
        self.scheduler = Scheduler(self.config, self.cache)
        self.num_preemptions = self.num_prompt_tokens = self.num_generated_tokens = 0
        self._vocabulary = vocabulary
        self._ids = count()
        self._begun: _Begun | None = None

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        request_id: str | None = None,
        lora: Lora | None = None,
        salt: str = "",
    ) -> Request:
        """Queue a request; it is looked at when the next step begins."""
        self._require_fitting(len(prompt), max_tokens)
        name = f"request-{next(self._ids)}" if request_id is None else request_id
        size = self.config.block_size
        request = Request(name, prompt, max_tokens, block_size=size, lora=lora, salt=salt)
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> bool:
        """Drop a request; its blocks are free at once. False if it has ended already."""
        return self.scheduler.drop(request)

    def reset_prefix_cache(self) -> bool:
        """Forget the cache; refused while a request has blocks. Published with the next step."""
        return self.cache.pool.reset()

    @property
    def has_requests(self) -> bool:
        """Whether a step would have anything to do."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self, now: float) -> Step | None:
        """One whole step that begins now; None if there are no requests."""
        return None if self.begin_step(now) is None else self.finish_step()

    def begin_step(self, now: float) -> float | None:
        """Schedule a step; returns when it ends, or None if there are no requests."""
        if self._begun is not None:
            raise RuntimeError("begin_step: the step before has not been finished")
        if not self.has_requests:
            return None
        plan = self.scheduler.plan()
        self.num_preemptions += len(plan.preempted)
        ended_at = now + self._duration_s(plan)
        self._begun = _Begun(plan, now, ended_at)
        return ended_at

    def finish_step(self) -> Step:
        """The step that was begun has run: tokens are sampled, events taken."""
        if self._begun is None:
            raise RuntimeError("finish_step: no step was begun")
        (plan, started_at, ended_at), self._begun = self._begun, None
        emitted = self.scheduler.complete(plan, self._sample)
        self.num_generated_tokens += len(emitted)
        starting = (token.request for token in emitted if token.request.num_output_tokens == 1)
        self.num_prompt_tokens += sum(request.num_prompt_tokens for request in starting)
        return Step(
            started_at=started_at,
            ended_at=ended_at,
            chunks=tuple(plan.chunks),
            preempted=tuple(plan.preempted),
            emitted=tuple(emitted),
            events=self.cache.take_events(),
        )

    def _duration_s(self, plan: Plan) -> float:
        num_decodes = sum(chunk.is_decode for chunk in plan.chunks)
        num_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
        return self.time_model.step_s(
            num_prefill_tokens=num_tokens - num_decodes, num_decodes=num_decodes
        )

    def _sample(self, request: Request) -> int:
        """Drawn by all that the request holds so far: equal prompts get equal answers."""
        hashes = request.block_hashes
        content = hashes[-1] if hashes else b""
        rest = request.token_ids[len(hashes) * self.config.block_size :]
        number = xxhash.xxh3_64_intdigest(content + array("Q", rest).tobytes())
        return self._vocabulary[number % len(self._vocabulary)]

    def _require_fitting(self, num_prompt_tokens: int, max_tokens: int) -> None:
        limit = self.config.max_model_len
        if num_prompt_tokens < 1 or max_tokens < 1:
            raise ConfigError(
                "a request needs at least one prompt token and max_tokens of at least 1, got "
                f"{num_prompt_tokens} and {max_tokens}"
            )
        if num_prompt_tokens + max_tokens > limit:
            raise ConfigError(
                f"prompt and output must fit into max_model_len, {limit} tokens: the prompt has "
                f"{num_prompt_tokens}, and max_tokens is {max_tokens}"
            )
