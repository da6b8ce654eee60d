"""What a message costs the server: to store it, and to hand it to each consumer.

In:  rates, rounds.
Out: {"N consumers@rate": {"server_us", "spread_us"}}, and what follows for each consumer.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from typing import Any

import numpy as np

from tests.benchmarks.cluster_servers import Servers, servers
from tests.benchmarks.cluster_sides import side
from tests.benchmarks.sides import Side

NUM_CONSUMERS = (0, 1, 4, 16)
NUM_RANKS = 16


class Case:
    """A stream with its ranks and so many consumers."""

    def __init__(self, num_consumers: int, nats: Servers, stack: ExitStack) -> None:
        self.num_consumers, self._nats = num_consumers, nats
        self.fleet_name = f"c{num_consumers}"
        nats.prepare(self.fleet_name)
        self._fleet: Side = stack.enter_context(side("fleet"))
        self._readers: Side = stack.enter_context(side("readers"))
        case = {"what": "open", "fleet": self.fleet_name, "servers": nats.url}
        self._readers.measure({**case, "num": num_consumers})
        workers = [f"http://10.0.0.{n}:8000" for n in range(NUM_RANKS)]
        self._fleet.measure({**case, "workers": workers})

    def round(self, rate: int, num: int) -> float:
        """CPU of the server, in us a message."""
        before_s = self._nats.cpu_s()
        self._fleet.measure({"what": "paced", "rate": rate, "num": num})
        last = self._nats.state(self.fleet_name).last_seq
        self._readers.measure({"what": "await", "num": last})
        return (self._nats.cpu_s() - before_s) / num * 1e6


def measure(
    rates: tuple[int, ...],
    num_rounds: int,
    round_s: float,
    consumers: tuple[int, ...] = NUM_CONSUMERS,
    nodes: tuple[int, ...] = (1, 3),
) -> dict[str, Any]:
    """So many servers, with so many consumers each."""
    results: dict[str, Any] = {}
    for num_nodes in nodes:
        with ExitStack() as stack:
            nats = stack.enter_context(servers(num_nodes))
            cases = [Case(n, nats, stack) for n in consumers]
            for case in cases:
                case.round(1000, 200)
            for rate in rates:
                rounds = [
                    [c.round(rate, int(rate * round_s)) for c in cases] for _ in range(num_rounds)
                ]
                results |= _rows(f"r{num_nodes}@{rate}", consumers, rounds)
    return results


def _rows(name: str, consumers: tuple[int, ...], rounds: list[list[float]]) -> dict[str, Any]:
    rows = {}
    for n, values in zip(consumers, zip(*rounds, strict=True), strict=True):
        spread = [round(min(values), 1), round(max(values), 1)]
        rows[f"{name}, {n} consumers"] = {
            "server_us": round(statistics.median(values), 1), "server_us spread": spread
        }  # fmt: skip
    medians = [row["server_us"] for row in rows.values()]
    slope, first = np.polyfit(consumers, medians, 1)
    rows[name] = {"store_us": round(first, 1), "consumer_us": round(slope, 1)}
    return rows
