"""How large and fast the engines of a fleet are, in words of the command line or of a file.

In:  settings; for engines that differ, a JSON file with one object per engine.
Out: an EngineSpec of each engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from kvplug.errors import ConfigError
from kvplug.sim.engine_config import TimeModel
from kvplug.sim.replay.engine import EngineSpec

DEFAULT_CACHE_TOKENS: Final = 400_000
"""About what an 8B model leaves on a GPU of 80 GB."""

_Count = Annotated[int, msgspec.Meta(ge=1)]
_TIME: Final = TimeModel()


class EngineSettings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One engine. Its cache has `blocks`, or room for `cache_tokens`."""

    blocks: _Count | None = None
    cache_tokens: _Count | None = None
    max_num_seqs: _Count = 128
    max_num_batched_tokens: _Count = 2048
    prefill_tokens_per_s: float = _TIME.prefill_tokens_per_s
    decode_base_s: float = _TIME.decode_base_s
    decode_per_sequence_s: float = _TIME.decode_per_sequence_s
    step_overhead_s: float = _TIME.step_overhead_s

    def spec(self, block_size: int) -> EngineSpec:
        """ConfigError for what no engine can have."""
        return EngineSpec(
            num_blocks=self._num_blocks(block_size),
            block_size=block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            time_model=TimeModel(
                prefill_tokens_per_s=self.prefill_tokens_per_s,
                decode_base_s=self.decode_base_s,
                decode_per_sequence_s=self.decode_per_sequence_s,
                step_overhead_s=self.step_overhead_s,
            ),
        )

    def _num_blocks(self, block_size: int) -> int:
        if self.blocks is not None and self.cache_tokens is not None:
            raise ConfigError("expected the size of a cache in blocks or cache_tokens, got both")
        if self.blocks is not None:
            return self.blocks
        num_tokens = self.cache_tokens or DEFAULT_CACHE_TOKENS
        if num_tokens < block_size:
            raise ConfigError(
                f"cache_tokens must be at least one block of {block_size}, got {num_tokens}"
            )
        return num_tokens // block_size


def settings_of(values: dict[str, Any]) -> EngineSettings:
    """Checked; ConfigError says what was expected."""
    try:
        return msgspec.convert(values, EngineSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings of an engine: {error}") from error


def read_fleet(path: Path, values: dict[str, Any]) -> list[EngineSettings]:
    """Of a JSON list of objects; `values` are for what an object leaves out."""
    try:
        engines = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: expected a list of objects, one per engine: {error}") from error
    if not engines:
        raise ConfigError(f"{path}: expected at least one engine, got an empty list")
    result = []
    for number, engine in enumerate(engines):
        try:
            result.append(settings_of(_merged(values, engine)))
        except ConfigError as error:
            raise ConfigError(f"{path}, engine {number}: {error}") from error
    return result


def _merged(values: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """An engine that tells its cache in either way leaves nothing of the other."""
    sizes = {"blocks", "cache_tokens"}
    left = values if sizes.isdisjoint(engine) else {k: values[k] for k in values.keys() - sizes}
    return {**left, **engine}
