"""The command line of `python -m kvplug.router`, made from the settings of the configuration.

In:  argv, environment variables.   Out: a ServerConfig, or exit code 2 with one sentence.

What neither flags nor variables (kvplug/setting_flags.py) say may be in a file of settings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from kvplug.errors import ConfigError
from kvplug.router.config import RouterConfig
from kvplug.server.cluster_config import ClusterConfig
from kvplug.server.config import ServerConfig
from kvplug.server.settings_file import read_settings, written
from kvplug.setting_file import FileSettings
from kvplug.setting_flags import add_common_flags, add_flags, add_log_level, file_named, taken

_PROGRAM: Final = "python -m kvplug.router"
# All flags in front of an error would hide it.
_USAGE: Final = "%(prog)s --worker URL [--worker URL ...] [settings]; --help lists them"
_DESCRIPTION: Final = (
    "An OpenAI-compatible router that sends each request to the engine that already holds its "
    "prefix in KV cache. Each flag has an environment variable: --max-body-bytes is "
    "KVPLUG_MAX_BODY_BYTES."
)
_GROUPS: Final[tuple[tuple[str, type[Any]], ...]] = (
    ("serving", ServerConfig),
    ("routing", RouterConfig),
    ("cluster", ClusterConfig),
)


def parse(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] = MappingProxyType({})
) -> tuple[ServerConfig, str]:
    """The configuration and the log level; leaves the process with code 2 on bad arguments, and
    with 0 once `--check-config` has printed what would be used.
    """
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, usage=_USAGE, description=_DESCRIPTION, allow_abbrev=False
    )
    found = FileSettings()
    try:
        path = file_named(argv, environ)
        found = FileSettings() if path is None else read_settings(path)
        _add_flags(parser, environ, found)
        arguments = vars(parser.parse_args(argv))
        log_level, is_check = arguments["log_level"], arguments["check_config"]
        router = RouterConfig(**taken(arguments, RouterConfig))
        cluster = ClusterConfig(**taken(arguments, ClusterConfig))
        config = ServerConfig(router=router, cluster=cluster, **taken(arguments, ServerConfig))
    except ConfigError as error:
        parser.error(found.located(str(error)))
    if is_check:
        sys.stdout.write(written(config, log_level))
        parser.exit(0)
    return config, log_level


def _add_flags(
    parser: argparse.ArgumentParser, environ: Mapping[str, str], found: FileSettings
) -> None:
    add_common_flags(parser)
    text = "print the settings that would be used, and exit: 0, or 2 if they are wrong"
    parser.add_argument("--check-config", action="store_true", help=text)
    for title, config in _GROUPS:
        add_flags(parser, title, config, environ, found)
    add_log_level(parser, environ, found)
