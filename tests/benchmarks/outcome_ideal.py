"""What ideal hits would give: the requests of `make bench-outcome` in virtual time.

In:  requests, their arrivals.   Out: the mean time to the first token.

Ideal is a fleet whose engines share one endless cache: a request computes only the blocks that no
request before it had, wherever it goes, and it goes where the fewest are. No router can have more
hits; a router that keeps each document in one place comes near.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvplug.sim.replay.engine import EngineSpec
from kvplug.sim.replay.fleet import Arrivals, replay
from kvplug.sim.replay.policies import make_policy
from kvplug.sim.replay.workload import BlockSource, Request, Workload, request_of
from kvplug.vllm_hashes import PrefixHasher
from tests.benchmarks.outcome_requests import BLOCK_SIZE, Ask
from tests.benchmarks.outcome_workloads import TIME_MODEL

ENDLESS = 2**24


def ideal_ttft_ms(
    asks: Sequence[Ask], *, num_engines: int, num_warm_up: int, rate: float, seed: int
) -> float:
    """Of the requests behind the warm-up, which come as in the open loop of this rate and seed."""
    specs = [EngineSpec(num_blocks=ENDLESS, block_size=BLOCK_SIZE, time_model=TIME_MODEL)]
    specs *= num_engines
    requests = _uncached(asks)[num_warm_up:]
    workload = Workload(name="ideal", block_size=BLOCK_SIZE, requests=requests)
    policy = make_policy("least_loaded", specs, seed)
    outcome = replay(workload, specs, policy, Arrivals(rate=rate), seed=seed)
    return 1e3 * float(np.mean(outcome.ttft_s))


def _uncached(asks: Sequence[Ask]) -> list[Request]:
    """Requests that share nothing, each as long as what is new in it."""
    nothing, source, requests = np.zeros(0, dtype=np.uint64), BlockSource(0), []
    for ask, num_new in zip(asks, new_tokens(asks), strict=True):
        requests.append(request_of(source, nothing, num_new, ask.max_tokens, BLOCK_SIZE))
    return requests


def new_tokens(asks: Sequence[Ask]) -> list[int]:
    """Of each prompt, the tokens in no block that was there before; at least one."""
    known: set[bytes] = set()
    result = []
    for ask in asks:
        blocks = _blocks(ask.tokens)
        num_known = next((i for i, b in enumerate(blocks) if b not in known), len(blocks))
        num_hits = min(num_known, (len(ask.tokens) - 1) // BLOCK_SIZE)
        result.append(len(ask.tokens) - num_hits * BLOCK_SIZE)
        known.update(_blocks((*ask.tokens, *ask.answer)))
    return result


def _blocks(tokens: Sequence[int]) -> list[bytes]:
    digests: list[bytes] = []
    PrefixHasher(BLOCK_SIZE, None, "").extend(digests, tokens)
    return digests
