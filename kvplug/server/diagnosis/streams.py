"""The event streams of a fleet, a line for each rank, as the doctor prints them.

In:  what /health says of workers.   Out: lines of text.

    event streams
      http://127.0.0.1:8100    kvplug 1   exact   vllm 0.32.0, 640 blocks of 32
      http://127.0.0.1:8101    stock      stale
      http://127.0.0.1:8102    none
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvplug.events import Rank
from kvplug.protocol import WorkerHello


class StreamHealth(msgspec.Struct):
    """Of one rank; wire: whose messages come, None while none has come."""

    trust: str
    wire: str | None = None
    hello: WorkerHello | None = None


class RankHealth(msgspec.Struct):
    """One data-parallel rank; events: None if it publishes none."""

    dp_rank: int
    events: StreamHealth | None = None


class WorkerHealth(msgspec.Struct):
    """One worker."""

    name: str
    ranks: list[RankHealth]


def lines_of(workers: Sequence[WorkerHealth]) -> Iterator[str]:
    """A heading and the lines, in columns."""
    rows = [
        (str(Rank(worker.name, rank.dp_rank)), *_columns(rank.events))
        for worker in workers
        for rank in worker.ranks
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield "event streams"
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  " + "   ".join(cells).rstrip()


def _columns(events: StreamHealth | None) -> tuple[str, str, str]:
    if events is None:
        return "none", "", ""
    about = "" if events.hello is None else ", ".join(_facts(events.hello))
    return events.wire or "silent", events.trust, about


def _facts(hello: WorkerHello) -> Iterator[str]:
    if hello.engine:
        yield f"{hello.engine} {hello.engine_version}".rstrip()
    if hello.capacity_blocks is not None and hello.block_size is not None:
        yield f"{hello.capacity_blocks} blocks of {hello.block_size}"
