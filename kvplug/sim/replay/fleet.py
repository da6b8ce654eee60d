"""A fleet of engines under one policy, in virtual time.

In:  a workload, engines, a policy, how requests come.   Out: what became of each request.

Nothing is exchanged at once: a request takes HOP_S to its engine, a first token as long back, and
cache events EVENT_S to the router.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError
from kvplug.sim.replay.engine import CacheEvent, EngineSpec, Job, ReplayEngine, Step
from kvplug.sim.replay.workload import Request, Workload

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

HOP_S, EVENT_S = 0.001, 0.002


class Policy(Protocol):
    """Chooses engines; is told what a router would be told."""

    def choose(self, number: int, request: Request, now: float) -> int:
        """The number of the engine that gets request `number`."""

    def on_first_token(self, number: int, now: float) -> None:
        """The first token of a request came by."""

    def on_finished(self, number: int, num_answer_tokens: int, now: float) -> None:
        """A request is over."""

    def on_cache_events(self, engine: int, events: list[CacheEvent], now: float) -> None:
        """An engine has published what its cache did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How requests come: `clients` of which each sends its next one when it has its answer; or at
    random, `rate` a second on average; or when the workload says, `speed` times as fast.

    With clients and a rate, the first `num_closed` come from the clients, the others at random
    from the last of these answers on.
    """

    clients: int = 0
    rate: float = 0.0
    speed: float = 1.0
    num_closed: int = 0

    def __post_init__(self) -> None:
        if self.clients and self.rate and self.num_closed < 1:
            raise ConfigError(
                "arrivals from clients and at a rate: expected num_closed of at least 1, got "
                f"{self.num_closed}"
            )


@dataclass(slots=True)
class Outcome:
    """Of each request: seconds of arrival, to first token, to the end; tokens; engine number.

    As the client has them; -1 for requests that were not answered.
    """

    arrived_s: F64
    ttft_s: F64
    total_s: F64
    prompt_tokens: I64
    hit_tokens: I64
    engine: I64


class _Run:
    def __init__(
        self, workload: Workload, specs: Sequence[EngineSpec], policy: Policy, seed: int
    ) -> None:
        self.requests, self.policy = workload.requests, policy
        self.engines = [ReplayEngine(spec) for spec in specs]
        self.is_stepping = [False] * len(specs)
        self.random = np.random.default_rng(seed)
        self._events: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self._order = count()
        n = len(self.requests)
        self.outcome = Outcome(
            np.full(n, -1.0), np.full(n, -1.0), np.full(n, -1.0),
            np.array([request.num_tokens for request in self.requests], dtype=np.int64),
            np.zeros(n, dtype=np.int64), np.full(n, -1, dtype=np.int64),
        )  # fmt: skip
        self.next_of_loop: Iterator[int] = iter(())
        self.num_in_loop, self.after_loop = 0, self.nothing
        self.now = 0.0

    def at(self, time: float, action: Any, *arguments: Any) -> None:  # noqa: ANN401
        heapq.heappush(self._events, (time, next(self._order), action, arguments))

    def run(self) -> Outcome:
        while self._events:
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
        return self.outcome

    def arrive(self, number: int) -> None:
        request = self.requests[number]
        engine = self.policy.choose(number, request, self.now)
        self.outcome.arrived_s[number], self.outcome.engine[number] = self.now, engine
        self.at(self.now + HOP_S, self.reach, engine, Job(request, number))

    def reach(self, engine: int, job: Job) -> None:
        self.engines[engine].waiting.append(job)
        if not self.is_stepping[engine]:
            self.start_step(engine)

    def start_step(self, engine: int) -> None:
        step = self.engines[engine].step(self.now)
        self.is_stepping[engine] = step is not None
        if step is not None:
            self.at(step.ends_at, self.end_step, engine, step)

    def end_step(self, engine: int, step: Step) -> None:
        for job in step.first_tokens:
            self.at(self.now + HOP_S, self.first_token, job)
        for job in step.finished:
            self.at(self.now + HOP_S, self.finish, job)
        if step.events:
            self.at(self.now + EVENT_S, self.tell, engine, step.events)
        self.start_step(engine)

    def tell(self, engine: int, events: list[CacheEvent]) -> None:
        self.policy.on_cache_events(engine, events, self.now)

    def first_token(self, job: Job) -> None:
        number = job.number
        self.outcome.ttft_s[number] = self.now - self.outcome.arrived_s[number]
        self.outcome.hit_tokens[number] = job.num_hit_tokens
        self.policy.on_first_token(number, self.now)

    def finish(self, job: Job) -> None:
        number = job.number
        self.outcome.total_s[number] = self.now - self.outcome.arrived_s[number]
        self.policy.on_finished(number, job.request.num_answer_tokens, self.now)
        self.num_in_loop -= 1
        following = next(self.next_of_loop, None)
        if following is not None:
            self.at(self.now, self.arrive, following)
            self.num_in_loop += 1
        elif not self.num_in_loop:
            self.after_loop()

    def nothing(self) -> None:
        """There is only a loop, or none."""

    def start_loop(self, clients: int, num_requests: int) -> None:
        num_requests = min(num_requests, len(self.requests))
        self.next_of_loop = iter(range(num_requests))
        self.num_in_loop = min(clients, num_requests)
        for _ in range(self.num_in_loop):
            self.at(0.0, self.arrive, next(self.next_of_loop))

    def start_random(self, rate: float, first: int) -> None:
        gaps = self.random.exponential(1 / rate, max(0, len(self.requests) - first))
        for number, time in enumerate((self.now + np.cumsum(gaps)).tolist(), first):
            self.at(time, self.arrive, number)


def replay(
    workload: Workload,
    specs: Sequence[EngineSpec],
    policy: Policy,
    arrivals: Arrivals,
    *,
    seed: int = 0,
) -> Outcome:
    """All requests through a fleet; the same seed gives the same arrivals under every policy."""
    run = _Run(workload, specs, policy, seed)
    if arrivals.clients and arrivals.rate:
        run.start_loop(arrivals.clients, arrivals.num_closed)
        run.after_loop = partial(run.start_random, arrivals.rate, arrivals.num_closed)
    elif arrivals.clients:
        run.start_loop(arrivals.clients, len(workload.requests))
    elif arrivals.rate:
        run.start_random(arrivals.rate, 0)
    else:
        for number, request in enumerate(workload.requests):
            run.at((request.arrival_s or 0.0) / arrivals.speed, run.arrive, number)
    return run.run()
