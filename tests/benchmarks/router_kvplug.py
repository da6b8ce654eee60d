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


class Fleet:
    """build, then full, cold, many; with "kernel" in the case, the time of the kernel alone."""

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
        self.router = Router(RouterConfig(block_size=BLOCK_SIZE))
        for num_tokens in NUM_PROMPTS:
            self.lists[num_tokens] = warm_prompts(num_tokens)
            self.prompts[num_tokens] = [as_tokens(tokens) for tokens in self.lists[num_tokens]]
        hashed = self._hashed_prompts()
        capacity = cache_blocks(num_ranks, num_blocks)
        random = np.random.default_rng(1)
        for number in range(num_ranks):
            rank = Rank(f"w{number}")
            self.router.add_worker(rank.worker)
            self.router.set_cache_capacity(rank, capacity)
            for length in chain_lengths(num_ranks, num_blocks):
                self._store(rank, random.integers(1, 2**63, length, dtype=np.uint64))
            for num_tokens, hashes in hashed:
                self._store(rank, hashes[: held_blocks(num_tokens, number, num_ranks)])
        return len(self.router.index)

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
            self._store(decision.rank, hashes)
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

    def _timed(self, call: Callable[[Any], Any], prompt: Any, case: dict[str, Any]) -> Any:
        """The answer and ns: of the call, or of the kernel in it."""
        if case.get("kernel"):
            with timed_kernel() as spent:
                answer = call(prompt)
            assert spent, "the router did not call the kernel"
            return answer, sum(spent)
        began = perf_counter_ns()
        answer = call(prompt)
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

    def _store(self, rank: Rank, hashes: Any) -> None:
        if len(hashes):
            applied = self.router.apply_packed(rank, encode([PackedStored(hashes, hashes)]))
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
