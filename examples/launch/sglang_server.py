"""One real SGLang server on the CPU.

In:  an interpreter that has SGLang, a model's folder, the size of the cache.
Out: an OpenAI server with KV events over ZMQ, as a child process that can be killed and started
again on the same ports.
"""

import http
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from examples.launch.endpoint import LOOPBACK
from examples.launch.engine_server import MODEL_NAME, EngineServer
from examples.launch.ports import free_ports
from examples.launch.vllm_server import FOREIGN_ENV

# One thread is enough for a tiny model; nothing is asked from a hub and nothing compiled; whatever
# SGLang wants an address for stays on loopback.
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

    plugin: a folder that has kvplug installed; with it, kvplug publishes the events.
    """

    python: Path
    model_dir: Path
    num_blocks: int = 160
    max_model_len: int = 1024
    block_size: int = 32
    max_num_seqs: int = 16
    plugin: Path | None = None
    extra_events_config: Mapping[str, object] = field(default_factory=dict)
    extra_flags: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)


class SglangServer(EngineServer):
    """An SGLang server; its ports are chosen once and kept over restarts."""

    reset_path = "/flush_cache"

    def __init__(self, name: str, settings: SglangSettings, *, log_dir: Path) -> None:
        self.settings, self.name = settings, name
        super().__init__(name, settings.block_size, free_ports(3), log_dir)

    def _reset_prefix_cache(self) -> bool:
        # The answer is a sentence. Refused while a request still holds blocks.
        return self._endpoint.post(self.reset_path).status == http.HTTPStatus.OK

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
            "publisher": "kvplug" if self.settings.plugin else "zmq",
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
        plugin = {"PYTHONPATH": str(self.settings.plugin)} if self.settings.plugin else {}
        return {**inherited, **ENGINE_ENV, **plugin, **self.settings.extra_env}
