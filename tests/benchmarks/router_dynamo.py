"""Dynamo's side of `make bench-router`: SelectionService of ai-dynamo-runtime 1.6.1, in process.

Runs in an environment of its own. The service is fed by sockets, as it takes events in no other
way, and asked through asyncio, as it answers in no other way.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from typing import Any

os.environ.setdefault("DYN_LOG", "error")

from dynamo._core import SelectionService

from tests.benchmarks.router_workload import (
    BLOCK_SIZE,
    NUM_PROMPTS,
    cache_blocks,
    cold_prompt,
    held_blocks,
    marker,
    warm_prompts,
)
from tests.benchmarks.sides import serve

CORES = sorted(os.sched_getaffinity(0))
TIMEOUT_S = 240.0


class Service:
    """build, then full, cold, many."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.ids, self.colds = itertools.count(), itertools.count()
        self.prompts: dict[int, list[list[int]]] = {}

    def measure(self, case: dict[str, Any]) -> Any:
        """Latencies in ns, of single requests."""
        return self.loop.run_until_complete(getattr(self, case["what"])(case))

    async def build(self, case: dict[str, Any]) -> int:
        """Follows one port per rank until everything that is sent there is known; how many."""
        os.sched_setaffinity(0, CORES[: case["cores"]])
        self.service = SelectionService(indexer_threads=4)
        self.num_ranks = len(case["ports"])
        capacity = cache_blocks(self.num_ranks)
        for rank, port in enumerate(case["ports"]):
            await self.service.upsert_worker(
                {
                    "worker_id": rank,
                    "model_name": "m",
                    "endpoint": f"http://127.0.0.1:{9000 + rank}",
                    "block_size": BLOCK_SIZE,
                    "data_parallel_start_rank": 0,
                    "data_parallel_size": 1,
                    "max_num_batched_tokens": 8192,
                    "total_kv_blocks": capacity,
                    "kv_events_endpoints": {0: f"tcp://127.0.0.1:{port}"},
                }
            )
        await self._until_known()
        for num_tokens in NUM_PROMPTS:
            self.prompts[num_tokens] = warm_prompts(num_tokens)
            await self._check(num_tokens)
        return self.num_ranks

    async def full(self, case: dict[str, Any]) -> list[int]:
        """Prompts that the last rank holds."""
        prompts = self.prompts[case["tokens"]]
        latencies = []
        for number in range(case["calls"]):
            answer, ns = await self._reserve(prompts[number % len(prompts)])
            assert answer["overlap"]["gpu"] == case["tokens"], answer["overlap"]
            latencies.append(ns)
            await self._end(answer)
        return latencies

    async def cold(self, case: dict[str, Any]) -> list[int]:
        """Prompts that nobody holds."""
        latencies = []
        for _ in range(case["calls"]):
            answer, ns = await self._reserve(cold_prompt(next(self.colds), case["tokens"]))
            latencies.append(ns)
            await self._end(answer)
        return latencies

    async def many(self, case: dict[str, Any]) -> list[float]:
        """Single requests that are all under way at once, which takes less than one by one."""
        prompts, latencies = self.prompts[case["tokens"]], []
        requests = [prompts[i % len(prompts)] for i in range(case["requests"])]
        for _ in range(case["calls"]):
            asked = [self._request(tokens) for tokens in requests]
            began = time.perf_counter_ns()
            answers = await asyncio.gather(*map(self.service.select_and_reserve, asked))
            latencies.append((time.perf_counter_ns() - began) / len(asked))
            for answer in answers:
                await self._end(answer)
        return latencies

    def _request(self, tokens: list[int]) -> dict[str, Any]:
        return {"model_name": "m", "token_ids": tokens, "selection_id": f"r{next(self.ids)}"}

    async def _reserve(self, tokens: list[int]) -> tuple[dict[str, Any], int]:
        request = self._request(tokens)
        began = time.perf_counter_ns()
        answer = await self.service.select_and_reserve(request)
        return answer, time.perf_counter_ns() - began

    async def _end(self, answer: dict[str, Any]) -> None:
        await self.service.prefill_complete(answer["selection_id"])
        await self.service.free_reservation(answer["selection_id"])

    async def _until_known(self) -> None:
        """Until every rank's last block is in."""
        deadline = time.monotonic() + TIMEOUT_S
        for rank in range(self.num_ranks):
            while (await self._depths(marker(rank))).get(rank) != 1:
                if time.monotonic() > deadline:
                    raise SystemExit(f"the last block of rank {rank} did not arrive")
                await asyncio.sleep(0.05)

    async def _check(self, num_tokens: int) -> None:
        """Every rank holds as much of the prompts as it should."""
        held = {r: held_blocks(num_tokens, r, self.num_ranks) for r in range(self.num_ranks)}
        for tokens in self.prompts[num_tokens]:
            depths = await self._depths(tokens)
            assert depths == {rank: depth for rank, depth in held.items() if depth}, depths

    async def _depths(self, tokens: list[int]) -> dict[int, int]:
        answer = await self.service.overlap_scores({"model_name": "m", "token_ids": tokens})
        depths = {each["worker_id"]: each["device_blocks"] for each in answer["workers"]}
        return {worker: depth for worker, depth in depths.items() if depth}


if __name__ == "__main__":
    serve(Service().measure, sys.stdin)
