"""SimConfig: everything a served simulated engine is told, checked once.

In:  values from the command line.   Out: frozen objects, or a ConfigError in one sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvplug.errors import ConfigError
from kvplug.sim.scheduler import SchedulerConfig
from kvplug.sim.timing import TimeModel
from kvplug.vllm_hashes import Lora


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """How a simulated engine is served; the flags in kvplug/sim/cli.py say what each field is."""

    host: str = "127.0.0.1"
    port: int = 0
    served_model_name: str = "simulated"
    tokenizer: Path | None = None
    lora_modules: tuple[Lora, ...] = ()
    events_endpoint: str | None = "tcp://127.0.0.1:0"
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = 10_000
    grace_s: float = 1.0
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    time_model: TimeModel = field(default_factory=TimeModel)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}")
        if self.buffer_steps < 1:
            raise ConfigError(f"buffer_steps must be at least 1, got {self.buffer_steps}")
        if not self.grace_s > 0:  # aiohttp takes 0 for no limit
            raise ConfigError(f"grace_s must be above 0, got {self.grace_s}")
        if self.tokenizer is not None and not self.tokenizer.is_dir():
            raise ConfigError(f"tokenizer: expected a folder, {str(self.tokenizer)!r} is none")
        if self.replay_endpoint is not None and self.events_endpoint is None:
            raise ConfigError("replay_endpoint needs an events_endpoint: nothing would be replayed")

    @property
    def root(self) -> str:
        """What /v1/models says the model was loaded from: routers look for a tokenizer there."""
        return str(self.tokenizer) if self.tokenizer else self.served_model_name

    @property
    def loras(self) -> dict[str, Lora | None]:
        """The models that can be asked for, by name; None is the base model."""
        return {self.served_model_name: None, **{lora.name: lora for lora in self.lora_modules}}


def parse_lora(text: str) -> Lora:
    """From `NAME=PATH`."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ConfigError(f"lora_modules: expected NAME=PATH, got {text!r}")
    return Lora(name, path)


def endpoint_or_none(text: str) -> str | None:
    """An endpoint as ZMQ writes it; `none` is no endpoint."""
    if text != "none" and "://" not in text:
        raise ConfigError(f"expected an endpoint like tcp://127.0.0.1:5557, or none; got {text!r}")
    return None if text == "none" else text
