"""What it costs replicas and the server to share their load.

In:  how many replicas, requests a second of all of them, rounds.
Out: {"N replicas, R requests/s": CPU of a replica in us for each request of its own and of others,
with and without sync; of the server for each request}
"""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from tests.benchmarks.cluster_servers import Servers, servers
from tests.benchmarks.cluster_sides import side

CASES = ((2, 200), (4, 200), (8, 200))


def measure(
    num_rounds: int, round_s: float, cases: tuple[tuple[int, int], ...] = CASES
) -> dict[str, Any]:
    """Cases take turns, each with and without sync."""
    rounds: dict[tuple[int, int], list[dict[str, float]]] = {case: [] for case in cases}
    with servers(1) as nats:
        for _ in range(num_rounds):
            for case in cases:
                off = _run(nats, *case, round_s, syncs=False)
                on = _run(nats, *case, round_s, syncs=True)
                rounds[case].append({**on, "replica_off_us": off["replica_us"],
                                     "deciding_off_us": off["deciding_us"]})  # fmt: skip
    return {f"{n} replicas, {rate} requests/s": _row(rounds[n, rate]) for n, rate in cases}


def _run(nats: Servers, num: int, rate: int, round_s: float, *, syncs: bool) -> dict[str, float]:
    """CPU in us: of one replica and of the server, for each request of all replicas."""
    with ExitStack() as stack:
        replicas = [stack.enter_context(side("peer")) for _ in range(num)]
        where = {"what": "open", "servers": nats.url, "fleet": "sync", "syncs": syncs}
        for n, replica in enumerate(replicas):
            replica.measure({**where, "router": f"r{n}"})
        pool = stack.enter_context(ThreadPoolExecutor(num))
        case = {"what": "paced", "rate": rate / num}

        def together(seconds: float) -> list[dict[str, float]]:
            paced = {**case, "num": max(1, int(rate / num * seconds))}
            return list(pool.map(lambda replica: replica.measure(paced), replicas))

        together(1.0)
        before_s = nats.cpu_s()
        took = together(round_s)
        server_s = nats.cpu_s() - before_s
    num_all = max(1, int(rate / num * round_s)) * num
    return {
        "replica_us": statistics.mean(each["cpu_s"] for each in took) / num_all * 1e6,
        "deciding_us": sum(each["deciding_s"] for each in took) / num_all * 1e6,
        "server_us": server_s / num_all * 1e6,
    }


def _row(rounds: list[dict[str, float]]) -> dict[str, Any]:
    median = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    added = [each["replica_us"] - each["replica_off_us"] for each in rounds]
    deciding = [each["deciding_us"] - each["deciding_off_us"] for each in rounds]
    return {
        "replica_us": {"sync": round(median["replica_us"]), "none": round(median["replica_off_us"]),
                       "added": f"{min(added):.0f} - {max(added):.0f}"},
        "deciding_us": {"sync": round(median["deciding_us"]),
                        "none": round(median["deciding_off_us"]),
                        "added": f"{min(deciding):.0f} - {max(deciding):.0f}"},
        "server_us": round(median["server_us"]),
    }  # fmt: skip
