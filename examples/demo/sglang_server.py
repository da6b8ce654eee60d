"""One real SGLang server on the CPU.

In:  an interpreter that has SGLang, a model's folder, the size of the cache.
Out: an OpenAI server with KV events over ZMQ, as a child process that can be killed and started
again on the same ports.
"""

import http.client
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from examples.demo.child_process import ChildProcess, poll_until
from examples.demo.endpoint import LOOPBACK, Endpoint
from examples.demo.errors import DemoError
from examples.demo.ports import free_ports
from examples.demo.sglang_env import torch_extensions_dir
from examples.demo.vllm_server import FOREIGN_ENV, MODEL_NAME, START_LIMIT_S

# One thread is enough for a tiny model; nothing is asked from a hub, nothing is compiled but the
# block hashes; whatever SGLang wants an address for stays on loopback.
ENGINE_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_RUST_BUILD_MODE": "never",
    "OMP_NUM_THREADS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings:
    """What a server is started with; `block_size` is SGLang's page size.

    `publisher` is "zmq", or "kvplug" where that is installed in the engine's environment.
    """

    python: Path
    model_dir: Path
    num_blocks: int = 160
    max_model_len: int = 1024
    block_size: int = 32
    max_num_seqs: int = 16
    publisher: str = "zmq"
    extra_events_config: Mapping[str, object] = field(default_factory=dict)
    extra_flags: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)


class SglangServer:
    """An SGLang server; its ports are chosen once and kept over restarts."""

    def __init__(self, name: str, settings: SglangSettings, *, log_dir: Path) -> None:
        self.name = name
        self.settings = settings
        http_port, self._events_port, self._replay_port = free_ports(3)
        self._endpoint = Endpoint(http_port)
        self._process = ChildProcess(
            name, self._command(), log_path=log_dir / f"{name}.log", env=self._env()
        )

    @property
    def url(self) -> str:
        """Where the OpenAI API is."""
        return self._endpoint.url

    @property
    def endpoint(self) -> Endpoint:
        """The same, to ask for more than the OpenAI API has."""
        return self._endpoint

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
        """Forget all cached blocks; the followers of the events hear of it at once."""
        if not poll_until(self._flush_cache, timeout_s=timeout_s):
            raise DemoError(f"{self.name} did not empty its cache; its log is {self.log_path}")

    def complete(self, prompt: str, *, max_tokens: int) -> str:
        """The model's continuation of a prompt, asked for without a router."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens}
        reply = self._endpoint.post("/v1/completions", body)
        if reply.status != http.HTTPStatus.OK:
            raise DemoError(f"{self.name} answered {reply.status}; its log is {self.log_path}")
        return str(reply.body["choices"][0]["text"])

    def _flush_cache(self) -> bool:
        # Refused while a request still holds blocks, which may be a moment after its answer.
        return self._endpoint.post("/flush_cache").status == http.HTTPStatus.OK

    def _command(self) -> list[str]:
        settings = self.settings
        flags = {
            "--model-path": settings.model_dir,
            "--served-model-name": MODEL_NAME,
            "--host": LOOPBACK,
            "--port": self._endpoint.port,
            "--device": "cpu",
            "--dtype": "bfloat16",
            "--attention-backend": "torch_native",
            "--context-length": settings.max_model_len,
            "--page-size": settings.block_size,
            "--max-total-tokens": settings.num_blocks * settings.block_size,
            "--max-running-requests": settings.max_num_seqs,
            "--kv-events-config": self._events_config(),
        }
        return [
            *(str(settings.python), "-m", "sglang.launch_server"),
            *(str(part) for flag in flags.items() for part in flag),
            # No warm-up request, whose blocks nobody asked for, and no spinning while idle.
            *("--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle"),
            *("--enable-cache-report", *settings.extra_flags),
        ]

    def _events_config(self) -> str:
        # Without `bind`, SGLang's own publisher connects to an address that is not a wildcard. In
        # Dynamo's format a block's hash depends on all that keeps requests apart.
        config = {
            "publisher": self.settings.publisher,
            "endpoint": self.events_endpoint,
            "bind": True,
            "replay_endpoint": self.replay_endpoint,
            "topic": f"kv@{self.name}@{MODEL_NAME}",
            "format": "dynamo",
            **self.settings.extra_events_config,
        }
        return json.dumps(config)

    def _env(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in FOREIGN_ENV}
        # The extension that SGLang compiles is built by the environment's own ninja.
        path = f"{self.settings.python.parent}{os.pathsep}{inherited.get('PATH', os.defpath)}"
        mine = {"TORCH_EXTENSIONS_DIR": str(torch_extensions_dir()), "PATH": path}
        return {**inherited, **ENGINE_ENV, **mine, **self.settings.extra_env}

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
