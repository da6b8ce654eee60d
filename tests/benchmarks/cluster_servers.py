"""Servers of `make bench-cluster`: one or three, the streams on them, and what they have used.

In:  how many nodes.   Out: their URL; CPU seconds and bytes of them all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import nats
import psutil
from nats.js import JetStreamContext, api, errors

from kvplug.nats.subjects import Subjects
from tests.nats_servers import Node, nats_servers

START_S = 60
_HOUR_S = 3600
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

    def written_bytes(self) -> int:
        """To disks, by all nodes."""
        return sum(each.io_counters().write_chars for each in self._processes)

    def prepare(self, fleet: str) -> None:
        """Make the stream of a fleet, as a router does (kvplug/cluster/streams.py)."""
        subjects = Subjects(fleet)

        async def make(js: JetStreamContext) -> None:
            await js.add_stream(
                name=subjects.stream, subjects=[subjects.all_events], max_age=_HOUR_S,
                max_bytes=2**32, duplicate_window=0.1, num_replicas=len(self._nodes),
                allow_direct=True,
            )  # fmt: skip

        self.run(make)

    def run(self, act: Callable[[JetStreamContext], Awaitable[_T]]) -> _T:
        """With a connection of its own; again until a cluster has its leader."""

        async def connected() -> _T:
            client = await nats.connect([node.url for node in self._nodes])
            try:
                return await act(client.jetstream(timeout=3))
            finally:
                await client.close()

        deadline = time.monotonic() + START_S
        while True:
            try:
                return asyncio.run(connected())
            except (errors.APIError, errors.ServiceUnavailableError, TimeoutError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

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
