"""What both sides of `make bench-index` do, around a Library of their own.

In:  a case on standard input.   Out: {"check", "num_blocks", "elapsed_ns", "calls_ns", ...}.

`check` has to be the same on both sides. Wherever a rate is measured, one pass is timed as a whole
and another one call by call, both on a fresh index: a clock per call would cost the faster side
more. What comes before a timed call is done before timing: encoding, arrays, lists.
"""

import gc
import os
import sys
from pathlib import Path
from time import perf_counter_ns

from tests.benchmarks import index_trace, index_workload
from tests.benchmarks.index_trace import Asked
from tests.benchmarks.sides import serve
from tests.benchmarks.splitmix import prompt

WARM_CALLS = 30


class Bench:
    """Measures cases of one Library; keeps what the last case has prepared for its next round."""

    def __init__(self, library_class):
        self._library_class = library_class
        self._key = self._prepared = None

    def measure(self, case):
        key = {name: value for name, value in case.items() if name != "calls"}
        if key != self._key:
            self._key, self._prepared = key, None
            self._prepared = getattr(self, f"_prepare_{case['what']}")(case)
        gc.collect()
        return getattr(self, f"_{case['what']}")(case)

    def _library(self, num_workers):
        return self._library_class(num_workers)

    def _calls(self, events, events_per_call):
        return list(self._library_class.calls(events, events_per_call))

    def _query(self, hashes, form="array"):
        return self._library_class.query(hashes, form)

    def _prepare_store(self, case):
        events = index_workload.stores(case["chains"], case["workers"], case["blocks_per_event"])
        fence = self._query(events[-1].hashes[:1])
        return self._calls(events, case["events_per_call"]), fence

    def _store(self, case):
        calls, fence = self._prepared
        elapsed, _ = timed(self._library(case["workers"]), calls, fence)
        library = self._library(case["workers"])
        latencies = timed_singly(library, calls)
        return {
            "num_blocks": case["chains"] * case["workers"] * index_workload.CHAIN_BLOCKS,
            "elapsed_ns": elapsed,
            "calls_ns": latencies,
            "check": self._depths_of_chains(library, case),
        }

    def _depths_of_chains(self, library, case):
        chains = (index_workload.Chain(number).hashes for number in range(case["chains"]))
        return [sum(library.depths(library.find(*self._query(c))).values()) for c in chains]

    def _prepare_remove(self, case):
        stored = index_workload.stores(case["chains"], 1, index_workload.BUILD_BLOCKS)
        removed = index_workload.removals(case["chains"], case["blocks_per_event"])
        fence = self._query(stored[-1].hashes[:1])
        return self._calls(stored, 1), self._calls(removed, case["events_per_call"]), fence

    def _remove(self, case):
        stored, removed, fence = self._prepared
        libraries = [self._library(1), self._library(1)]
        for library in libraries:
            timed(library, stored, fence)
        elapsed, _ = timed(libraries[0], removed, fence)
        return {
            "num_blocks": case["chains"] * index_workload.CHAIN_BLOCKS,
            "elapsed_ns": elapsed,
            "calls_ns": timed_singly(libraries[1], removed),
            "check": self._depths_of_chains(libraries[1], case),
        }

    def _prepare_match(self, case):
        events, hashes, depths = index_workload.held(case["shape"], case["workers"], case["blocks"])
        library = self._library(case["workers"])
        for call in self._calls(events, 1):
            library.apply(*call)
        query = self._query(hashes, case["form"])
        found = library.depths(library.find(*query))
        assert found == depths, "the answer is not what was stored"
        return library, query, sum(found.values())

    def _match(self, case):
        library, query, check = self._prepared
        return {"calls_ns": repeated(library.find, query, case["calls"]), "check": check}

    def _prepare_hash(self, case):
        return self._library_class.hashing(prompt(1, case["tokens"]), case["form"])

    def _hash(self, case):
        hash_blocks, arguments = self._prepared
        hashes = [int(number) for number in hash_blocks(*arguments)]
        calls_ns = repeated(hash_blocks, arguments, case["calls"])
        return {"calls_ns": calls_ns, "check": hashes}

    def _prepare_memory(self, case):
        """Everything that is loaded or compiled once is there before memory is read."""
        library = self._library(case["workers"])
        self._fill(library, index_workload.CHAIN_BLOCKS, case["workers"])

    def _memory(self, case):
        library = self._library(case["workers"])
        before = resident_bytes()
        self._fill(library, case["blocks"], case["workers"])
        gc.collect()
        return {
            "resident_bytes": resident_bytes() - before,
            "table_bytes": library.nbytes(),
            "check": case["blocks"],
        }

    def _fill(self, library, num_blocks, num_workers):
        for events in index_workload.fill(num_blocks, num_workers):
            for call in self._calls(events, 1):
                library.apply(*call)
        chain = index_workload.Chain(0, min(num_blocks, index_workload.CHAIN_BLOCKS))
        depths = library.depths(library.find(*self._query(chain.hashes)))
        assert depths == dict.fromkeys(range(num_workers), len(chain.hashes))

    def _prepare_replay(self, case):
        operations = index_trace.operations(index_trace.read_requests(Path(case["path"])))
        steps = []
        for event in index_trace.as_events(operations):
            is_query = isinstance(event, Asked)
            arguments = self._query(event.hashes) if is_query else self._calls([event], 1)[0]
            steps.append((is_query, arguments))
        return steps, sum(len(op.blocks) for op in operations)

    def _replay(self, case):
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


def timed(library, calls, fence):
    """ns until all is applied (a query waits for everything before it), and the last answer."""
    apply = library.apply
    began = perf_counter_ns()
    for worker, payload in calls:
        apply(worker, payload)
    answer = library.find(*fence)
    return perf_counter_ns() - began, answer


def timed_singly(library, calls):
    """ns of each call."""
    apply, latencies = library.apply, []
    for worker, payload in calls:
        began = perf_counter_ns()
        apply(worker, payload)
        latencies.append(perf_counter_ns() - began)
    return latencies


def repeated(call, arguments, num_calls):
    """ns of each call."""
    for _ in range(WARM_CALLS):
        call(*arguments)
    latencies = []
    for _ in range(num_calls):
        began = perf_counter_ns()
        call(*arguments)
        latencies.append(perf_counter_ns() - began)
    return latencies


def replayed(library, steps):
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


def replayed_singly(library, steps):
    """ns of each query, of each event, and [sum of all depths, sum of the deepest]."""
    finds, events, total, deepest = [], [], 0, 0
    for is_query, arguments in steps:
        call, latencies = (library.find, finds) if is_query else (library.apply, events)
        began = perf_counter_ns()
        answer = call(*arguments)
        latencies.append(perf_counter_ns() - began)
        if is_query:
            depths = library.depths(answer).values()
            total, deepest = total + sum(depths), deepest + max(depths, default=0)
    return finds, events, [total, deepest]


def resident_bytes():
    """What the process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run(library_class):
    """Serve cases on as many cores as BENCH_CORES says; garbage is collected between them only."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[-int(os.environ.get("BENCH_CORES", "1")) :])
    gc.disable()
    serve(Bench(library_class).measure, sys.stdin)
