"""One real vLLM server on the CPU.

In:  an interpreter that has vLLM, a model's folder, the size of the cache.
Out: an OpenAI server with stock KV events over ZMQ, as a child process that can be killed and
started again on the same ports.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from examples.launch.endpoint import LOOPBACK
from examples.launch.engine_server import MODEL_NAME, EngineServer
from examples.launch.ports import free_ports

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
    """What a server is started with; the CPU backend takes multiples of 32 as block size.

    plugin: a folder that has kvplug installed; with it, kvplug publishes the events.
    """

    python: Path
    model_dir: Path
    num_gpu_blocks: int = 160
    max_model_len: int = 1024
    block_size: int = 32
    max_num_seqs: int = 16
    plugin: Path | None = None
    extra_flags: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)


class VllmServer(EngineServer):
    """A vLLM server; its ports are chosen once and kept over restarts."""

    reset_path = "/reset_prefix_cache"

    def __init__(self, name: str, settings: VllmSettings, *, log_dir: Path) -> None:
        self.settings, self.name = settings, name
        super().__init__(name, settings.block_size, free_ports(3), log_dir)

    def _command(self) -> list[str]:
        settings = self.settings
        flags = {
            "--model": settings.model_dir,
            "--served-model-name": MODEL_NAME,
            "--host": LOOPBACK,
            "--port": self._endpoint.port,
            # In bfloat16 vLLM 0.32 takes AMX where the CPU has it, and dies of SIGILL in virtual
            # machines that have not enabled it.
            "--dtype": "float16",
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
        # vLLM 0.32's own publisher binds a tcp endpoint only if it holds a `*`; any other address
        # it connects to. kvplug's binds what it is told.
        publisher, address = ("kvplug", LOOPBACK) if self.settings.plugin else ("zmq", "*")
        config = {
            "enable_kv_cache_events": True,
            "publisher": publisher,
            "endpoint": f"tcp://{address}:{self._events_port}",
            "replay_endpoint": f"tcp://{address}:{self._replay_port}",
            "topic": f"kv@{self.name}@{MODEL_NAME}",
        }
        return json.dumps(config)

    def _env(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in FOREIGN_ENV}
        plugin = {"PYTHONPATH": str(self.settings.plugin)} if self.settings.plugin else {}
        return {**inherited, **ENGINE_ENV, **plugin, **self.settings.extra_env}
