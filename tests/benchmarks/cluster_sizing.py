"""What fleets of up to 1,000 ranks and 16 replicas ask for, on paper, and the paper checked.

In:  rounds.
Out: measured costs a message; a table of fleets; runs at other sizes than those that the costs come
from, predicted and measured.

Ranks are kvplug's lives in one process (tests/benchmarks/cluster_fleet.py), replicas are Routers
that follow, each a process; further replicas are consumers that apply nothing, for the server's
sake. Costs are those of one machine whose cores all of them share.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from tests.benchmarks.cluster_model import BEATS_PER_S, Costs, Fleet, of_direct, of_stream
from tests.benchmarks.cluster_servers import Servers, servers
from tests.benchmarks.cluster_sides import side

EVENTS, BLOCKS = 5, 16
RATES, COST_RANKS = (500, 4000), 50
SNAPSHOT_BYTES_A_BLOCK, BLOCKS_A_RANK = 46, 50_000
FLEETS = [(10, 2), (50, 4), (200, 4), (200, 16), (1000, 4), (1000, 16)]


class Run(NamedTuple):
    """So many ranks, replicas and consumers that apply nothing; rate: messages a second of all."""

    num_ranks: int
    num_replicas: int
    num_readers: int
    rate: int
    num_nodes: int = 1
    is_direct: bool = False

    @property
    def num_consumers(self) -> int:
        return self.num_replicas + self.num_readers


CHECKS = (Run(100, 2, 2, 1000), Run(1000, 2, 0, 2000))
DIRECT_CHECKS = (Run(100, 1, 0, 1000, is_direct=True),)


class Seen(NamedTuple):
    """rate: messages a second as they were, on a machine that others use, too; CPU seconds a second
    of all servers and of one replica; bytes a message in the stream.
    """

    rate: float
    server_cores: float
    replica_cores: float
    message_bytes: float


def run(each: Run, num_s: float) -> Seen:
    """One fleet with servers, ranks and replicas of its own."""
    with ExitStack() as stack:
        nats = None if each.is_direct else stack.enter_context(servers(each.num_nodes))
        case = {"what": "open", "fleet": "default", "events": EVENTS, "blocks": BLOCKS}
        case["workers"] = [f"http://10.0.{n // 250}.{n % 250}:8000" for n in range(each.num_ranks)]
        case["via"] = "zmq" if nats is None else "stream"
        if nats is not None:
            nats.prepare("default")
            case["servers"] = nats.url
        fleet = stack.enter_context(side("fleet"))
        case["endpoints"] = fleet.measure(case)
        replicas = [stack.enter_context(side("replica")) for _ in range(each.num_replicas)]
        for n, replica in enumerate(replicas):
            replica.measure({**case, "router": f"replica-{n}"})
        readers = stack.enter_context(side("readers"))
        if nats is not None:
            readers.measure({**case, "num": each.num_readers})
        fleet.measure({"what": "await", "num": each.num_replicas})
        said = fleet.measure({"what": "paced", "rate": each.rate, "num": each.rate})
        for replica in replicas:
            replica.measure({"what": "await", "blocks": said["stored"]})
        before_s, began_s = nats.cpu_s() if nats else 0.0, time.monotonic()
        said = fleet.measure({"what": "paced", "rate": each.rate, "num": int(each.rate * num_s)})
        case = {"what": "await", "blocks": said["stored"]}
        taken = [replica.measure(case)["cpu_s"] for replica in replicas]
        server_s = nats.cpu_s() - before_s if nats else 0.0
        elapsed_s = time.monotonic() - began_s
        return Seen(
            int(each.rate * num_s) / elapsed_s, server_s / elapsed_s,
            statistics.mean(taken) / elapsed_s, _message_bytes(nats),
        )  # fmt: skip


def _message_bytes(nats: Servers | None) -> float:
    if nats is None:
        return 0.0
    state = nats.state("default")
    return state.bytes / state.messages


def _median(runs: list[Seen]) -> Seen:
    return Seen(*(statistics.median(values) for values in zip(*runs, strict=True)))


def measure(num_rounds: int, round_s: float) -> dict[str, Any]:
    """Costs, and checks, round by round; then the table."""
    of_costs = [
        Run(COST_RANKS, 1, readers, rate, nodes)
        for nodes in (1, 3) for rate in RATES for readers in (0, 15)
    ] + [Run(COST_RANKS, 1, 0, rate, is_direct=True) for rate in RATES]  # fmt: skip
    all_runs = [*of_costs, *CHECKS, *DIRECT_CHECKS]
    rounds = [{each: run(each, round_s) for each in all_runs} for _ in range(num_rounds)]
    seen = {each: _median([found[each] for found in rounds]) for each in all_runs}
    one, three = costs_of(seen, 1), costs_of(seen, 3)
    rows: dict[str, Any] = {"costs, 1 server": _shown(one), "costs, 3 servers": _shown(three)}
    for check in (*CHECKS, *DIRECT_CHECKS):
        rows[_name(check)] = compared(check, one, [found[check] for found in rounds])
    for num_ranks, num_replicas in FLEETS:
        rows |= on_paper(num_ranks, num_replicas, three)
    return rows


def costs_of(seen: dict[Run, Seen], num_nodes: int) -> Costs:
    """From runs with one replica, and with 15 consumers more."""
    costs = Costs()
    for rate in RATES:
        alone = seen[Run(COST_RANKS, 1, 0, rate, num_nodes)]
        many = seen[Run(COST_RANKS, 1, 15, rate, num_nodes)]
        direct = seen[Run(COST_RANKS, 1, 0, rate, is_direct=True)]
        consumer = max(0.0, (_us(many, many.server_cores) - _us(alone, alone.server_cores)) / 15)
        costs.consumer[alone.rate] = consumer
        costs.store[alone.rate] = _us(alone, alone.server_cores) - consumer
        costs.replica[alone.rate] = _us(alone, alone.replica_cores)
        costs.direct[direct.rate] = _us(direct, direct.replica_cores)
    return replace(costs, message_bytes=alone.message_bytes)


def _us(seen: Seen, cores: float) -> float:
    """CPU a message, beats included."""
    return cores / (seen.rate + COST_RANKS * BEATS_PER_S) * 1e6


def _name(check: Run) -> str:
    way = "direct" if check.is_direct else "stream"
    return f"check, {way}: {check.num_ranks} ranks, {check.num_consumers} replicas, {check.rate}/s"


def compared(check: Run, costs: Costs, runs: list[Seen]) -> dict[str, Any]:
    """Predicted and measured, with the spread of the rounds."""
    rate = _median(runs).rate
    fleet = Fleet(
        num_ranks=check.num_ranks, num_replicas=check.num_consumers,
        messages_per_s=rate / check.num_ranks, num_copies=1,
    )  # fmt: skip
    paper = of_direct(fleet, costs, 0.0) if check.is_direct else of_stream(fleet, costs)
    row: dict[str, Any] = {"messages_per_s": round(rate)}
    for name in ("server_cores", "replica_cores"):
        values = [getattr(each, name) for each in runs]
        row[name] = {
            "paper": round(getattr(paper, name), 3), "seen": round(statistics.median(values), 3),
            "spread": f"{min(values):.3f} - {max(values):.3f}",
        }  # fmt: skip
    row["message_bytes"] = {"paper": costs.message_bytes, "seen": _median(runs).message_bytes}
    return row


def on_paper(num_ranks: int, num_replicas: int, costs: Costs) -> dict[str, Any]:
    """Three servers, each with a copy; rows of the stream, and of events that go directly."""
    fleet = Fleet(num_ranks=num_ranks, num_replicas=num_replicas)
    snapshot_bytes = SNAPSHOT_BYTES_A_BLOCK * BLOCKS_A_RANK * num_ranks
    ways = {"stream": of_stream(fleet, costs), "direct": of_direct(fleet, costs, snapshot_bytes)}
    size = f"{num_ranks} ranks, {num_replicas} replicas"
    return {
        f"{size}, {way}": {name: round(value, 2) for name, value in asdict(demand).items()}
        for way, demand in ways.items()
    }


def _shown(costs: Costs) -> dict[str, Any]:
    return {
        name: {f"{rate:.0f}/s": round(us, 1) for rate, us in each.items()}
        if isinstance(each, dict)
        else round(each)
        for name, each in asdict(costs).items()
    }
