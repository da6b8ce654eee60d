"""One real vLLM server on the CPU.

In:  an interpreter that has vLLM, a model's folder, the size of the cache.
Out: an OpenAI server with stock KV events over ZMQ, as a child process that can be killed and
started again on the same ports.
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

MODEL_NAME = "tiny-llama"
START_LIMIT_S = 300.0

# One thread and one GiB are enough for a tiny model; nothing is asked from a hub; whatever vLLM
# wants an address for stays on loopback. The dev mode brings POST /reset_prefix_cache.
ENGINE_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_HOST_IP": LOOPBACK,
    "GLOO_SOCKET_IFNAME": "lo",
}
# These would bring this interpreter's packages into the engine's.
FOREIGN_ENV = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """What a server is started with; the CPU backend takes multiples of 32 as block size."""

    python: Path
    model_dir: Path
    num_gpu_blocks: int = 160
    max_model_len: int = 1024
    block_size: int = 32
    max_num_seqs: int = 16
    extra_flags: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)


class VllmServer:
    """A vLLM server; its ports are chosen once and kept over restarts."""

    def __init__(self, name: str, settings: VllmSettings, *, log_dir: Path) -> None:
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
            raise DemoError(f"{self.name} did not empty its cache; its log is {self.log_path}")
        self.complete("Hello", max_tokens=1)

    def complete(self, prompt: str, *, max_tokens: int) -> str:
        """The model's continuation of a prompt, asked for without a router."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens}
        reply = self._endpoint.post("/v1/completions", body)
        if reply.status != http.HTTPStatus.OK:
            raise DemoError(f"{self.name} answered {reply.status}; its log is {self.log_path}")
        return str(reply.body["choices"][0]["text"])

    def _reset_prefix_cache(self) -> bool:
        # Refused while a request still holds blocks, which may be a moment after its answer.
        reply = self._endpoint.post("/reset_prefix_cache")
        return isinstance(reply.body, dict) and reply.body.get("success") is True

    def _command(self) -> list[str]:
        settings = self.settings
        flags = {
            "--model": settings.model_dir,
            "--served-model-name": MODEL_NAME,
            "--host": LOOPBACK,
            "--port": self._endpoint.port,
            "--dtype": "bfloat16",
            "--max-model-len": settings.max_model_len,
            "--block-size": settings.block_size,
            "--max-num-seqs": settings.max_num_seqs,
            "--num-gpu-blocks-override": settings.num_gpu_blocks,
            "--kv-events-config": self._events_config(),
        }
        return [
            *(str(settings.python), "-m", "vllm.entrypoints.openai.api_server"),
            *(str(part) for flag in flags.items() for part in flag),
            *("--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *settings.extra_flags,
        ]

    def _events_config(self) -> str:
        # vLLM 0.32 binds a tcp endpoint only if it holds a `*`; any other address it connects to.
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self._events_port}",
            "replay_endpoint": f"tcp://*:{self._replay_port}",
            "topic": f"kv@{self.name}@{MODEL_NAME}",
        }
        return json.dumps(config)

    def _env(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in FOREIGN_ENV}
        return {**inherited, **ENGINE_ENV, **self.settings.extra_env}

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
