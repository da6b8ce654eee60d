"""Dynamo's side of `make bench-thin`: compute_block_hash_for_seq and RadixTree.find_matches.

Runs in an environment with ai-dynamo-runtime 1.6.1; there is no in-process call that also chooses
and accounts, so this side does less work than Router.route.
"""

import json
import sys
from time import perf_counter_ns

from dynamo.llm import RadixTree, compute_block_hash_for_seq

from tests.benchmarks.sides import serve
from tests.benchmarks.splitmix import prompt

_trees = {}


def tree_for(num_workers, num_tokens, block_size):
    """Worker w holds the first (w + 1) / num_workers of the prompt."""
    key = num_workers, num_tokens
    if key not in _trees:
        tree, hashes = RadixTree(), compute_block_hash_for_seq(prompt(1, num_tokens), block_size)
        for w in range(num_workers):
            held = len(hashes) * (w + 1) // num_workers
            blocks = [{"block_hash": i + 1, "tokens_hash": hashes[i]} for i in range(held)]
            stored = {"parent_hash": None, "blocks": blocks}
            event = {"event_id": w + 1, "data": {"stored": stored}}
            tree.apply_event(w, json.dumps(event).encode())
        _trees[key] = tree
    return _trees[key]


def measure(case):
    tree = tree_for(case["workers"], case["tokens"], case["block_size"])
    tokens = prompt(1, case["tokens"])
    latencies = []
    for _ in range(case["calls"]):
        started = perf_counter_ns()
        matches = tree.find_matches(compute_block_hash_for_seq(tokens, case["block_size"]))
        scores = matches.scores
        latencies.append(perf_counter_ns() - started)
        assert max(scores.values()) == case["tokens"] // case["block_size"]
    return latencies


if __name__ == "__main__":
    serve(measure, sys.stdin)
