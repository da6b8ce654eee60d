"""A reading replica of `make bench-cluster`: a Router that follows, in a process of its own.

In:  cases as JSON lines (tests/benchmarks/sides.py): open, await, close.
Out: when blocks were found, ns of the monotonic clock; CPU seconds.

After each message its last block is looked up as for a request, and only then the time is taken.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

from kvplug import Rank, Router, RouterConfig
from kvplug.index.apply_result import ApplyResult
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from kvplug.ingest.trust import Trust
from kvplug.nats.connection import NatsConnection
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import PublisherName, Subjects
from kvplug.topics import Topic
from kvplug.transports import TRANSPORTS
from kvplug.transports.nats import NatsTransport
from tests.benchmarks.cluster_events import BLOCK_SIZE, tokens_of
from tests.benchmarks.sides import serve

TIMEOUT_S = 60.0


class TimingRouter(Router):
    """`found`: (blocks that were stored until then, when the last of them was found).

    `looks`: whether it looks for them; else only the time is taken.
    """

    def __init__(self, *, looks: bool, blocks_per_event: int) -> None:
        super().__init__(RouterConfig(block_size=BLOCK_SIZE, speculative_ttl_s=0.0))
        self.found: list[tuple[int, int]] = []
        self._looks, self._blocks_per_event, self._num_stored = looks, blocks_per_event, 0

    def apply_packed(self, rank: Rank, payload: bytes, *, ts: float = 0.0) -> ApplyResult:
        applied = super().apply_packed(rank, payload, ts=ts)
        if applied.num_stored:
            self._num_stored += applied.num_stored
            if self._looks:
                self._look()
            self.found.append((self._num_stored, time.monotonic_ns()))
        return applied

    def _look(self) -> None:
        event = self._num_stored // self._blocks_per_event - 1
        tokens = tokens_of(event, self._blocks_per_event)
        decision = self.peek(tokens)
        assert decision.cached_tokens == len(tokens), (event, decision)


class Replica:
    """One at a time."""

    def __init__(self, case: dict[str, Any]) -> None:
        looks, self.blocks_per_event = case.get("looks", False), case.get("blocks", 16)
        self.router = TimingRouter(looks=looks, blocks_per_event=self.blocks_per_event)
        self._connection = None if case["via"] == "zmq" else _connected(case)
        self._transport = self._connection and _transport(self._connection)
        self.events = EventThread({**TRANSPORTS, "nats": lambda: self._transport})
        self.events.start()
        self.cpu_s = time.process_time()
        for worker in case["workers"]:
            self.router.add_worker(worker)
        self.followers = [Follower(self.router, Rank(worker)) for worker in case["workers"]]
        if case["via"] == "stream":
            self._read_stream(case["workers"])
        else:
            for follower, endpoint in zip(self.followers, _endpoints(case), strict=True):
                self.events.follow(follower, endpoint)

    def _read_stream(self, workers: list[str]) -> None:
        """From its first message on."""
        self.events.bind("nats://")
        for follower, worker in zip(self.followers, workers, strict=True):
            self.events.follow_topic(follower, Topic(str(PublisherName(worker, 0))))
        self._transport.start_after(0)

    @property
    def num_stored(self) -> int:
        return sum(each.num_stored for each in self.followers)

    def close(self) -> None:
        self.events.stop()
        if self._connection is not None:
            self._connection.stop()


def _connected(case: dict[str, Any]) -> NatsConnection:
    settings = NatsSettings(servers=tuple(case["servers"].split(",")), fleet=case["fleet"])
    connection = NatsConnection(settings, f"router-{case.get('router', 'bench')}")
    connection.start()
    return connection


def _transport(connection: NatsConnection) -> NatsTransport:
    subjects = Subjects(connection.settings.fleet)
    router_id = connection.name.removeprefix("router-")
    return NatsTransport(connection, subjects, router_id=router_id)


def _endpoints(case: dict[str, Any]) -> list[str]:
    if case["via"] == "zmq":
        return case["endpoints"]
    return [f"nats://{PublisherName(worker, 0)}" for worker in case["workers"]]


replicas: list[Replica] = []


def measure(case: dict[str, Any]) -> Any:
    acts = {
        "open": open_one, "await": await_blocks, "trusts": await_exact, "close": close,
    }  # fmt: skip
    return acts[case["what"]](case)


def open_one(case: dict[str, Any]) -> int:
    if "core" in case:
        os.sched_setaffinity(0, {case["core"]})
    replicas.append(Replica(case))
    return os.getpid()


def await_exact(case: dict[str, Any]) -> dict[str, int]:
    """Once every follower is exact."""
    del case
    [replica] = replicas
    deadline = time.monotonic() + TIMEOUT_S
    while any(each.trust.level is not Trust.EXACT for each in replica.followers):
        assert time.monotonic() < deadline, [str(each.trust) for each in replica.followers]
        time.sleep(0.005)
    replica.cpu_s = time.process_time()
    return {"num_stored": replica.num_stored}


def await_blocks(case: dict[str, Any]) -> dict[str, Any]:
    """Once so many blocks are there."""
    [replica] = replicas
    deadline = time.monotonic() + TIMEOUT_S
    while replica.num_stored < case["blocks"]:
        seen = [(dict(each.skipped), str(each.trust)) for each in replica.followers]
        assert time.monotonic() < deadline, (replica.num_stored, seen)
        time.sleep(0.005)
    found, replica.router.found = replica.router.found, []
    cpu_s, replica.cpu_s = replica.cpu_s, time.process_time()
    return {"found": found, "cpu_s": replica.cpu_s - cpu_s}


def close(case: dict[str, Any]) -> None:
    del case
    while replicas:
        replicas.pop().close()


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # between rounds nobody gives a sign of life
    serve(measure, sys.stdin)
