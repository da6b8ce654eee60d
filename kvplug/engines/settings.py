"""What an engine passes on from its --kv-events-config, and what its log says about that.

In:  the settings as the engine names them, $KVPLUG_LOG_LEVEL, the engine's side's own logger.
Out: a PublisherConfig, and one line in the engine's log for each thing that is not as expected.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Final

import msgspec

from kvplug.engines.publisher import PublisherConfig
from kvplug.errors import KvplugError

LOG_LEVEL: Final = "KVPLUG_LOG_LEVEL"
_LEVELS: Final = ("debug", "info", "warning", "error")


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
