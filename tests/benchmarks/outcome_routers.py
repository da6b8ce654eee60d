"""The routers of `make bench-outcome`: kvplug's and its peers, each from PyPI, as users start them.

In:  a router's name, engines.   Out: a URL in front of them.

A router has its defaults; what is set is the engines' addresses, where events are, and how often a
router looks whether the engines are up before it starts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

from examples.launch.child_process import ChildProcess
from examples.launch.endpoint import LOOPBACK, Endpoint
from examples.launch.engine_server import MODEL_NAME
from tests.benchmarks.environments import cached_python
from tests.benchmarks.outcome_fleet import ENV, START_LIMIT_S, Engine, Fleet
from tests.benchmarks.outcome_requests import BLOCK_SIZE, Form, tokenizer_folder

VLLM_ROUTER, SMG = "vllm-router==0.1.17", "smg==1.13.0"

Command = Callable[[Sequence[Engine], int, int], list[str]]
"""Of engines, a port to listen on, and another one that may be used."""


@dataclass(frozen=True, slots=True)
class Router:
    """`is_ready`: whether it routes to so many engines. `refuses` says why it cannot run a form of
    requests. kvplug with its defaults is compared with the peers.
    """

    name: str
    command: Command
    is_ready: Callable[[Endpoint, int], bool]
    is_peer: bool = False
    refuses: Mapping[Form, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Running:
    """A router that takes requests."""

    process: ChildProcess
    url: str


@contextmanager
def running(router: Router, fleet: Fleet, log_dir: Path) -> Iterator[Running]:
    """A router that routes to all engines; it is killed at the end."""
    port, other_port = fleet.router_ports
    endpoint = Endpoint(port)
    command = router.command(fleet.engines, port, other_port)
    process = ChildProcess(router.name, command, log_path=log_dir / f"{router.name}.log", env=ENV)
    try:
        process.start()  # while the engines start: both take seconds
        fleet.wait_ready()
        process.wait_until(
            lambda: router.is_ready(endpoint, len(fleet.engines)),
            "route to all engines",
            timeout_s=START_LIMIT_S,
        )
        yield Running(process, endpoint.url)
    finally:
        process.kill()


def kvplug_command(*flags: str) -> Command:
    """This package's own router."""

    def command(engines: Sequence[Engine], port: int, other_port: int) -> list[str]:
        workers = [f"{e.endpoint.url},events={e.events},replay={e.replay}" for e in engines]
        return [
            *(sys.executable, "-m", "kvplug.router", "--host", LOOPBACK, "--port", str(port)),
            *("--tokenizer", str(tokenizer_folder())),
            *(f"--worker={worker}" for worker in workers),
            *flags,
        ]

    return command


def vllm_router_command(policy: str) -> Command:
    """vllm-project's, in an environment of its own."""

    def command(engines: Sequence[Engine], port: int, other_port: int) -> list[str]:
        events = [
            *("--kv-event-model", MODEL_NAME, "--kv-event-block-size", str(BLOCK_SIZE)),
            *(f"--kv-event-source={e.endpoint.url}={e.events}" for e in engines),
            *(f"--kv-event-replay-source={e.endpoint.url}={e.replay}" for e in engines),
        ]
        return [
            str(
                cached_python(VLLM_ROUTER.replace("==", "-"), VLLM_ROUTER).with_name("vllm-router")
            ),
            *("--host", LOOPBACK, "--port", str(port), "--policy", policy, "--worker-urls"),
            *(e.endpoint.url for e in engines),
            *("--worker-startup-check-interval", "1", "--prometheus-port", str(other_port)),
            *("--log-level", "warning"),
            *(events if policy == "kv_aware" else ()),
        ]

    return command


def smg_command(policy: str) -> Command:
    """Shepherd's, in an environment of its own."""

    def command(engines: Sequence[Engine], port: int, other_port: int) -> list[str]:
        return [
            *(str(cached_python(SMG.replace("==", "-"), SMG).with_name("smg")), "launch"),
            *("--host", LOOPBACK, "--port", str(port), "--policy", policy, "--backend", "vllm"),
            *("--worker-urls", *(e.endpoint.url for e in engines)),
            *("--worker-startup-check-interval", "1", "--prometheus-port", str(other_port)),
            *("--log-level", "warn"),
        ]

    return command


def _asked(endpoint: Endpoint, path: str) -> Any:
    """The body of a good answer, {} if it is no JSON; None if nobody answers."""
    try:
        reply = endpoint.get(path)
    except (OSError, HTTPException):
        return None
    return (reply.body or {}) if reply.status == HTTPStatus.OK else None


def kvplug_is_ready(endpoint: Endpoint, num_engines: int) -> bool:
    """All workers are up and their events are heard."""
    workers = (_asked(endpoint, "/health") or {}).get("workers", [])
    return len(workers) == num_engines and all(
        worker["state"] == "up" and (worker["ranks"][0]["events"] or {}).get("connected") is True
        for worker in workers
    )


def workers_are_up(endpoint: Endpoint, num_engines: int) -> bool:
    """All workers are up, whatever is heard of them."""
    workers = (_asked(endpoint, "/health") or {}).get("workers", [])
    return len(workers) == num_engines and all(worker["state"] == "up" for worker in workers)


def answers_health(endpoint: Endpoint, num_engines: int) -> bool:
    """As far as can be asked of vllm-router."""
    return _asked(endpoint, "/health") is not None


def smg_is_ready(endpoint: Endpoint, num_engines: int) -> bool:
    """All workers are healthy."""
    return (_asked(endpoint, "/readiness") or {}).get("healthy_workers") == num_engines


KVPLUG: Final = "kvplug"
ROUTERS: Final = (
    Router(KVPLUG, kvplug_command(), kvplug_is_ready),
    Router("kvplug_weight_1", kvplug_command("--kv-overlap-score-weight", "1"), kvplug_is_ready),
    Router("kvplug_weight_4", kvplug_command("--kv-overlap-score-weight", "4"), kvplug_is_ready),
    Router("round_robin", kvplug_command("--mode", "round_robin"), workers_are_up, is_peer=True),
    Router("vllm_cache_aware", vllm_router_command("cache_aware"), answers_health, is_peer=True),
    Router("vllm_kv_aware", vllm_router_command("kv_aware"), answers_health, is_peer=True),
    Router(
        "smg_cache_aware",
        smg_command("cache_aware"),
        smg_is_ready,
        is_peer=True,
        refuses={"ids": "smg 1.13.0 answers 400 to token ids in /v1/completions"},
    ),
)
