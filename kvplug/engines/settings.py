"""What an engine passes on from its --kv-events-config, and what its log says about that.

In:  the settings as the engine names them, $KVPLUG_LOG_LEVEL, the engine's side's own logger.
Out: a PublisherConfig, and one line in the engine's log for each thing that is not as expected.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

import msgspec

from kvplug.engines.binding import endpoint_of_rank
from kvplug.errors import ConfigError, KvplugError

LOG_LEVEL: Final = "KVPLUG_LOG_LEVEL"
_LEVELS: Final = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherConfig:
    """What vLLM's and SGLang's --kv-events-config say, for one data-parallel rank."""

    endpoint: str
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if not 0 <= value < 2**31:
                raise ConfigError(f"--kv-events-config: {name} must be 0 or more, got {value}")

    def of_rank(self, dp_rank: int) -> tuple[str, str | None]:
        """The endpoint and the replay endpoint of one rank."""
        replay = self.replay_endpoint and endpoint_of_rank(self.replay_endpoint, dp_rank)
        return endpoint_of_rank(self.endpoint, dp_rank), replay


def read_config(settings: Mapping[str, object], logger: logging.Logger) -> PublisherConfig:
    """Check the settings; those that we do not know are named and have no effect."""
    known = {field.name for field in fields(PublisherConfig)}
    if unknown := sorted(settings.keys() - known):
        logger.warning(
            "kvplug: these settings of --kv-events-config have no effect: %s; expected only %s",
            ", ".join(unknown),
            ", ".join(sorted(known)),
        )
    kept = {name: value for name, value in settings.items() if name in known}
    return msgspec.convert(kept, PublisherConfig)


def set_log_level(logger: logging.Logger) -> None:
    """As $KVPLUG_LOG_LEVEL says, if it says something."""
    level = os.environ.get(LOG_LEVEL)
    if not level:
        return
    if level.lower() in _LEVELS:
        logger.setLevel(level.upper())
    else:
        logger.warning(
            "kvplug: %s is ignored: expected one of %s, got %r",
            LOG_LEVEL,
            ", ".join(_LEVELS),
            level,
        )


def warn(logger: logging.Logger, consequence: str, error: Exception) -> None:
    """What goes on without us; what we did not foresee is told with its traceback."""
    unforeseen = None if isinstance(error, KvplugError) else error
    logger.warning("kvplug: %s: %s", consequence, error, exc_info=unforeseen)
