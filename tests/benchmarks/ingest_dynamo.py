"""Dynamo's side of `make bench-ingest`: SelectionService of ai-dynamo-runtime, fed by the same
frames, on as many cores as the case says."""

import asyncio
import os
import sys
import time

os.environ.setdefault("DYN_LOG", "error")

from dynamo._core import SelectionService

from tests.benchmarks.ingest_tokens import BLOCK_SIZE, last_tokens
from tests.benchmarks.sides import serve

CORES = sorted(os.sched_getaffinity(0))
TIMEOUT_S = 60.0


class Service:
    """One service for all rounds; a worker for each."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.service = None
        self.num_workers = 0

    def measure(self, case):
        what = {"stream": self.stream, "queries": self.queries}[case["what"]]
        return self.loop.run_until_complete(what(case))

    async def stream(self, case):
        """[when the last block was in, monotonic ns]."""
        self.pin(case["cores"])
        await self.follow(case["port"])
        await self.until_known(last_tokens(case["seed"]))
        ended = time.monotonic_ns()
        await self.service.delete_worker(self.num_workers)
        return [ended]

    async def queries(self, case):
        """Latencies of select in ns while a stream comes in."""
        await self.follow(case["port"])
        request = {"model_name": "m", "token_ids": list(range(512 * BLOCK_SIZE))}
        latencies = []
        for _ in range(case["calls"]):
            began = time.perf_counter_ns()
            await self.service.select(request)
            latencies.append(time.perf_counter_ns() - began)
            await asyncio.sleep(0.0005)
        await self.until_known(last_tokens(case["seed"]))
        await self.service.delete_worker(self.num_workers)
        return latencies

    def pin(self, num_cores):
        """All threads, those of the service included."""
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), CORES[:num_cores])

    async def follow(self, port):
        if self.service is None:
            self.service = SelectionService(indexer_threads=4)
        self.num_workers += 1
        await self.service.upsert_worker(
            {
                "worker_id": self.num_workers,
                "model_name": "m",
                "endpoint": f"http://127.0.0.1:{9000 + self.num_workers}",
                "block_size": BLOCK_SIZE,
                "data_parallel_start_rank": 0,
                "data_parallel_size": 1,
                "max_num_batched_tokens": 8192,
                "total_kv_blocks": 1_000_000,
                "kv_events_endpoints": {0: f"tcp://127.0.0.1:{port}"},
            }
        )

    async def until_known(self, tokens):
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            answer = await self.service.overlap_scores({"model_name": "m", "token_ids": tokens})
            if any(worker["device_blocks"] for worker in answer["workers"]):
                return
            await asyncio.sleep(0.001)
        raise SystemExit(f"the last block did not arrive: {answer}")


if __name__ == "__main__":
    serve(Service().measure, sys.stdin)
