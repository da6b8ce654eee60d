"""`make bench-cluster`: what the cluster costs, and how fast it is.

usage: python -m tests.benchmarks.cluster [--only PART,PART] [--rounds N]

    latency  from publish() to the block being found: ZMQ, NATS core, one server, three
    rate     blocks a second that a replica on one core takes from the stream
    server   what a message and a consumer cost the server
    restore  making a snapshot, how long events wait for it, and starting from it
    sync     what it costs replicas and the server to share load
    sizing   fleets of up to 1,000 ranks and 16 replicas on paper, checked by runs

Ways take turns, round by round, as the machine is not this program's alone. Prints medians with
the spread of the rounds, and writes bench-results/cluster.json; parts that were not measured stay
as they were.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks import (
    cluster_latency,
    cluster_rate,
    cluster_restore,
    cluster_server,
    cluster_sizing,
    cluster_sync,
)
from tests.benchmarks.sides import ROOT

SPREAD = " spread"
RESULT = ROOT / "bench-results" / "cluster.json"
RATES, SERVER_RATES, ROUND_S, SIZING_S = (100, 1000), (1000, 4000), 4.0, 3.0


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "latency": lambda num_rounds: cluster_latency.measure(RATES, num_rounds, ROUND_S),
    "rate": cluster_rate.measure,
    "server": lambda num_rounds: cluster_server.measure(SERVER_RATES, num_rounds, ROUND_S),
    "restore": lambda num_rounds: cluster_restore.measure(max(1, num_rounds // 2)),
    "sync": lambda num_rounds: cluster_sync.measure(max(1, num_rounds // 2), ROUND_S),
    "sizing": lambda num_rounds: cluster_sizing.measure(max(1, num_rounds // 2), SIZING_S),
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in arguments.only.split(","):
        rows = PARTS[name](arguments.rounds)
        results[name] = rows
        Console(width=40 + 22 * len(rows)).print(table_of(name, rows))
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(results, indent=1) + "\n")


def table_of(name: str, rows: dict[str, dict[str, Any]]) -> Table:
    """A row for each figure, a column for each case; the spread of the rounds in brackets."""
    figures = dict.fromkeys(figure for row in rows.values() for figure in row)
    table = Table("", *rows, title=name)
    for figure in figures:
        if not figure.endswith(SPREAD):
            table.add_row(figure, *(_with_spread(row, figure) for row in rows.values()))
    return table


def _with_spread(row: dict[str, Any], figure: str) -> str:
    spread = row.get(f"{figure}{SPREAD}")
    return _cell(row.get(figure, "")) + (f" ({_cell(spread)})" if spread else "")


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    if isinstance(value, list):
        return " - ".join(str(each) for each in value)
    return str(value)


if __name__ == "__main__":
    main()
