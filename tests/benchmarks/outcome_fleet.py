"""Simulated engines of `make bench-outcome`, and what processes cost.

In:  how many engines, how large a cache.   Out: engines with empty caches.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from examples.launch.child_process import ChildProcess
from examples.launch.endpoint import LOOPBACK, Endpoint
from examples.launch.engine_server import MODEL_NAME
from examples.launch.ports import free_ports
from tests.benchmarks.outcome_requests import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    tokenize_s_per_byte,
    tokenizer_folder,
)
from tests.benchmarks.outcome_workloads import TIME_MODEL
from tests.benchmarks.sides import ROOT

START_LIMIT_S = 120.0
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
ENV: Final = {**os.environ, "PYTHONPATH": str(ROOT)}


@dataclass(frozen=True, slots=True)
class Engine:
    """One simulated engine; `events` and `replay` are ZMQ endpoints."""

    process: ChildProcess
    endpoint: Endpoint
    events: str
    replay: str


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines, and ports for a router in front of them."""

    engines: Sequence[Engine]
    router_ports: tuple[int, int]

    def wait_ready(self) -> None:
        """Until all engines take requests."""
        for engine in self.engines:
            engine.process.wait_until(
                engine.endpoint.is_healthy, "take requests", timeout_s=START_LIMIT_S
            )


@contextmanager
def started_fleet(num_engines: int, cache_tokens: int, log_dir: Path) -> Iterator[Fleet]:
    """Engines that start, and are killed at the end."""
    first, second, *ports = free_ports(2 + 3 * num_engines)  # at once: no port comes twice
    engines = [
        _engine(f"engine-{number}", ports[3 * number : 3 * number + 3], cache_tokens, log_dir)
        for number in range(num_engines)
    ]
    try:
        for engine in engines:
            engine.process.start()
        yield Fleet(engines, (first, second))
    finally:
        for engine in engines:
            engine.process.kill()


def cpu_s(processes: Sequence[ChildProcess]) -> float:
    """Seconds of CPU time that they have taken so far."""
    return sum(_cpu_of(pid) for process in processes for pid in process.members())


def _engine(name: str, ports: Sequence[int], cache_tokens: int, log_dir: Path) -> Engine:
    port, *others = ports
    events, replay = (f"tcp://{LOOPBACK}:{other}" for other in others)
    flags = {
        "--tokenize-s-per-byte": tokenize_s_per_byte(),
        "--port": port,
        "--served-model-name": MODEL_NAME,
        "--tokenizer": tokenizer_folder(),
        "--events-endpoint": events,
        "--replay-endpoint": replay,
        "--num-gpu-blocks": cache_tokens // BLOCK_SIZE + 1,  # the null block
        "--max-model-len": MAX_MODEL_LEN,
        "--block-size": BLOCK_SIZE,
        "--prefill-tokens-per-s": TIME_MODEL.prefill_tokens_per_s,
        "--decode-base-s": TIME_MODEL.decode_base_s,
        "--decode-per-sequence-s": TIME_MODEL.decode_per_sequence_s,
        "--step-overhead-s": TIME_MODEL.step_overhead_s,
    }
    command = [sys.executable, "-m", "tests.benchmarks.outcome_engine"]
    command += [str(part) for flag in flags.items() for part in flag]
    process = ChildProcess(name, command, log_path=log_dir / f"{name}.log", env=ENV)
    return Engine(process, Endpoint(port), events, replay)


def _cpu_of(pid: int) -> float:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # it ended while we looked
    # The name stands in parentheses and may hold any byte; the times are fields 14 and 15.
    fields = stat.rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
