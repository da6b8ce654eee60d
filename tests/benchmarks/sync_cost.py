"""What replica sync costs: the thread that decides, a message to its sender and to a reader.

In:  routers of a fleet, requests of some length.   Out: microseconds of CPU, medians.

usage: python -m tests.benchmarks.sync_cost [--ranks N] [--seconds S]

Routers, requests and a nats-server are real, all on this machine. `decide`: route, first_token and
finish of a request in the thread that decides, in CPU time of that thread, without sync and with.
`news`, `hear`: making a message of one request, and taking it. `late`: from a change in one router
until it counts in the other, in wall time. Writes bench-results/sync.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any, Final

import numpy as np
from rich.console import Console

from kvplug import Router, RouterConfig
from kvplug.cluster.load_exchange import LoadExchange
from kvplug.cluster.sync import ReplicaSync
from kvplug.kernels import costing
from kvplug.nats.connection import NatsConnection
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import Subjects
from tests.benchmarks.sides import ROOT
from tests.nats_servers import nats_servers

RESULTS = ROOT / "bench-results" / "sync.json"
_BLOCK_SIZE: Final = 16
_TIMEOUT_S: Final = 10.0

console = Console(width=120, highlight=False)


def router_of(num_ranks: int) -> Router:
    """A router with so many workers, which hold nothing."""
    router = Router(RouterConfig(block_size=_BLOCK_SIZE))
    for number in range(num_ranks):
        router.add_worker(f"http://10.0.{number // 256}.{number % 256}:8000", model="m")
    return router


@contextmanager
def synced(url: str, routers: list[Router]) -> Iterator[list[ReplicaSync]]:
    """They share their load; each has heard of all others."""
    connections = [
        NatsConnection(NatsSettings(servers=(url,)), f"r{number}") for number in range(len(routers))
    ]
    syncs = [
        ReplicaSync(router, connection, Subjects("bench"), connection.name)
        for router, connection in zip(routers, connections, strict=True)
    ]
    for connection, sync in zip(connections, syncs, strict=True):
        connection.start()
        sync.start()
    await_true(lambda: all(len(each.status().peers) == len(syncs) - 1 for each in syncs))
    yield syncs
    for connection, sync in zip(connections, syncs, strict=True):
        sync.stop()
        connection.stop()


def await_true(condition: Callable[[], bool]) -> None:
    """Look again and again, without waiting for long."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-5)


def prompts(num_tokens: int) -> Iterator[Any]:
    """Prompts that share nothing."""
    rng = np.random.default_rng(1)
    while True:
        yield rng.integers(0, 2**31, num_tokens, dtype=np.uint32)


def decide_us(
    routers: list[Router], num_tokens: int, num_requests: int, rate: float
) -> list[float]:
    """CPU of one request in this thread, of each router by turns, so many a second."""
    costs: list[list[int]] = [[] for _ in routers]
    tokens_of = prompts(num_tokens)
    for _ in range(num_requests):
        for router, mine in zip(routers, costs, strict=True):
            tokens = next(tokens_of)
            began = time.thread_time_ns()
            decision = router.route(tokens)
            router.first_token(decision.request_id)
            router.finish(decision.request_id)
            mine.append(time.thread_time_ns() - began)
            time.sleep(1 / rate)
    return [median(mine[num_requests // 5 :]) / 1e3 for mine in costs]


def message_us(num_ranks: int, num_tokens: int, num_requests: int) -> dict[str, float]:
    """CPU to make a message of one new request, and to take it; its bytes."""
    sender, reader = router_of(num_ranks), router_of(num_ranks)
    says = LoadExchange(sender, "a", _nothing)
    hears = LoadExchange(reader, "b", _nothing)
    sender.load.listener = says
    made, taken, sizes, tokens_of = [], [], [], prompts(num_tokens)
    for _ in range(num_requests):
        request_id = sender.route(next(tokens_of)).request_id
        began = time.thread_time_ns()
        [payload] = says.news()
        made.append(time.thread_time_ns() - began)
        began = time.thread_time_ns()
        hears.hear("a", payload)
        taken.append(time.thread_time_ns() - began)
        sizes.append(len(payload))
        sender.finish(request_id)
        for each in says.news():
            hears.hear("a", each)
    first = num_requests // 5
    return {
        "news_us": median(made[first:]) / 1e3, "hear_us": median(taken[first:]) / 1e3,
        "bytes": median(sizes),
    }  # fmt: skip


def late_ms(one: Router, other: Router, num_requests: int) -> list[float]:
    """From a change until it counts in the other router."""
    waits, tokens_of = [], prompts(512)
    for _ in range(num_requests):
        decision = one.route(next(tokens_of))
        began, number = time.perf_counter(), one.fleet_index.numbers.number_of(decision.rank)
        await_true(lambda n=number: other.load.ranks[n, costing.NUM_RUNNING] > 0)
        waits.append(1e3 * (time.perf_counter() - began))
        one.finish(decision.request_id)
        await_true(lambda n=number: other.load.ranks[n, costing.NUM_RUNNING] == 0)
        time.sleep(1e-3)
    return waits


def run(num_ranks: int, num_requests: int, rate: float) -> dict[str, Any]:
    """All of it."""
    found: dict[str, Any] = {"ranks": num_ranks, "requests_per_s": rate}
    for num_tokens in (512, 8192):
        alone, one, other = (router_of(num_ranks) for _ in range(3))
        found[f"{num_tokens} tokens"] = cell = message_us(num_ranks, num_tokens, num_requests)
        with nats_servers() as [node], synced(node.url, [one, other]) as syncs:
            cell["decide_us"], cell["decide_synced_us"] = decide_us(
                [alone, one], num_tokens, num_requests, rate
            )
            if num_tokens == 512:
                waits = late_ms(one, other, num_requests)
                cell["late_p50_ms"], cell["late_p99_ms"] = (
                    median(waits),
                    quantiles(waits, n=100)[98],
                )
            counts = syncs[1].status().counts
            assert counts.refused == counts.missed == counts.unknown_ranks == 0, counts
    return found


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.sync_cost")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=200.0)
    options = parser.parse_args()
    found = run(options.ranks, options.requests, options.rate)
    console.print(json.dumps(found, indent=1))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def _nothing() -> None:
    pass


if __name__ == "__main__":
    main()
