"""One simulated engine: vLLM's API, cache and events in a second, without a model.

In:  the folder of a tokenizer, the size of the cache.   Out: a server like the real ones.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from examples.launch.endpoint import LOOPBACK
from examples.launch.engine_server import MODEL_NAME, EngineServer
from examples.launch.ports import free_ports


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """What a simulated engine is started with; the time model is that of a small accelerator."""

    tokenizer_dir: Path
    num_gpu_blocks: int = 361
    max_model_len: int = 2048
    block_size: int = 16
    prefill_tokens_per_s: float = 8000.0


class SimServer(EngineServer):
    """A simulated engine; its ports are chosen once and kept over restarts."""

    reset_path = "/reset_prefix_cache"

    def __init__(self, name: str, settings: SimSettings, *, log_dir: Path) -> None:
        self.settings, self.name = settings, name
        super().__init__(name, settings.block_size, free_ports(3), log_dir)

    def _command(self) -> list[str]:
        settings = self.settings
        flags = {
            "--served-model-name": MODEL_NAME,
            "--port": self._endpoint.port,
            "--tokenizer": settings.tokenizer_dir,
            "--events-endpoint": f"tcp://{LOOPBACK}:{self._events_port}",
            "--replay-endpoint": f"tcp://{LOOPBACK}:{self._replay_port}",
            "--topic": f"kv@{self.name}@{MODEL_NAME}",
            "--num-gpu-blocks": settings.num_gpu_blocks,
            "--max-model-len": settings.max_model_len,
            "--block-size": settings.block_size,
            "--prefill-tokens-per-s": settings.prefill_tokens_per_s,
        }
        module = (sys.executable, "-m", "kvplug.sim.engine")
        return [*module, *(str(part) for flag in flags.items() for part in flag)]

    def _env(self) -> dict[str, str]:
        return dict(os.environ)
