"""What `make bench-index` measures, and by how much kvplug has to be better.

A rate is of blocks from the first call to the last block known. Ours come in the payloads of
kvplug's own stream, as its publisher makes them (packed events: hashes, no tokens), the peer's in
its own form, with hashes, too; `make bench-ingest` has the sockets, and the stock stream, which
has tokens. A latency is the p50 of calls; memory is bytes per unique block. For each case see
index_side.py, `_prepare_...`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.index_trace import FILES

MANY, SEVERAL, FEW = 9, 5, 3  # rounds
MATCH_CALLS, HASH_CALLS = 1000, 200
FILLS = (700_000, 900_000, 1_100_000, 1_400_000, 1_700_000, 2_000_000)
"""Memberships (a block and a worker that holds it): tables are at their best and at their worst."""

UNITS = {"rate": "M packed blocks/s", "latency": "us, p50", "memory": "bytes per unique block"}
"""Blocks of a replay are those of its queries, too."""


@dataclass(frozen=True)
class Metric:
    """`target` is the ratio to reach; `cases` has one, or for memory one per fill."""

    name: str
    target: float
    kind: str
    num_rounds: int
    cases: tuple[dict[str, Any], ...]

    @property
    def unit(self) -> str:
        """Of the values."""
        return UNITS[self.kind]


def all_metrics(traces: Path) -> dict[str, Metric]:
    """By name, in the order in which they are measured."""
    metrics = [*_stores(), *_matches(), *_hashes(), *_replays(traces), *_memory()]
    return {metric.name: metric for metric in metrics}


def _stores() -> list[Metric]:
    # Of one event, of one worker; `chains` so that a round takes the peer 0.1 s or more.
    one = {
        "what": "store",
        "chains": 32,
        "workers": 1,
        "blocks_per_event": 16,
        "events_per_call": 1,
    }
    batch = {**one, "events_per_call": 64}
    return [
        Metric("store_call_16", 4, "rate", MANY, (one,)),
        Metric("store_call_1", 4, "rate", MANY, ({**one, "chains": 8, "blocks_per_event": 1},)),
        Metric("store_batch_distinct", 10, "rate", MANY, (batch,)),
        Metric("store_batch_shared8", 10, "rate", SEVERAL, ({**batch, "workers": 8},)),
        Metric("remove_batch", 10, "rate", MANY, ({**batch, "what": "remove"},)),
    ]


def _matches() -> list[Metric]:
    shapes = {
        "array_2048_w64": (10, "all", 64, 2048, "array"),
        "array_32_w64": (4, "all", 64, 32, "array"),
        "array_staggered_w512": (10, "staggered", 512, 2048, "array"),
        "array_branching_w512": (10, "branching", 512, 2048, "array"),
        "list_2048_w64": (1, "all", 64, 2048, "list"),
    }
    metrics = []
    for name, (target, shape, workers, blocks, form) in shapes.items():
        asked = {"what": "match", "shape": shape, "workers": workers, "blocks": blocks}
        case = {**asked, "form": form, "calls": MATCH_CALLS}
        metrics.append(Metric(f"match_{name}", target, "latency", MANY, (case,)))
    return metrics


def _hashes() -> list[Metric]:
    return [
        Metric(f"hash_{form}_32k", target, "latency", MANY, (_hash_case(form),))
        for form, target in (("array", 15), ("list", 1.7))
    ]


def _hash_case(form: str) -> dict[str, Any]:
    return {"what": "hash", "tokens": 32_768, "form": form, "calls": HASH_CALLS}


def _replays(traces: Path) -> list[Metric]:
    return [
        Metric(f"replay_{name}", 5, "rate", FEW, ({"what": "replay", "path": str(traces / file)},))
        for name, file in FILES.items()
    ]


def _memory() -> list[Metric]:
    """shared8: as many memberships, so an eighth as many unique blocks."""
    return [
        Metric(f"memory_{name}", target, "memory", 1, _fill_cases(num_workers))
        for name, target, num_workers in (("distinct", 1.5, 1), ("shared8", 4.5, 8))
    ]


def _fill_cases(num_workers: int) -> tuple[dict[str, Any], ...]:
    blocks = [fill // num_workers for fill in FILLS]
    return tuple({"what": "memory", "workers": num_workers, "blocks": b} for b in blocks)
