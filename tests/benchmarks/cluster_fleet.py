"""Many ranks over one connection: the load of a large fleet on servers and replicas, without the
cost of as many publishers.

In:  cases as JSON lines (tests/benchmarks/sides.py): open, paced, close.   Out: CPU seconds.

Each rank has a life of its own, says its events in order with at most 64 unacknowledged in all,
and a beat every 2 s, as kvplug's publisher does. Every second event removes what the oldest one of
the rank stored.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from typing import Any

import nats
from nats.js import JetStreamContext

from kvplug.engines.life import Life
from kvplug.events import BlockRemoved, EventBatch
from kvplug.nats.subjects import PublisherName, Subjects
from kvplug.protocol import HEARTBEAT_S, WorkerHello
from tests.benchmarks.cluster_events import BLOCK_SIZE, blocks_of, stored
from tests.benchmarks.sides import serve

WINDOW = 64
KEEP = 4


class BareRank:
    """One publisher: its subject, its life, what it holds."""

    def __init__(self, number: int, worker: str, fleet: str) -> None:
        name, subjects = PublisherName(worker, 0), Subjects(fleet)
        self.subject, self.beats = subjects.events(name), subjects.beats(name)
        self.life = Life(WorkerHello(block_size=BLOCK_SIZE, engine="bench"), history_bytes=0)
        self.acknowledged = 0  # the sequence of its last message in the stream
        self._next, self._held = number << 16, deque[int]()

    def said(self, num_blocks: int) -> list[bytes]:
        if len(self._held) > KEEP:
            names = tuple(blocks_of(self._held.popleft(), num_blocks))
            batch = EventBatch(events=(BlockRemoved(block_hashes=names),))
        else:
            self._held.append(self._next)
            batch = stored(self._next, num_blocks)
            self._next += 1
        return [message.payload for message in self.life.apply([batch])]


class Fleet:
    """open, paced, close; in one event loop."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.loop = asyncio.new_event_loop()
        workers, fleet = case["workers"], case["fleet"]
        self._ranks = [BareRank(n, worker, fleet) for n, worker in enumerate(workers)]
        self._num_blocks = case.get("blocks", 16)
        self.loop.run_until_complete(self._open(case["servers"].split(",")))

    async def _open(self, servers: list[str]) -> None:
        self._client = await nats.connect(servers)
        self._js: JetStreamContext = self._client.jetstream(publish_async_max_pending=WINDOW)
        for rank in self._ranks:
            await self._send(rank, rank.life.hello().payload)
        await self._js.publish_async_completed()
        self._beating = asyncio.create_task(self._beat())

    async def _send(self, rank: BareRank, payload: bytes) -> None:
        future = await self._js.publish_async(rank.subject, payload)
        future.add_done_callback(lambda done: setattr(rank, "acknowledged", done.result().seq))

    async def _beat(self) -> None:
        pause_s = HEARTBEAT_S / len(self._ranks)
        began_s = time.monotonic()
        for n in range(10**9):
            await asyncio.sleep(began_s + n * pause_s - time.monotonic())
            rank = self._ranks[n % len(self._ranks)]
            # Only what is acknowledged may be said: here, a rank's messages are seconds apart.
            headers = {"Kvplug-Seq": str(rank.acknowledged)}
            await self._client.publish(rank.beats, rank.life.hello().payload, headers=headers)

    async def paced(self, rate: float, num: int) -> dict[str, float]:
        began_s, cpu_s, num_bytes = time.perf_counter(), time.process_time(), 0
        for n in range(num):
            await asyncio.sleep(max(0.0, began_s + n / rate - time.perf_counter()))
            rank = self._ranks[n % len(self._ranks)]
            for payload in rank.said(self._num_blocks):
                num_bytes += len(payload)
                await self._send(rank, payload)
        await self._js.publish_async_completed()
        elapsed_s = time.perf_counter() - began_s
        return {
            "elapsed_s": elapsed_s, "cpu_s": time.process_time() - cpu_s, "bytes": num_bytes,
        }  # fmt: skip

    async def close(self) -> None:
        self._beating.cancel()
        await self._client.close()


fleets: list[Fleet] = []


def measure(case: dict[str, Any]) -> Any:
    if case["what"] == "open":
        fleets.append(Fleet(case))
        return None
    if case["what"] == "paced":
        [fleet] = fleets
        return fleet.loop.run_until_complete(fleet.paced(case["rate"], case["num"]))
    while fleets:
        fleet = fleets.pop()
        fleet.loop.run_until_complete(fleet.close())
    return None


if __name__ == "__main__":
    serve(measure, sys.stdin)
