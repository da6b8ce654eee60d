"""The command line of `python -m kvplug.forwarder`.

In:  argv, environment variables, a file of settings.
Out: a ForwarderConfig and the log level, or exit code 2 with one sentence.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Final

from kvplug.errors import ConfigError
from kvplug.forwarder.config import ForwarderConfig
from kvplug.setting_file import FileSettings, read_settings
from kvplug.setting_flags import add_common_flags, add_flags, add_log_level, file_named, taken

_USAGE: Final = "%(prog)s --nats URL --engine ENGINE [--engine ENGINE ...]; --help lists all"
_DESCRIPTION: Final = (
    "Forwards KV events of engines that publish them over ZMQ to NATS, for router replicas. Each "
    "flag has an environment variable: --nats-fleet is KVPLUG_NATS_FLEET."
)


def parse(argv: Sequence[str] | None, environ: Mapping[str, str]) -> tuple[ForwarderConfig, str]:
    """Leaves the process with code 2 on bad arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m kvplug.forwarder", usage=_USAGE, description=_DESCRIPTION,
        allow_abbrev=False,
    )  # fmt: skip
    found = FileSettings()
    try:
        path = file_named(argv, environ)
        found = FileSettings() if path is None else read_settings(path, ForwarderConfig)
        add_common_flags(parser)
        add_flags(parser, "forwarding", ForwarderConfig, environ, found)
        add_log_level(parser, environ, found)
        arguments = vars(parser.parse_args(argv))
        return ForwarderConfig(**taken(arguments, ForwarderConfig)), arguments["log_level"]
    except ConfigError as error:
        parser.error(found.located(str(error)))
