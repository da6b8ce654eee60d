"""How many blocks a second a replica takes from the stream, with all its threads on one core.

In:  shapes of messages, rounds.
Out: {"N events of M blocks": {"M_blocks_per_s", "M_blocks_per_cpu_s", "cpu_us" a message, of the
replica and of the server}}

The stream has all of it before the replica comes; half of the blocks are stored, half removed.
Servers run on the other core.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

from nats.js import JetStreamContext

from kvplug.engines.life import Numbered
from kvplug.nats.subjects import PublisherName, Subjects
from tests.benchmarks.cluster_events import said
from tests.benchmarks.cluster_servers import Servers, servers
from tests.benchmarks.cluster_sides import side
from tests.benchmarks.sides import Side

WORKER = "http://10.0.0.7:8000"
CORES = sorted(os.sched_getaffinity(0))


class Shape(NamedTuple):
    """Of the messages of one stream."""

    num_events: int
    num_blocks: int
    num_messages: int

    def __str__(self) -> str:
        return f"{self.num_events} events of {self.num_blocks} blocks"

    @property
    def fleet(self) -> str:
        return f"e{self.num_events}b{self.num_blocks}"

    @property
    def all_blocks(self) -> int:
        return self.num_events * self.num_blocks * self.num_messages


SHAPES = (Shape(1, 16, 10_000), Shape(5, 16, 8_000), Shape(64, 16, 1_500), Shape(1, 128, 5_000))


def measure(num_rounds: int, shapes: tuple[Shape, ...] = SHAPES) -> dict[str, Any]:
    """Shapes take turns."""
    rounds: dict[Shape, list[dict[str, float]]] = {shape: [] for shape in shapes}
    with ExitStack() as stack:
        nats = stack.enter_context(servers(1))
        nats.pin(CORES[-1])
        filled = {shape: fill(nats, shape) for shape in shapes}
        replica = stack.enter_context(side("replica"))
        for number in range(num_rounds + 1):
            for shape in shapes:
                result = _round(nats, replica, shape, filled[shape].num_stored)
                if number:  # the first warms up
                    rounds[shape].append(result)
    return {str(each): _row(filled[each].message_bytes, found) for each, found in rounds.items()}


class Filled(NamedTuple):
    """What is in a stream."""

    message_bytes: float
    num_stored: int


def fill(nats: Servers, shape: Shape) -> Filled:
    """Put all of it into the stream of a fleet of its own."""
    nats.prepare(shape.fleet)
    messages, stored = zip(
        *said(shape.num_messages, shape.num_events, shape.num_blocks), strict=True
    )
    subject = Subjects(shape.fleet).events(PublisherName(WORKER, 0))
    nats.run(lambda js: _publish(js, subject, messages))
    state = nats.state(shape.fleet)
    return Filled(state.bytes / state.messages, sum(stored))


async def _publish(js: JetStreamContext, subject: str, messages: Iterable[Numbered]) -> None:
    for _, payload in messages:
        if js.publish_async_pending() >= 256:
            await js.publish_async_completed()
        await js.publish_async(subject, payload)
        await asyncio.sleep(0)
    await js.publish_async_completed()


def _round(nats: Servers, replica: Side, shape: Shape, num_stored: int) -> dict[str, float]:
    case = {
        "what": "open", "via": "stream", "servers": nats.url, "fleet": shape.fleet,
        "workers": [WORKER], "core": CORES[0],
    }  # fmt: skip
    before_s = nats.cpu_s()
    replica.measure(case)
    got = replica.measure({"what": "await", "blocks": num_stored})
    server_s = nats.cpu_s() - before_s
    replica.measure({"what": "close"})
    (_, began), (_, ended) = got["found"][0], got["found"][-1]
    return {
        "rate": shape.all_blocks / (ended - began) * 1e3,
        "per_cpu": shape.all_blocks / got["cpu_s"] / 1e6,
        "replica_us": got["cpu_s"] / shape.num_messages * 1e6,
        "server_us": server_s / shape.num_messages * 1e6,
    }


def _row(num_bytes: float, rounds: list[dict[str, float]]) -> dict[str, Any]:
    median = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    rates = [each["rate"] for each in rounds]
    return {
        "M_blocks_per_s": round(median["rate"], 2),
        "M_blocks_per_s spread": [round(min(rates), 2), round(max(rates), 2)],
        "M_blocks_per_cpu_s": round(median["per_cpu"], 2),
        "cpu_us": {name: round(median[f"{name}_us"], 1) for name in ("replica", "server")},
        "bytes": round(num_bytes),
    }
