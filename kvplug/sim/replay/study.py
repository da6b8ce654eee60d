"""Many replays: each a workload on a fleet under a policy; what came out, and how sure it is.

In:  cells.   Out: a summary of each, in order; differences with their 95 % intervals.

A cell is small and says everything, so cells run in any process in any order. Cells of one seed
have the same requests at the same times under every policy: compare them pair by pair.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError
from kvplug.sim.replay.engine import EngineSpec
from kvplug.sim.replay.fleet import Arrivals, Outcome, replay
from kvplug.sim.replay.policies import make_policy
from kvplug.sim.replay.workload import Workload

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


class WorkloadMaker(Protocol):
    """A recipe for requests; hashable, and small enough to be sent to another process."""

    def __hash__(self) -> int:
        """Equal recipes make equal requests."""

    def make(self, seed: int) -> Workload:
        """The same requests for the same seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One replay. `warm`: the share of the first requests that is not counted.

    `policy_seed` is of the policy's own dice, `seed` if None.
    """

    workload: WorkloadMaker
    specs: tuple[EngineSpec, ...]
    policy: str
    arrivals: Arrivals
    seed: int
    warm: float = 0.0
    policy_seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What became of the requests that count.

    total_mean_ms: from arrival to the last token.
    requests_per_s: num_requests over span_s, from the first arrival to the last answer.
    hit_share: of all prompt tokens, those found in a cache; ideal_share: those that one endless
    cache would have found.
    imbalance: prompt tokens computed by the engine that computed most, over the mean of all
    engines; 1 is even.
    """

    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    total_mean_ms: float
    requests_per_s: float
    hit_share: float
    ideal_share: float
    imbalance: float
    num_requests: int
    span_s: float

    @property
    def hits_of_ideal(self) -> float:
        """hit_share over ideal_share; 1 if there was nothing to find."""
        return self.hit_share / self.ideal_share if self.ideal_share else 1.0


def run_cell(cell: Cell) -> Summary:
    """Replay one cell; ConfigError if a request cannot fit an engine, or block sizes differ."""
    workload, ideal_tokens = _made(cell.workload, cell.seed)
    _require_fitting(workload, cell.specs)
    policy_seed = cell.seed if cell.policy_seed is None else cell.policy_seed
    policy = make_policy(cell.policy, cell.specs, policy_seed)
    outcome = replay(workload, cell.specs, policy, cell.arrivals, seed=cell.seed)
    first = int(cell.warm * len(workload.requests))
    return _summary(outcome, ideal_tokens, first, len(cell.specs))


def run_cells(
    cells: Sequence[Cell], num_processes: int | None = None, *, show_progress: bool = False
) -> list[Summary]:
    """The summaries, in order. `num_processes`: one per core if None; 1 is this process itself.

    `show_progress` draws a bar on stderr and needs tqdm. Neighbours should share a workload and a
    seed: each process keeps the requests that it made last.
    """
    num_processes = min(num_processes or _num_cores(), len(cells))
    results = map(run_cell, cells) if num_processes <= 1 else _in_pool(cells, num_processes)
    if show_progress:
        from tqdm import tqdm  # type: ignore[import-untyped]

        results = tqdm(results, total=len(cells), unit="replay", leave=False)
    return list(results)


def paired_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Mean of a - b over pairs and half the width of its 95 % interval (Student's t).

    The half width of a single pair is infinite.
    """
    differences = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    mean, n = float(differences.mean()), len(differences)
    if n < 2:
        return mean, float("inf")
    return mean, _t_quantile(n - 1) * float(differences.std(ddof=1)) / n**0.5


@lru_cache(maxsize=8)
def _t_quantile(degrees: int) -> float:
    """What |t| exceeds in 5 % of cases.

    With t = sqrt(degrees) * tan(angle), the density of the angle is cos(angle)^(degrees - 1).
    """
    angles = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angles) ** (degrees - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = np.interp(0.95, below / below[-1], angles)
    return float(degrees**0.5 * np.tan(angle))


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _in_pool(cells: Sequence[Cell], num_processes: int) -> Iterator[Summary]:
    # Fresh processes: a forked one could inherit a lock that a thread of ours holds.
    pool = ProcessPoolExecutor(num_processes, get_context("spawn"), initializer=_start_process)
    try:
        yield from pool.map(run_cell, cells)
    finally:
        pool.shutdown(cancel_futures=True)


def _start_process() -> None:
    """Ctrl-C is for the process that waits for us; what a router logs of made-up engines is not."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.WARNING)


@lru_cache(maxsize=4)
def _made(maker: WorkloadMaker, seed: int) -> tuple[Workload, I64]:
    workload = maker.make(seed)
    return workload, ideal_hit_tokens(workload)


def ideal_hit_tokens(workload: Workload) -> I64:
    """Of each request, the prompt tokens that one endless cache finds, once all before are in."""
    size, seen, found = workload.block_size, set[int](), []
    for request in workload.requests:
        blocks = request.blocks.tolist()
        num_hits = next((at for at, block in enumerate(blocks) if block not in seen), len(blocks))
        # The last token is computed in any case.
        found.append(min(num_hits, (request.num_tokens - 1) // size) * size)
        seen.update(blocks)
        seen.update(request.answer_blocks.tolist())
    return np.array(found, dtype=np.int64)


def _require_fitting(workload: Workload, specs: Sequence[EngineSpec]) -> None:
    for spec in specs:
        if spec.block_size != workload.block_size:
            raise ConfigError(
                f"the requests of {workload.name} come in blocks of {workload.block_size} tokens, "
                f"an engine has blocks of {spec.block_size}: expected the same"
            )
    smallest = min(spec.num_blocks for spec in specs)
    needed = max(len(request.blocks) + len(request.answer_blocks) for request in workload.requests)
    if needed > smallest:
        raise ConfigError(
            f"a request of {workload.name} needs {needed} blocks of {workload.block_size} tokens "
            f"for prompt and answer, the smallest cache has {smallest}: it would wait for ever"
        )


def _summary(outcome: Outcome, ideal_tokens: I64, first: int, num_engines: int) -> Summary:
    ttft_ms = outcome.ttft_s[first:] * 1e3
    p50, p90, p99 = np.percentile(ttft_ms, [50, 90, 99]).tolist()
    ends_s = outcome.arrived_s[first:] + outcome.total_s[first:]
    span_s = float(ends_s.max() - outcome.arrived_s[first:].min())
    prompt, hit = outcome.prompt_tokens[first:], outcome.hit_tokens[first:]
    computed = np.bincount(outcome.engine[first:], weights=prompt - hit, minlength=num_engines)
    return Summary(
        ttft_mean_ms=float(ttft_ms.mean()),
        ttft_p50_ms=p50,
        ttft_p90_ms=p90,
        ttft_p99_ms=p99,
        total_mean_ms=float(outcome.total_s[first:].mean() * 1e3),
        requests_per_s=len(ttft_ms) / span_s,
        hit_share=float(hit.sum() / prompt.sum()),
        ideal_share=float(ideal_tokens[first:].sum() / prompt.sum()),
        imbalance=float(computed.max() / computed.mean()),
        num_requests=len(ttft_ms),
        span_s=span_s,
    )
