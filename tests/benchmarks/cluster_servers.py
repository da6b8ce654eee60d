"""Servers of `make bench-cluster`: one or three, the streams on them, and what they have used.

In:  how many nodes.   Out: their URL; CPU seconds and bytes of them all.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psutil
from nats.js import JetStreamContext, api

from kvplug.cluster.streams import Streams, StreamSettings
from kvplug.errors import TransportError
from kvplug.nats.client import connect
from kvplug.nats.connection import NatsConnection
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import PublisherName, Subjects
from tests.nats_servers import Node, nats_servers

START_S = 60
_T = TypeVar("_T")


class Servers:
    """prepare, run; url, cpu_s, stored_bytes."""

    def __init__(self, nodes: list[Node]) -> None:
        self.url = ",".join(node.url for node in nodes)
        self._nodes = nodes
        self._processes = [psutil.Process(node.process.pid) for node in nodes if node.process]

    def cpu_s(self) -> float:
        """Of all nodes."""
        times = [each.cpu_times() for each in self._processes]
        return sum(each.user + each.system for each in times)

    def pin(self, core: int) -> None:
        """Run on this core only."""
        for process in self._processes:
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {core})

    def written_bytes(self) -> int:
        """To disks, by all nodes."""
        return sum(each.io_counters().write_chars for each in self._processes)

    def prepare(self, fleet: str) -> None:
        """Make the stream and the buckets of a fleet, as a router does."""
        connection = NatsConnection(self.settings(fleet), "prepare")
        connection.start()
        streams = Streams(
            connection,
            Subjects(fleet),
            StreamSettings(num_replicas=len(self._nodes), max_bytes=2**28),
        )
        try:
            _again(lambda: connection.submit(streams.ensure()).result())
        finally:
            connection.stop()

    def settings(self, fleet: str) -> NatsSettings:
        """Of a client."""
        return NatsSettings(servers=tuple(node.url for node in self._nodes), fleet=fleet)

    def run(self, act: Callable[[JetStreamContext], Awaitable[_T]]) -> _T:
        """With a connection of its own."""

        async def connected() -> _T:
            client = await connect([node.url for node in self._nodes])
            try:
                return await act(client.jetstream(timeout=30))
            finally:
                await client.close()

        return asyncio.run(connected())

    def publish(self, fleet: str, payload: bytes) -> None:
        """One message into its stream."""
        subject = Subjects(fleet).events(PublisherName("http://10.0.0.7:8000", 0))
        self.run(lambda js: js.publish(subject, payload))

    def state(self, fleet: str) -> api.StreamState:
        """Of its stream: messages, bytes, first_seq, last_seq."""

        async def read(js: JetStreamContext) -> Any:
            return (await js.stream_info(Subjects(fleet).stream)).state

        return self.run(read)


@contextmanager
def servers(num_nodes: int = 1) -> Iterator[Servers]:
    """Real ones, which end with the block."""
    with nats_servers(num_nodes) as nodes:
        yield Servers(nodes)


def _again(attempt: Callable[[], object]) -> None:
    """Until a cluster has its leader."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            attempt()
        except TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return
