"""kvplug's side of `make bench-thin`: Router.route, from a list and from an array."""

import sys
from time import perf_counter_ns

from kvplug import BlockStored, EventBatch, Rank, Router, RouterConfig
from kvplug.hashing import as_tokens
from tests.benchmarks.sides import serve
from tests.benchmarks.splitmix import prompt

_routers = {}


def router_for(num_workers, num_tokens, block_size):
    """Worker w holds the first (w + 1) / num_workers of the prompt."""
    key = num_workers, num_tokens
    if key not in _routers:
        router = Router(RouterConfig(block_size=block_size, speculative_ttl_s=0.0))
        tokens, num_blocks = prompt(1, num_tokens), num_tokens // block_size
        for w in range(num_workers):
            held = num_blocks * (w + 1) // num_workers
            router.add_worker(f"w{w}")
            event = BlockStored(
                block_hashes=tuple(range(1, held + 1)),
                token_ids=tuple(tokens[: held * block_size]),
                block_size=block_size,
            )
            router.apply(Rank(f"w{w}"), EventBatch(events=(event,)))
        _routers[key] = router
    return _routers[key]


def measure(case):
    router = router_for(case["workers"], case["tokens"], case["block_size"])
    tokens = prompt(1, case["tokens"])
    if case["input"] == "array":
        tokens = as_tokens(tokens)
    latencies = []
    for _ in range(case["calls"]):
        started = perf_counter_ns()
        decision = router.route(tokens)
        latencies.append(perf_counter_ns() - started)
        assert decision.overlap_blocks == case["tokens"] // case["block_size"]
        router.finish(decision.request_id)
    return latencies


if __name__ == "__main__":
    serve(measure, sys.stdin)
