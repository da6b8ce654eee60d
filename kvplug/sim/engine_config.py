"""What a simulated engine is told: its speed, how it is served, the flags that say so.

In:  values, or the command line of `python -m kvplug.sim.engine`.
Out: frozen objects, or a ConfigError in one sentence; exit code 2 for wrong flags.

Its sizes are SchedulerConfig, in scheduler.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

from kvplug._version import __version__
from kvplug.errors import ConfigError
from kvplug.events import MAX_DP_SIZE
from kvplug.sim.scheduler import SchedulerConfig
from kvplug.vllm_hashes import Lora

Wire = Literal["vllm", "kvplug"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """How long a step takes; the defaults are the order of an 8B model on one large GPU.

    step = overhead + prefill tokens / prefill rate + (base + decodes * per sequence if any decode)

    The time between two tokens of a sequence is one step: it grows with the batch, and with the
    prefill chunks that share it.
    """

    prefill_tokens_per_s: float = 20_000.0
    decode_base_s: float = 0.008
    decode_per_sequence_s: float = 0.0001
    step_overhead_s: float = 0.001

    def __post_init__(self) -> None:
        if not self.prefill_tokens_per_s > 0:
            raise ConfigError(
                f"prefill_tokens_per_s must be above 0, got {self.prefill_tokens_per_s}"
            )
        for name in ("decode_base_s", "decode_per_sequence_s", "step_overhead_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")

    def step_s(self, *, num_prefill_tokens: int, num_decodes: int) -> float:
        """Seconds that one step takes."""
        decode_s = self.decode_base_s + self.decode_per_sequence_s * num_decodes
        prefill_s = num_prefill_tokens / self.prefill_tokens_per_s
        return self.step_overhead_s + prefill_s + (decode_s if num_decodes else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """How a simulated engine is served; `HELP` says what each field is."""

    host: str = "127.0.0.1"
    port: int = 0
    served_model_name: str = "simulated"
    tokenizer: Path | None = None
    lora_modules: tuple[Lora, ...] = ()
    dp_size: int = 1
    events_endpoint: str | None = "tcp://127.0.0.1:0"
    replay_endpoint: str | None = None
    topic: str = ""
    wire: Wire = "vllm"
    buffer_steps: int = 10_000
    grace_s: float = 1.0
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    time_model: TimeModel = field(default_factory=TimeModel)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}")
        if not 1 <= self.dp_size <= MAX_DP_SIZE:
            limits = f"in [1, {MAX_DP_SIZE}]"
            raise ConfigError(f"dp_size must be {limits}, got {self.dp_size}")
        if self.buffer_steps < 1:
            raise ConfigError(f"buffer_steps must be at least 1, got {self.buffer_steps}")
        if not self.grace_s > 0:  # aiohttp takes 0 for no limit
            raise ConfigError(f"grace_s must be above 0, got {self.grace_s}")
        if self.tokenizer is not None and not self.tokenizer.is_dir():
            raise ConfigError(f"tokenizer: expected a folder, {str(self.tokenizer)!r} is none")
        if self.wire not in get_args(Wire):
            raise ConfigError(f"wire must be vllm or kvplug, got {self.wire!r}")
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


# --- the command line ---

HELP: Final = {
    "host": "address to listen on",
    "port": "port to listen on; 0 takes a free one",
    "served_model_name": "name of the model",
    "tokenizer": "folder with tokenizer.json and chat template; without, a token per byte",
    "lora_modules": "adapters to serve besides, as NAME=PATH",
    "dp_size": "data-parallel ranks; a request chooses one by the header X-data-parallel-rank",
    "events_endpoint": "where KV events are published, by rank N at N ports above; port 0 is a free"
    " one, `none` is nowhere",
    "replay_endpoint": "where past KV events can be asked for, or `none`; with the wire kvplug, "
    "where followers ask, and `none` is a free port",
    "topic": "topic of the KV events",
    "wire": "whose publisher it has: vllm, the stock one, or kvplug, that of kvplug's plug-in",
    "buffer_steps": "event batches that are kept for replay",
    "grace_s": "how long requests in flight may take to end at stop",
    "num_gpu_blocks": "blocks of the cache, vLLM's null block among them",
    "block_size": "tokens per block",
    "max_model_len": "tokens that prompt and answer may have together",
    "max_num_seqs": "requests that run at a time",
    "max_num_batched_tokens": "tokens that a step computes at most",
    "prefill_tokens_per_s": "prompt tokens per second",
    "decode_base_s": "what a step with any decode costs",
    "decode_per_sequence_s": "what each sequence that decodes adds to it",
    "step_overhead_s": "what any step costs",
}
_PARTS: Final[dict[str, type[Any]]] = {"scheduler": SchedulerConfig, "time_model": TimeModel}


def parse(argv: Sequence[str] | None = None) -> tuple[SimConfig, str]:
    """The configuration and the log level; leaves the process with code 2 on bad arguments."""
    parser = _parser()
    values = vars(parser.parse_args(argv))
    log_level: str = values.pop("log_level")
    try:
        values["lora_modules"] = tuple(map(_lora, values["lora_modules"]))
        for name in ("events_endpoint", "replay_endpoint"):
            values[name] = _endpoint_or_none(values[name])
        for name, part in _PARTS.items():
            values[name] = part(**{each.name: values.pop(each.name) for each in fields(part)})
        return SimConfig(**values), log_level
    except ConfigError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvplug.sim.engine",
        description="A simulated vLLM: its API, its KV cache and its events, without a model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvplug {__version__}")
    parts: list[type[Any]] = [SimConfig, *_PARTS.values()]
    for part in parts:
        for each in fields(part):
            if each.name not in _PARTS:
                _add_flag(parser, each.name, each.default)
    levels = ["debug", "info", "warning", "error"]
    parser.add_argument("--log-level", default="info", choices=levels, help=" ")
    return parser


def _add_flag(parser: argparse.ArgumentParser, name: str, default: object) -> None:
    flag, text = "--" + name.replace("_", "-"), HELP[name]
    if name == "lora_modules":
        parser.add_argument(flag, nargs="+", default=[], metavar="NAME=PATH", help=text)
        return
    kind: Callable[[str], Any] = Path if name == "tokenizer" else type(default)
    if name.endswith("_endpoint"):
        kind, default = str, default or "none"
    parser.add_argument(flag, type=kind, default=default, help=text)


def _lora(text: str) -> Lora:
    """From `NAME=PATH`."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ConfigError(f"lora_modules: expected NAME=PATH, got {text!r}")
    return Lora(name, path)


def _endpoint_or_none(text: str) -> str | None:
    """An endpoint as ZMQ writes it; `none` is no endpoint."""
    if text != "none" and "://" not in text:
        raise ConfigError(f"expected an endpoint like tcp://127.0.0.1:5557, or none; got {text!r}")
    return None if text == "none" else text
