"""kvplug's side of `make bench-router`: a Router as it comes, its time and that of its kernel."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import numpy as np

from kvplug import Decision, Rank, Router, RouterConfig
from kvplug.hashing import Tokens, as_tokens
from kvplug.kernels import routing
from kvplug.kernels._jit import compile_all
from kvplug.packed import PackedRemoved, PackedStored, encode
from tests.benchmarks.router_workload import (
    BLOCK_SIZE,
    FILLER_BLOCKS,
    NUM_PROMPTS,
    cache_blocks,
    chain_lengths,
    cold_prompt,
    held_blocks,
    warm_prompts,
)
from tests.benchmarks.sides import serve

CORES = sorted(os.sched_getaffinity(0))
# Of the tokens of a round. A rank that holds less may cost less: where all is held, the cache is
# full, and what is learnt of engines that answer at once is not much.
LEAST_HIT = 0.95
FEATURES: dict[str, Any] = {
    "host_credit": 0.7,
    "device_credit": 0.9,
    "device_credit_decay": 0.2,
    "request_weight": 0.5,
    "active_prefill_tokens_threshold": 10**9,
    "active_decode_blocks_threshold": 100.0,
}
OPTIONS: dict[str, Any] = {
    "model": "m",
    "max_tokens": 128,
    "required_taints": ("gpu",),
    "preferred_taints": {"zone": 0.5},
}


class Fleet:
    """build, then full, features, cold, many; with "kernel" in the case, of the kernel alone."""

    def __init__(self) -> None:
        self.colds = itertools.count()
        self.prompts: dict[int, list[Tokens]] = {}
        self.lists: dict[int, list[list[int]]] = {}

    def measure(self, case: dict[str, Any]) -> Any:
        """Latencies in ns, of single requests."""
        return getattr(self, case["what"])(case)

    def build(self, case: dict[str, Any]) -> int:
        """A warm index; how many blocks it has."""
        os.sched_setaffinity(0, CORES[: case["cores"]])
        compile_all()  # else the first answer would seem to come from a very slow engine
        num_ranks, num_blocks = case["ranks"], case.get("blocks", FILLER_BLOCKS)
        self.featured: Router | None = None
        for num_tokens in NUM_PROMPTS:
            self.lists[num_tokens] = warm_prompts(num_tokens)
            self.prompts[num_tokens] = [as_tokens(tokens) for tokens in self.lists[num_tokens]]
        self.num_ranks, self.num_blocks = num_ranks, num_blocks
        self.router = self._filled(RouterConfig(block_size=BLOCK_SIZE))
        return len(self.router.index)

    def _filled(self, config: RouterConfig, **of_workers: Any) -> Router:
        router, hashed = Router(config), self._hashed_prompts()
        capacity = cache_blocks(self.num_ranks, self.num_blocks)
        random = np.random.default_rng(1)
        for number in range(self.num_ranks):
            rank = Rank(f"w{number}")
            router.add_worker(rank.worker, **of_workers)
            router.set_cache_capacity(rank, capacity)
            for length in chain_lengths(self.num_ranks, self.num_blocks):
                _store(router, rank, random.integers(1, 2**63, length, dtype=np.uint64))
            for num_tokens, hashes in hashed:
                _store(router, rank, hashes[: held_blocks(num_tokens, number, self.num_ranks)])
        return router

    def features(self, case: dict[str, Any]) -> list[int]:
        """As full, with what a fleet may use: FEATURES of the router, OPTIONS of each request."""
        if self.featured is None:
            config = RouterConfig(block_size=BLOCK_SIZE, **FEATURES)
            self.featured = self._filled(config, model="m", taints=("gpu", "zone"))
        plain, self.router = self.router, self.featured
        try:
            return self.full({**case, "options": OPTIONS})
        finally:
            self.router = plain

    def full(self, case: dict[str, Any]) -> list[int]:
        """Prompts that the last rank holds, as arrays, or as lists if the case says so."""
        prompts: Any = (self.lists if case.get("lists") else self.prompts)[case["tokens"]]
        latencies, cached = [], []
        for number in range(case["calls"]):
            decision, ns = self._timed(self.router.route, prompts[number % len(prompts)], case)
            latencies.append(ns)
            cached.append(decision.cached_tokens)
            self._end(decision)
        assert sum(cached) >= LEAST_HIT * case["tokens"] * len(cached), cached
        return latencies

    def cold(self, case: dict[str, Any]) -> list[int]:
        """Prompts that nobody holds; the blocks are expected where they go, until the engine says
        that it stored them. It evicts them at once, so that the index stays as large as it is.
        """
        latencies = []
        for _ in range(case["calls"]):
            prompt = as_tokens(cold_prompt(next(self.colds), case["tokens"]))
            decision, ns = self._timed(self.router.route, prompt, case)
            assert decision.cached_tokens == 0, decision
            latencies.append(ns)
            hashes = self.router.index.hasher.sequence_hashes(prompt)
            _store(self.router, decision.rank, hashes)
            self.router.apply_packed(decision.rank, encode([PackedRemoved(hashes)]))
            self._end(decision)
        return latencies

    def many(self, case: dict[str, Any]) -> list[float]:
        """Requests that come together, in one call."""
        held, num_requests = self.prompts[case["tokens"]], case["requests"]
        prompts, latencies = [held[i % len(held)] for i in range(num_requests)], []
        for _ in range(case["calls"]):
            decisions, ns = self._timed(self.router.route_many, prompts, case)
            latencies.append(ns / num_requests)
            for decision in decisions:
                self._end(decision)
        return latencies

    def _timed(self, call: Callable[..., Any], prompt: Any, case: dict[str, Any]) -> Any:
        """The answer and ns: of the call, or of the kernel in it."""
        options = case.get("options", {})
        if case.get("kernel"):
            with timed_kernel() as spent:
                answer = call(prompt, **options)
            assert spent, "the router did not call the kernel"
            return answer, sum(spent)
        began = perf_counter_ns()
        answer = call(prompt, **options)
        return answer, perf_counter_ns() - began

    def _end(self, decision: Decision) -> None:
        self.router.first_token(decision.request_id)
        self.router.finish(decision.request_id)

    def _hashed_prompts(self) -> list[tuple[int, Any]]:
        hasher = Router(RouterConfig(block_size=BLOCK_SIZE)).index.hasher
        return [
            (num_tokens, hasher.sequence_hashes(tokens))
            for num_tokens, prompts in self.prompts.items()
            for tokens in prompts
        ]


def _store(router: Router, rank: Rank, hashes: Any) -> None:
    if len(hashes):
        applied = router.apply_packed(rank, encode([PackedStored(hashes, hashes)]))
        assert not applied.rejected, applied


@contextmanager
def timed_kernel() -> Iterator[list[int]]:
    """Nanoseconds of each call of the routing kernel, Numba's reading of the arguments included."""
    kernel, spent = routing.route, list[int]()

    def route(*arguments: Any) -> Any:
        began = perf_counter_ns()
        answer = kernel(*arguments)
        spent.append(perf_counter_ns() - began)
        return answer

    routing.route = route  # type: ignore[assignment]
    try:
        yield spent
    finally:
        routing.route = kernel


if __name__ == "__main__":
    serve(Fleet().measure, sys.stdin)
