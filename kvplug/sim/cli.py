"""The command line of `python -m kvplug.sim.engine`.

In:  argv.   Out: a SimConfig, or exit code 2 with one sentence.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from kvplug._version import __version__
from kvplug.errors import ConfigError
from kvplug.sim.config import SimConfig, endpoint_or_none, parse_lora
from kvplug.sim.scheduler import SchedulerConfig
from kvplug.sim.timing import TimeModel

HELP: Final = {
    "host": "address to listen on",
    "port": "port to listen on; 0 takes a free one",
    "served_model_name": "name of the model",
    "tokenizer": "folder with tokenizer.json and chat template; without, a token per byte",
    "lora_modules": "adapters to serve besides, as NAME=PATH",
    "events_endpoint": "where KV events are published; port 0 is a free one, `none` is nowhere",
    "replay_endpoint": "where past KV events can be asked for, or `none`",
    "topic": "topic of the KV events",
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
        values["lora_modules"] = tuple(map(parse_lora, values["lora_modules"]))
        for name in ("events_endpoint", "replay_endpoint"):
            values[name] = endpoint_or_none(values[name])
        for name, part in _PARTS.items():
            values[name] = part(**{field.name: values.pop(field.name) for field in fields(part)})
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
        for field in fields(part):
            if field.name not in _PARTS:
                _add_flag(parser, field.name, field.default)
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
