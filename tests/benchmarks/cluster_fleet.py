"""Many ranks in one process: the load of a large fleet on servers and replicas, without the cost of
as many publishers.

In:  cases as JSON lines (tests/benchmarks/sides.py): open, paced, close.   Out: CPU seconds, bytes.

Each rank has a life of its own and says its events in order, over the stream (at most 64 messages
unacknowledged in all) or over a ZMQ socket of its own, and a beat every 2 s, as kvplug's publisher
does. Every second event removes what the oldest one of the rank stored.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import zmq
from nats.js import JetStreamContext

from kvplug.engines.life import Life, Numbered
from kvplug.events import BlockRemoved, EventBatch
from kvplug.nats.client import connect
from kvplug.nats.subjects import PublisherName, Subjects
from kvplug.protocol import HEARTBEAT_S, WorkerHello
from tests.benchmarks.cluster_events import BLOCK_SIZE, blocks_of, stored
from tests.benchmarks.sides import serve

WINDOW = 64
KEEP = 4
MAX_SOCKETS = 65_535


class BareRank:
    """What one publisher says."""

    def __init__(self, number: int, worker: str) -> None:
        self.name = PublisherName(worker, 0)
        self.life = Life(WorkerHello(block_size=BLOCK_SIZE, engine="bench"), history_bytes=0)
        self._next, self._held, self._removes = number << 16, deque[int](), False
        self.num_stored = 0

    def said(self, num_events: int, num_blocks: int) -> list[Numbered]:
        """The next message."""
        return self.life.apply([self._event(num_blocks) for _ in range(num_events)])

    def _event(self, num_blocks: int) -> EventBatch:
        self._removes = not self._removes and len(self._held) > KEEP
        if self._removes:
            names = tuple(blocks_of(self._held.popleft(), num_blocks))
            return EventBatch(events=(BlockRemoved(block_hashes=names),))
        self._held.append(self._next)
        self._next += 1
        self.num_stored += num_blocks
        return stored(self._next - 1, num_blocks)


class Streamed:
    """Carries messages into the stream of a fleet, beats over NATS core."""

    def __init__(self, case: dict[str, Any], ranks: list[BareRank]) -> None:
        self._servers, self._subjects = case["servers"].split(","), Subjects(case["fleet"])
        self._acknowledged: dict[PublisherName, int] = {}
        self._ranks = ranks

    async def open(self) -> None:
        self._client = await connect(self._servers)
        self._js: JetStreamContext = self._client.jetstream(publish_async_max_pending=WINDOW)
        for rank in self._ranks:
            await self.send(rank, rank.life.hello())
        await self.settle()

    async def send(self, rank: BareRank, message: Numbered) -> None:
        subject = self._subjects.events(rank.name)
        future = await self._js.publish_async(subject, message.payload)
        future.add_done_callback(
            lambda done: self._acknowledged.__setitem__(rank.name, done.result().seq)
        )

    async def beat(self, rank: BareRank) -> None:
        headers = {"Kvplug-Seq": str(self._acknowledged[rank.name])}
        subject = self._subjects.beats(rank.name)
        await self._client.publish(subject, rank.life.hello().payload, headers=headers)

    async def settle(self) -> None:
        await self._js.publish_async_completed()

    async def close(self) -> None:
        await self._client.close()

    def await_replicas(self, num: int) -> None:
        """The stream waits for them."""

    def endpoints(self) -> list[str]:
        return []


class Direct:
    """A ZMQ socket for each rank."""

    def __init__(self, case: dict[str, Any], ranks: list[BareRank]) -> None:
        del case
        self._ranks = ranks
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._sockets: dict[PublisherName, zmq.Socket[bytes]] = {}
        self._endpoints = []
        for rank in ranks:
            socket = self._context.socket(zmq.XPUB)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.XPUB_VERBOSE, 1)
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            self._endpoints.append(f"tcp://127.0.0.1:{port}")
            self._sockets[rank.name] = socket

    async def open(self) -> None:
        """Nothing: replicas connect later."""

    async def send(self, rank: BareRank, message: Numbered) -> None:
        number = message.number.to_bytes(8, "big")
        self._sockets[rank.name].send_multipart((b"", number, message.payload))

    async def beat(self, rank: BareRank) -> None:
        await self.send(rank, rank.life.hello())

    async def settle(self) -> None:
        """Sent is sent."""

    def await_replicas(self, num: int) -> None:
        """Then a hello, as to each newcomer."""
        for rank in self._ranks:
            socket = self._sockets[rank.name]
            for _ in range(num):
                assert socket.poll(30_000), "a replica has not subscribed"
                socket.recv()
            socket.send_multipart((b"", bytes(8), rank.life.hello().payload))

    async def close(self) -> None:
        self._context.destroy(linger=0)

    def endpoints(self) -> list[str]:
        return self._endpoints


class Fleet:
    """In one event loop, which runs during `paced` and `settle` only."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.loop = asyncio.new_event_loop()
        self._ranks = [BareRank(n, worker) for n, worker in enumerate(case["workers"])]
        self._shape = case.get("events", 1), case.get("blocks", 16)
        self.carrier = (Direct if case.get("via") == "zmq" else Streamed)(case, self._ranks)
        self._beats = self._forever()
        self.loop.run_until_complete(self.carrier.open())

    def _forever(self) -> Iterator[BareRank]:
        while True:
            yield from self._ranks

    async def _beat_until(self, ended: asyncio.Event) -> None:
        pause_s, began_s = HEARTBEAT_S / len(self._ranks), time.monotonic()
        for n, rank in enumerate(self._beats, 1):
            await self.carrier.beat(rank)
            await asyncio.sleep(began_s + n * pause_s - time.monotonic())
            if ended.is_set():
                return

    async def paced(self, rate: float, num: int) -> dict[str, float]:
        """So many messages, one rank after the other; with `num` 0 a second of beats."""
        ended = asyncio.Event()
        beating = asyncio.create_task(self._beat_until(ended))
        began_s, cpu_s, num_bytes = time.perf_counter(), time.process_time(), 0
        for n in range(num):
            await asyncio.sleep(max(0.0, began_s + n / rate - time.perf_counter()))
            rank = self._ranks[n % len(self._ranks)]
            for message in rank.said(*self._shape):
                num_bytes += len(message.payload)
                await self.carrier.send(rank, message)
        await asyncio.sleep(0 if num else HEARTBEAT_S / 2)
        await self.carrier.settle()
        elapsed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        ended.set()
        await beating
        num_stored = sum(rank.num_stored for rank in self._ranks)
        return {"elapsed_s": elapsed_s, "cpu_s": cpu_s, "bytes": num_bytes, "stored": num_stored}


fleets: list[Fleet] = []


def measure(case: dict[str, Any]) -> Any:
    if case["what"] == "open":
        fleets.append(Fleet(case))
        return fleets[0].carrier.endpoints()
    if case["what"] == "await":
        return fleets[0].carrier.await_replicas(case["num"])
    if case["what"] == "paced":
        [fleet] = fleets
        return fleet.loop.run_until_complete(fleet.paced(case["rate"], case["num"]))
    while fleets:
        fleet = fleets.pop()
        fleet.loop.run_until_complete(fleet.carrier.close())
    return None


if __name__ == "__main__":
    serve(measure, sys.stdin)
