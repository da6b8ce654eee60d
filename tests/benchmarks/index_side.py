"""What both sides of `make bench-index` do, around a Library of their own.

In:  a case on standard input.   Out: {"check", "num_blocks", "elapsed_ns", "calls_ns", ...}.

`check` has to be the same on both sides. Wherever a rate is measured, one pass is timed as a whole
and another one call by call, both on a fresh index: a clock per call would cost the faster side
more. What comes before a timed call is done before timing: encoding, arrays, lists.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Protocol

from tests.benchmarks import index_trace, index_workload
from tests.benchmarks.index_trace import Asked
from tests.benchmarks.index_workload import Event
from tests.benchmarks.sides import serve
from tests.benchmarks.splitmix import prompt

WARM_CALLS = 30

Case = dict[str, Any]
Answer = dict[str, Any]
Arguments = tuple[Any, ...]
Call = tuple[Any, bytes]
"""A worker, as the library calls it, and a payload."""


class Library(Protocol):
    """An index and its calls; the timed ones are the library's own, with nothing around them.

    The arguments of `apply` are made by `calls`, those of `find` by `query`.
    """

    apply: Callable[[Any, bytes], object]
    find: Callable[..., Any]

    def __init__(self, num_workers: int) -> None: ...

    @staticmethod
    def calls(events: Iterable[Event], events_per_call: int) -> Iterable[Call]:
        """What stores and removes, encoded."""

    @staticmethod
    def query(hashes: list[int], form: str) -> Arguments:
        """From a list or, where the library takes it, an array."""

    @staticmethod
    def hashing(tokens: list[int], form: str) -> tuple[Callable[..., Any], Arguments]:
        """The call that hashes blocks, and its arguments."""

    def depths(self, answer: Any) -> dict[int, int]:
        """{worker: depth} of what `find` answered, of those with any."""

    def nbytes(self) -> int:
        """Of all tables, as far as the library knows."""


class Bench:
    """Measures cases of one Library; keeps what the last case has prepared for its next round."""

    def __init__(self, library_class: type[Library]) -> None:
        self._library_class = library_class
        self._key: Case | None = None
        self._prepared: Any = None

    def measure(self, case: Case) -> Answer:
        """One round."""
        key = {name: value for name, value in case.items() if name != "calls"}
        if key != self._key:
            self._key, self._prepared = key, None
            self._prepared = getattr(self, f"_prepare_{case['what']}")(case)
        gc.collect()
        answer: Answer = getattr(self, f"_{case['what']}")(case)
        return answer

    def _library(self, num_workers: int) -> Library:
        return self._library_class(num_workers)

    def _calls(self, events: Iterable[Event], events_per_call: int) -> list[Call]:
        return list(self._library_class.calls(events, events_per_call))

    def _query(self, hashes: list[int], form: str = "array") -> Arguments:
        return self._library_class.query(hashes, form)

    def _prepare_store(self, case: Case) -> tuple[list[Call], Arguments]:
        events = index_workload.stores(case["chains"], case["workers"], case["blocks_per_event"])
        fence = self._query(events[-1].hashes[:1])
        return self._calls(events, case["events_per_call"]), fence

    def _store(self, case: Case) -> Answer:
        calls, fence = self._prepared
        elapsed = timed(self._library(case["workers"]), calls, fence)
        library = self._library(case["workers"])
        latencies = timed_singly(library, calls)
        return {
            "num_blocks": case["chains"] * case["workers"] * index_workload.CHAIN_BLOCKS,
            "elapsed_ns": elapsed,
            "calls_ns": latencies,
            "check": self._depths_of_chains(library, case),
        }

    def _depths_of_chains(self, library: Library, case: Case) -> list[int]:
        chains = (index_workload.Chain(number).hashes for number in range(case["chains"]))
        return [sum(library.depths(library.find(*self._query(c))).values()) for c in chains]

    def _prepare_remove(self, case: Case) -> tuple[list[Call], list[Call], Arguments]:
        stored = index_workload.stores(case["chains"], 1, index_workload.BUILD_BLOCKS)
        removed = index_workload.removals(case["chains"], case["blocks_per_event"])
        fence = self._query(stored[-1].hashes[:1])
        return self._calls(stored, 1), self._calls(removed, case["events_per_call"]), fence

    def _remove(self, case: Case) -> Answer:
        stored, removed, fence = self._prepared
        libraries = [self._library(1), self._library(1)]
        for library in libraries:
            timed(library, stored, fence)
        elapsed = timed(libraries[0], removed, fence)
        return {
            "num_blocks": case["chains"] * index_workload.CHAIN_BLOCKS,
            "elapsed_ns": elapsed,
            "calls_ns": timed_singly(libraries[1], removed),
            "check": self._depths_of_chains(libraries[1], case),
        }

    def _prepare_match(self, case: Case) -> tuple[Library, Arguments, int]:
        events, hashes, depths = index_workload.held(case["shape"], case["workers"], case["blocks"])
        library = self._library(case["workers"])
        for call in self._calls(events, 1):
            library.apply(*call)
        query = self._query(hashes, case["form"])
        found = library.depths(library.find(*query))
        assert found == depths, "the answer is not what was stored"
        return library, query, sum(found.values())

    def _match(self, case: Case) -> Answer:
        library, query, check = self._prepared
        return {"calls_ns": repeated(library.find, query, case["calls"]), "check": check}

    def _prepare_hash(self, case: Case) -> tuple[Callable[..., Any], Arguments]:
        return self._library_class.hashing(prompt(1, case["tokens"]), case["form"])

    def _hash(self, case: Case) -> Answer:
        hash_blocks, arguments = self._prepared
        hashes = [int(number) for number in hash_blocks(*arguments)]
        calls_ns = repeated(hash_blocks, arguments, case["calls"])
        return {"calls_ns": calls_ns, "check": hashes}

    def _prepare_memory(self, case: Case) -> None:
        """Everything that is loaded or compiled once is there before memory is read."""
        library = self._library(case["workers"])
        self._fill(library, index_workload.CHAIN_BLOCKS, case["workers"])

    def _memory(self, case: Case) -> Answer:
        library = self._library(case["workers"])
        before = resident_bytes()
        self._fill(library, case["blocks"], case["workers"])
        gc.collect()
        return {
            "resident_bytes": resident_bytes() - before,
            "table_bytes": library.nbytes(),
            "check": case["blocks"],
        }

    def _fill(self, library: Library, num_blocks: int, num_workers: int) -> None:
        for events in index_workload.fill(num_blocks, num_workers):
            for call in self._calls(events, 1):
                library.apply(*call)
        chain = index_workload.Chain(0, min(num_blocks, index_workload.CHAIN_BLOCKS))
        depths = library.depths(library.find(*self._query(chain.hashes)))
        assert depths == dict.fromkeys(range(num_workers), len(chain.hashes))

    def _prepare_replay(self, case: Case) -> tuple[list[tuple[bool, Arguments]], int]:
        operations = index_trace.operations(index_trace.read_requests(Path(case["path"])))
        steps: list[tuple[bool, Arguments]] = []
        for event in index_trace.as_events(operations):
            if isinstance(event, Asked):
                steps.append((True, self._query(event.hashes)))
            else:
                steps.append((False, self._calls([event], 1)[0]))
        return steps, sum(len(op.blocks) for op in operations)

    def _replay(self, case: Case) -> Answer:
        steps, num_blocks = self._prepared
        elapsed = replayed(self._library(index_trace.NUM_WORKERS), steps)
        finds, events, check = replayed_singly(self._library(index_trace.NUM_WORKERS), steps)
        return {
            "num_blocks": num_blocks,
            "elapsed_ns": elapsed,
            "calls_ns": finds,
            "events_ns": events,
            "check": check,
        }


def timed(library: Library, calls: list[Call], fence: Arguments) -> int:
    """ns until all is applied: a query waits for everything before it."""
    apply = library.apply
    began = perf_counter_ns()
    for worker, payload in calls:
        apply(worker, payload)
    library.find(*fence)
    return perf_counter_ns() - began


def timed_singly(library: Library, calls: list[Call]) -> list[int]:
    """ns of each call."""
    apply, latencies = library.apply, []
    for worker, payload in calls:
        began = perf_counter_ns()
        apply(worker, payload)
        latencies.append(perf_counter_ns() - began)
    return latencies


def repeated(call: Callable[..., Any], arguments: Arguments, num_calls: int) -> list[int]:
    """ns of each call."""
    for _ in range(WARM_CALLS):
        call(*arguments)
    latencies = []
    for _ in range(num_calls):
        began = perf_counter_ns()
        call(*arguments)
        latencies.append(perf_counter_ns() - began)
    return latencies


def replayed(library: Library, steps: list[tuple[bool, Arguments]]) -> int:
    """ns for all steps."""
    apply, find = library.apply, library.find
    began = perf_counter_ns()
    for is_query, arguments in steps:
        if is_query:
            find(*arguments)
        else:
            apply(*arguments)
    find(*steps[0][1])
    return perf_counter_ns() - began


def replayed_singly(
    library: Library, steps: Iterable[tuple[bool, Arguments]]
) -> tuple[list[int], list[int], list[int]]:
    """ns of each query, of each event, and [sum of all depths, sum of the deepest]."""
    finds: list[int] = []
    events: list[int] = []
    total = deepest = 0
    for is_query, arguments in steps:
        call, latencies = (library.find, finds) if is_query else (library.apply, events)
        began = perf_counter_ns()
        answer = call(*arguments)
        latencies.append(perf_counter_ns() - began)
        if is_query:
            depths = library.depths(answer).values()
            total, deepest = total + sum(depths), deepest + max(depths, default=0)
    return finds, events, [total, deepest]


def resident_bytes() -> int:
    """What the process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run(library_class: type[Library]) -> None:
    """Serve cases on as many cores as BENCH_CORES says; garbage is collected between them only."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[-int(os.environ.get("BENCH_CORES", "1")) :])
    gc.disable()
    serve(Bench(library_class).measure, sys.stdin)
