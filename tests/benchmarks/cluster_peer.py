"""A router of `make bench-cluster` that shares its load: requests at a rate, in a process.

In:  cases as JSON lines (tests/benchmarks/sides.py): open, paced, close.   Out: CPU seconds.

A request is a decision over 64 ranks, a first token, an end; requests have 256 blocks and are in
flight for as long as 32 others begin.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any

import numpy as np

from kvplug import Router, RouterConfig
from kvplug.cluster.sync import ReplicaSync
from kvplug.nats.connection import NatsConnection
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import Subjects
from tests.benchmarks.cluster_events import BLOCK_SIZE
from tests.benchmarks.sides import serve

NUM_RANKS, NUM_BLOCKS, IN_FLIGHT = 64, 256, 32


class Peer:
    """One router, with its sync or without."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.router = Router(RouterConfig(block_size=BLOCK_SIZE))
        for n in range(NUM_RANKS):
            self.router.add_worker(f"http://10.0.0.{n}:8000")
        settings = NatsSettings(servers=tuple(case["servers"].split(",")), fleet=case["fleet"])
        self._connection = NatsConnection(settings, f"router-{case['router']}")
        self._connection.start()
        subjects = Subjects(case["fleet"])
        self._sync = ReplicaSync(self.router, self._connection, subjects, case["router"])
        if case["syncs"]:
            self._sync.start()
        self._rng = np.random.default_rng(len(case["router"]))

    def paced(self, rate: float, num: int) -> dict[str, Any]:
        """So many requests; how long a decision, a first token and an end took this thread."""
        prompts = self._rng.integers(1, 30_000, (64, NUM_BLOCKS * BLOCK_SIZE), dtype=np.uint32)
        flying: deque[str] = deque()
        began_s, cpu_s, took_s = time.perf_counter(), time.process_time(), 0.0
        for n in range(num):
            time.sleep(max(0.0, began_s + n / rate - time.perf_counter()))
            thread_s = time.thread_time()
            flying.append(self.router.route(prompts[n % 64]).request_id)
            self.router.first_token(flying[-1])
            if len(flying) > IN_FLIGHT:
                self.router.finish(flying.popleft())
            took_s += time.thread_time() - thread_s
        for request_id in flying:
            self.router.finish(request_id)
        elapsed_s, counts = time.perf_counter() - began_s, self._sync.status().counts
        return {
            "cpu_s": time.process_time() - cpu_s, "deciding_s": took_s, "elapsed_s": elapsed_s,
            "heard": counts.heard, "sent": counts.sent,
        }  # fmt: skip

    def close(self) -> None:
        self._sync.stop()
        self._connection.stop()


peers: list[Peer] = []


def measure(case: dict[str, Any]) -> Any:
    if case["what"] == "open":
        peers.append(Peer(case))
        return None
    if case["what"] == "paced":
        return peers[0].paced(case["rate"], case["num"])
    while peers:
        peers.pop().close()
    return None


if __name__ == "__main__":
    serve(measure, sys.stdin)
