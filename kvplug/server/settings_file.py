"""The router's file of settings, as `--config FILE` names it.

In:  a file.   Out: values for the fields of ServerConfig, RouterConfig and ClusterConfig, or a
ConfigError that begins with FILE:LINE. And the way back: a configuration as such a file.

What RouterConfig has is under `router`, what ClusterConfig has under `cluster`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml

from kvplug import setting_file
from kvplug.router.config import RouterConfig
from kvplug.server.cluster_config import ClusterConfig
from kvplug.server.config import ServerConfig
from kvplug.setting import settings_of
from kvplug.setting_file import FileSettings

_SECTIONS: Final[dict[str, type[Any]]] = {"router": RouterConfig, "cluster": ClusterConfig}


def read_settings(path: Path) -> FileSettings:
    """What the file says; ConfigError."""
    return setting_file.read_settings(path, ServerConfig, _SECTIONS)


def written(config: ServerConfig, log_level: str) -> str:
    """The configuration as a file, with every setting that is not its default; keys and passwords
    are in files of their own, and a URL is shown without its user.
    """
    found: dict[str, Any] = _given(config)
    for section in _SECTIONS:
        if given := _given(getattr(config, section)):
            found[section] = given
    return yaml.safe_dump({**found, "log_level": log_level}, sort_keys=False, width=1000)


def _given(config: object) -> dict[str, Any]:
    values = {each.name: getattr(config, each.name) for each, _ in settings_of(type(config))}
    defaults = {each.name: each.default for each, _ in settings_of(type(config))}
    return {name: _builtin(value) for name, value in values.items() if value != defaults[name]}


def _builtin(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return [re.sub(r"(?<=://)[^/@\s]+@", "***@", each.text) for each in value]
    return str(value) if isinstance(value, Path) else value
