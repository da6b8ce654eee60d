"""The routers of `make bench-service`, and the client's own turns in their place.

In:  a name, engines.   Out: URLs that take requests, and the processes behind them.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from examples.launch.child_process import ChildProcess
from examples.launch.endpoint import LOOPBACK, Endpoint
from examples.launch.ports import free_ports
from tests.benchmarks.outcome_fleet import ENV, Engine, Fleet, cpu_s
from tests.benchmarks.outcome_requests import Form, tokenizer_folder
from tests.benchmarks.outcome_routers import (
    Router,
    answers_health,
    kvplug_command,
    kvplug_is_ready,
    running,
    smg_command,
    smg_is_ready,
    vllm_router_command,
    workers_are_up,
)

Mode = Literal["direct", "round_robin", "kv"]
NUM_ENGINES: Final = 4
STEP_S: Final = 0.01
_KIB: Final = 1024


@dataclass(frozen=True, slots=True)
class Contestant:
    """`router` is None for a client without one; `needs`: a program without which it is skipped."""

    name: str
    mode: Mode
    router: Router | None
    is_peer: bool = False
    needs: str = ""

    @property
    def refuses(self) -> Mapping[Form, str]:
        """Why a form of requests cannot be sent."""
        return self.router.refuses if self.router else {}

    def missing(self) -> str:
        """Why it cannot run here, or nothing."""
        if self.needs and shutil.which(self.needs) is None:
            return f"{self.name} is skipped: {self.needs} is not installed"
        return ""


@dataclass(frozen=True, slots=True)
class Front:
    """What takes requests; `processes` is empty without a router."""

    urls: Sequence[str]
    processes: Sequence[ChildProcess] = ()

    def cpu_s(self) -> float:
        """CPU seconds of the router's processes so far."""
        return cpu_s(self.processes)

    def memory_mb(self) -> float:
        """What they hold; pages that several share count once."""
        return self._memory_mb(("Pss",))

    def own_memory_mb(self) -> float:
        """The same without pages of files: of those, a process has more when others end."""
        return self._memory_mb(("Pss_Anon", "Pss_Shmem"))

    def _memory_mb(self, kinds: Sequence[str]) -> float:
        pids = [pid for process in self.processes for pid in process.members()]
        return sum(_kib(pid, kinds) for pid in pids) * _KIB / 1e6


@contextmanager
def opened(contestant: Contestant, fleet: Fleet, log_dir: Path) -> Iterator[Front]:
    """In front of engines that are starting."""
    if contestant.router is None:
        fleet.wait_ready()
        yield Front([engine.endpoint.url for engine in fleet.engines])
        return
    with running(contestant.router, fleet, log_dir) as front:
        yield Front([front.url], [front.process])


@contextmanager
def cheap_fleet(log_dir: Path) -> Iterator[Fleet]:
    """Engines in one process that answer at once."""
    first, second, *ports = free_ports(2 + 3 * NUM_ENGINES)
    triples = [ports[3 * number : 3 * number + 3] for number in range(NUM_ENGINES)]
    command = [sys.executable, "-m", "tests.benchmarks.service_engine", "--step-s", str(STEP_S)]
    command += ["--tokenizer", str(tokenizer_folder())]
    command += [f"--engine={':'.join(map(str, triple))}" for triple in triples]
    process = ChildProcess("engines", command, log_path=log_dir / "engines.log", env=ENV)
    tcp = f"tcp://{LOOPBACK}"
    engines = [Engine(process, Endpoint(p), f"{tcp}:{e}", f"{tcp}:{r}") for p, e, r in triples]
    try:
        process.start()
        yield Fleet(engines, (first, second))
    finally:
        process.kill()


def _kib(pid: int, kinds: Sequence[str]) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it ended while we looked
    return sum(int(line.split()[1]) for line in lines if line.partition(":")[0] in kinds)


def _of_kvplug(name: str, mode: Mode, *flags: str) -> Contestant:
    is_ready = kvplug_is_ready if mode == "kv" else workers_are_up
    return Contestant(name, mode, Router(name, kvplug_command("--mode", mode, *flags), is_ready))


def _behind_nginx(engines: Sequence[Engine], port: int, other_port: int) -> list[str]:
    command = kvplug_command("--mode", "kv")(engines, port, other_port)
    return [*command[:2], "tests.benchmarks.nginx_router", *command[3:]]


def _of_vllm(policy: str, mode: Mode) -> Contestant:
    name = f"vllm_{policy}"
    return Contestant(
        name, mode, Router(name, vllm_router_command(policy), answers_health), is_peer=True
    )


DIRECT: Final = "direct"
CONTESTANTS: Final = (
    Contestant(DIRECT, "direct", None),
    _of_kvplug("kvplug_round_robin", "round_robin"),
    _of_kvplug("kvplug_kv", "kv"),
    _of_kvplug("kvplug_kv_2", "kv", "--processes", "2"),
    Contestant(
        "kvplug_kv_nginx",
        "kv",
        Router("kvplug_kv_nginx", _behind_nginx, kvplug_is_ready),
        needs="nginx",
    ),
    _of_vllm("round_robin", "round_robin"),
    _of_vllm("cache_aware", "kv"),
    _of_vllm("kv_aware", "kv"),
    Contestant(
        "smg_cache_aware",
        "kv",
        Router(
            "smg_cache_aware",
            smg_command("cache_aware"),
            smg_is_ready,
            refuses={"ids": "smg 1.13.0 answers 400 to token ids in /v1/completions"},
        ),
        is_peer=True,
    ),
)
