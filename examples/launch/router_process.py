"""The router as its users run it: `python -m kvplug.router` in a process of its own.

In:  a routing mode, the engines, the folder of their tokenizer.
Out: one URL in front of the engines.
"""

import http.client
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from examples.launch.child_process import ChildProcess
from examples.launch.endpoint import LOOPBACK, Endpoint
from examples.launch.engine_server import EngineServer
from examples.launch.ports import free_ports

# The first start compiles kernels: half a minute, several times as long on a busy machine.
START_LIMIT_S = 300.0


class RouterProcess:
    """One router; it has to stop before another one takes its place."""

    def __init__(
        self,
        mode: str,
        engines: Sequence[EngineServer],
        *,
        model_dir: Path,
        log_dir: Path,
        extra_flags: Sequence[str] = (),
    ) -> None:
        (port,) = free_ports(1)
        self._endpoint = Endpoint(port)
        self._num_engines = len(engines)
        command = [
            *(sys.executable, "-m", "kvplug.router"),
            *("--host", LOOPBACK, "--port", str(port), "--mode", mode),
            *("--block-size", str(engines[0].block_size), "--tokenizer", str(model_dir)),
            *(f"--worker={engine.url},events={engine.events_endpoint}" for engine in engines),
            *extra_flags,
        ]
        name = f"router-{mode}"
        self._process = ChildProcess(name, command, log_path=log_dir / f"{name}.log")

    @property
    def url(self) -> str:
        """Where the OpenAI API is."""
        return self._endpoint.url

    @property
    def log_path(self) -> Path:
        """What the router writes."""
        return self._process.log_path

    def start(self) -> None:
        """Start the router; `wait_ready` waits for it."""
        self._process.start()

    def wait_ready(self, timeout_s: float = START_LIMIT_S) -> None:
        """Wait until it reaches every engine and receives the events of each."""
        self._process.wait_until(self._hears_all, "hear all engines", timeout_s=timeout_s)

    def stop(self, *, limit_s: float = 15.0) -> None:
        """Ask the router to end, and see to it after limit_s."""
        self._process.stop(limit_s=limit_s)

    def _hears_all(self) -> bool:
        try:
            body = self._endpoint.get("/health").body
        except (OSError, http.client.HTTPException):
            return False  # not listening yet
        workers = body["workers"] if body else []
        return len(workers) == self._num_engines and all(map(_is_heard, workers))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def _is_heard(worker: dict[str, Any]) -> bool:
    events = worker["ranks"][0]["events"]
    return worker["state"] == "up" and events is not None and events["connected"] is True
