"""The table of docs/exactness.md: one row for each kind of model, on a real engine.

usage: python -m tests.exactness [--requests N] [--wire kvplug] [--only TEXT] [--seed N]

Ends with 1 if a row has a request that was promised too much, or blocks that the engine
has not.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvplug import Rank, Router, RouterConfig
from kvplug.ingest.event_thread import EventThread
from tests.engines.line_engine import Followed
from tests.exactness import ranks, sglang
from tests.exactness.comparison import compare
from tests.exactness.engines import ROWS

WIDTH = 150
IN_PROCESS = ROWS | sglang.ROWS


def main():
    args = parsed()
    names = [name for name in (*IN_PROCESS, *ranks.ROWS) if args.only in name]
    tallies = {name: run(name, args) for name in names}
    Console(width=WIDTH).print(table_of(tallies, args.wire))
    return int(any(tally.num_over or tally.num_phantoms for tally in tallies.values()))


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=500, help="for each model")
    parser.add_argument("--wire", choices=("vllm", "kvplug"), default="vllm")
    parser.add_argument("--only", default="", help="rows with this in their names")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def run(name, args):
    Console().print(f"{name}: {args.requests} requests, wire {args.wire}")
    with tempfile.TemporaryDirectory() as folder:
        if name in ranks.ROWS:
            tally = asyncio.run(ranks.compare(name, Path(folder), args))
        else:
            tally = compare_in_process(name, Path(folder), args)
    if tally.differences:
        Console().print(f"  predicted, reported where they differ: {tally.differences[:10]}")
    return tally


def compare_in_process(name, folder, args):
    row, listener = IN_PROCESS[name], EventThread()
    engine = row.recipe("engine", args.wire).make(folder)
    engine.start()
    try:
        engine.wait_ready()
        listener.start()
        router = Router(RouterConfig(speculative_ttl_s=0.0))
        router.add_worker(engine.name)
        router.set_recomputed_blocks(Rank(engine.name), int(row.drafts))
        is_told = row.hides_states and args.wire == "vllm"  # our publisher says it itself
        followed = Followed(engine, router, listener, hides_states=is_told)
        tally = compare(followed, args.requests, row.ask, args.seed)
    finally:
        listener.stop()
        engine.stop()
    return tally


def table_of(tallies, wire):
    title = f"predicted against reported, vLLM 0.32.0 and SGLang 0.5.23, wire {wire}"
    table = Table(title=title)
    for column in ("engine", "requests", "cached tokens", "over", "under", "incorrect", "groups",
                   "missing", "phantoms"):  # fmt: skip
        table.add_column(column, justify="left" if column == "engine" else "right")
    for name, tally in tallies.items():
        requests = (tally.num_requests, tally.num_cached, tally.num_over, tally.num_under)
        requests += (tally.num_wrong,)
        blocks = (tally.num_groups, tally.num_missing, tally.num_phantoms)
        if not tally.num_groups:  # no blocks were compared
            blocks = ("-",) * len(blocks)
        table.add_row(name, *map(str, requests + blocks))
    return table


if __name__ == "__main__":
    raise SystemExit(main())
