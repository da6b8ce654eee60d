"""The command line of `python -m kvplug.router`, made from the settings of the configuration.

In:  argv, environment variables.   Out: a ServerConfig, or exit code 2 with one sentence.

Each flag has a variable, which counts where the flag is not given: `--max-body-bytes` is
KVPLUG_MAX_BODY_BYTES. What may be given several times is separated by spaces there. What neither
says may be in a file of settings (settings_file.py).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from kvplug._version import __version__
from kvplug.errors import ConfigError
from kvplug.router.config import RouterConfig
from kvplug.server.cluster_config import ClusterConfig
from kvplug.server.config import ServerConfig
from kvplug.server.settings_file import LOG_LEVELS, FileSettings, kind_of, read_settings, written
from kvplug.setting import Setting, settings_of

_PROGRAM: Final = "python -m kvplug.router"
# All flags in front of an error would hide it.
_USAGE: Final = "%(prog)s --worker URL [--worker URL ...] [settings]; --help lists them"
_DESCRIPTION: Final = (
    "An OpenAI-compatible router that sends each request to the engine that already holds its "
    "prefix in KV cache. Each flag has an environment variable: --max-body-bytes is "
    "KVPLUG_MAX_BODY_BYTES."
)
_PREFIX: Final = "KVPLUG_"
_CONFIG: Final = "--config"
_GROUPS: Final[tuple[tuple[str, type[Any]], ...]] = (
    ("serving", ServerConfig),
    ("routing", RouterConfig),
    ("cluster", ClusterConfig),
)
_ON: Final = ("1", "true", "yes", "on")
_OFF: Final = ("0", "false", "no", "off", "")


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
        found = _file_of(argv, environ)
        _add_flags(parser, environ, found)
        arguments = vars(parser.parse_args(argv))
        log_level, is_check = arguments["log_level"], arguments["check_config"]
        router = RouterConfig(**_taken(arguments, RouterConfig))
        cluster = ClusterConfig(**_taken(arguments, ClusterConfig))
        config = ServerConfig(router=router, cluster=cluster, **_taken(arguments, ServerConfig))
    except ConfigError as error:
        parser.error(found.located(str(error)))
    if is_check:
        sys.stdout.write(written(config, log_level))
        parser.exit(0)
    return config, log_level


def variable_of(known: Setting) -> str:
    """The environment variable of a flag."""
    return _PREFIX + known.flags[0].removeprefix("--").replace("-", "_").upper()


def _file_of(argv: Sequence[str] | None, environ: Mapping[str, str]) -> FileSettings:
    """What the file of settings says, which is read before the flags that overrule it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(_CONFIG, type=Path, default=environ.get(_PREFIX + "CONFIG"))
    path = parser.parse_known_args(argv)[0].config
    return FileSettings() if path is None else read_settings(path)


def _taken(arguments: Mapping[str, Any], config: type[Any]) -> dict[str, Any]:
    names = {each.name for each, _ in settings_of(config)}
    return {name: value for name, value in arguments.items() if name in names}


def _add_flags(
    parser: argparse.ArgumentParser, environ: Mapping[str, str], found: FileSettings
) -> None:
    parser.add_argument("--version", action="version", version=f"kvplug {__version__}")
    text = "YAML file of settings (docs/settings.md); flags and environment variables overrule it"
    parser.add_argument(_CONFIG, metavar="FILE", help=text)
    text = "print the settings that would be used, and exit: 0, or 2 if they are wrong"
    parser.add_argument("--check-config", action="store_true", help=text)
    for title, config in _GROUPS:
        group, hints = parser.add_argument_group(title), get_type_hints(config)
        for each, known in settings_of(config):
            given = environ.get(variable_of(known))
            # argparse parses a default that is a text as if it were given.
            default = found.values.get(each.name, each.default) if given is None else given
            _add_flag(group, each, known, hints[each.name], default)
    log_level = environ.get(_PREFIX + "LOG_LEVEL", found.values.get("log_level", "info"))
    levels = f"{', '.join(LOG_LEVELS)} (info)"
    parser.add_argument("--log-level", default=log_level, type=_log_level, metavar="X", help=levels)


def _add_flag(
    group: argparse._ArgumentGroup,
    each: Field[Any],
    known: Setting,
    hint: object,
    default: object,
) -> None:
    usual = known.default_text or ("none" if each.default is None else each.default)
    options: dict[str, Any] = {"dest": each.name, "help": _plain(f"{known.meaning} ({usual})")}
    kind = kind_of(hint)
    if kind is bool:
        if isinstance(default, str):  # of the variable: 1 is as if the flag were given
            default = bool(each.default) != _is_on(variable_of(known), default)
        action = "store_false" if each.default else "store_true"
        group.add_argument(*known.flags, action=action, default=default, **options)
        return
    if get_origin(kind) is tuple:
        parse = known.parse
        assert parse is not None, "what may be given several times has a form of its own"
        if isinstance(default, str):
            default = tuple(map(parse, default.split()))
        options["action"] = _Collect
    if get_origin(kind) is Literal:
        options |= {"type": known.parse or str, "choices": get_args(kind)}
    else:
        options |= {"type": known.parse or kind, "metavar": known.metavar or "X"}
    group.add_argument(*known.flags, default=default, **options)


class _Collect(argparse.Action):
    """A flag that may be given several times: all of them, instead of the default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        collected = () if before is self.default else before
        setattr(namespace, self.dest, (*collected, values))


def _log_level(text: str) -> str:
    if text.lower() not in LOG_LEVELS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(LOG_LEVELS)}, got {text!r}")
    return text.lower()


def _is_on(variable: str, text: str) -> bool:
    if text.lower() not in (*_ON, *_OFF):
        raise ConfigError(f"{variable}: expected 1 or 0, got {text!r}")
    return text.lower() in _ON


def _plain(markdown: str) -> str:
    """For --help: links and code without their marks."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", markdown)
    return text.replace("`", "").replace("%", "%%")
