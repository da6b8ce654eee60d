"""One engine behind an OpenAI API, as a child process, whatever its kind.

In:  a command line and the ports in it.
Out: a server that is started, waited for, emptied, stopped or killed, and started again on the
same ports.
"""

import http.client
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from examples.launch.child_process import ChildProcess, poll_until
from examples.launch.endpoint import LOOPBACK, Endpoint
from examples.launch.errors import LaunchError

MODEL_NAME = "tiny-llama"
START_LIMIT_S = 300.0


class EngineServer:
    """What kinds of engines have in common; a kind says how its cache is emptied."""

    reset_path: ClassVar[str]

    def __init__(self, name: str, block_size: int, ports: Sequence[int], log_dir: Path) -> None:
        http_port, self._events_port, self._replay_port = ports
        self.name, self.block_size = name, block_size
        self._endpoint = Endpoint(http_port)
        self._process = ChildProcess(
            name, self._command(), log_path=log_dir / f"{name}.log", env=self._env()
        )

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _env(self) -> dict[str, str]:
        raise NotImplementedError

    @property
    def url(self) -> str:
        """Where the OpenAI API is."""
        return self._endpoint.url

    @property
    def events_endpoint(self) -> str:
        """Where KV events are published."""
        return f"tcp://{LOOPBACK}:{self._events_port}"

    @property
    def replay_endpoint(self) -> str:
        """Where past KV events can be asked for."""
        return f"tcp://{LOOPBACK}:{self._replay_port}"

    @property
    def log_path(self) -> Path:
        """What the server writes; restarts add to it."""
        return self._process.log_path

    @property
    def process(self) -> ChildProcess:
        """The process group behind the server."""
        return self._process

    def start(self) -> None:
        """Start the server; `wait_ready` waits for it, so that several can start side by side."""
        self._process.start()

    def wait_ready(self, timeout_s: float = START_LIMIT_S) -> None:
        """Wait until requests are taken; raise with the log's end if that does not come."""
        self._process.wait_until(self._endpoint.is_healthy, "take requests", timeout_s=timeout_s)

    def kill(self) -> None:
        """End the server and all its processes without a warning."""
        self._process.kill()

    def stop(self, *, limit_s: float = 10.0) -> None:
        """Ask the server to end, and see to it after limit_s."""
        self._process.stop(limit_s=limit_s)

    def empty_cache(self, *, timeout_s: float = 30.0) -> None:
        """Forget all cached blocks, and let the followers of the events know.

        vLLM publishes AllBlocksCleared with its next step: a request too short to fill a block
        makes that step.
        """
        if not poll_until(self._reset_prefix_cache, timeout_s=timeout_s):
            raise LaunchError(f"{self.name} did not empty its cache; its log is {self.log_path}")
        self.complete("Hello", max_tokens=1)

    def complete(self, prompt: str, *, max_tokens: int) -> str:
        """The model's continuation of a prompt, asked for without a router."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens}
        reply = self._endpoint.post("/v1/completions", body)
        if reply.status != http.HTTPStatus.OK:
            raise LaunchError(f"{self.name} answered {reply.status}; its log is {self.log_path}")
        return str(reply.body["choices"][0]["text"])

    def _reset_prefix_cache(self) -> bool:
        # Refused while a request still holds blocks, which may be a moment after its answer.
        reply = self._endpoint.post(self.reset_path)
        return isinstance(reply.body, dict) and reply.body.get("success") is True

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
