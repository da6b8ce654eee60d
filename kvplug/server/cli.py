"""The command line of `python -m kvplug.router`, made from the settings of the configuration.

In:  argv, environment variables.   Out: a ServerConfig, or exit code 2 with one sentence.

Each flag has a variable, which counts where the flag is not given: `--max-body-bytes` is
KVPLUG_MAX_BODY_BYTES. Several workers are separated by spaces.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from kvplug._version import __version__
from kvplug.errors import ConfigError
from kvplug.router.config import RouterConfig
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.setting import Setting, settings_of

_PROGRAM: Final = "python -m kvplug.router"
_DESCRIPTION: Final = (
    "An OpenAI-compatible router that sends each request to the engine that already holds its "
    "prefix in KV cache. Each flag has an environment variable: --max-body-bytes is "
    "KVPLUG_MAX_BODY_BYTES."
)
_PREFIX: Final = "KVPLUG_"
_LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_ON: Final = ("1", "true", "yes", "on")
_OFF: Final = ("0", "false", "no", "off", "")


def parse(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] = MappingProxyType({})
) -> tuple[ServerConfig, str]:
    """The configuration and the log level; leaves the process with code 2 on bad arguments."""
    parser = argparse.ArgumentParser(prog=_PROGRAM, description=_DESCRIPTION, allow_abbrev=False)
    try:
        _add_flags(parser, environ)
        arguments = vars(parser.parse_args(argv))
        log_level = arguments.pop("log_level")
        arguments["workers"] = arguments["workers"] or _workers_of(environ)
        router = RouterConfig(**_taken(arguments, RouterConfig))
        config = ServerConfig(router=router, **_taken(arguments, ServerConfig))
    except ConfigError as error:
        parser.error(str(error))
    return config, log_level


def variable_of(known: Setting) -> str:
    """The environment variable of a flag."""
    return _PREFIX + known.flags[0].removeprefix("--").replace("-", "_").upper()


def _taken(arguments: Mapping[str, Any], config: type[Any]) -> dict[str, Any]:
    names = {each.name for each, _ in settings_of(config)}
    return {name: value for name, value in arguments.items() if name in names}


def _workers_of(environ: Mapping[str, str]) -> tuple[WorkerSpec, ...]:
    return tuple(map(WorkerSpec.parse, environ.get(_PREFIX + "WORKER", "").split()))


def _add_flags(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    parser.add_argument("--version", action="version", version=f"kvplug {__version__}")
    for title, config in (("serving", ServerConfig), ("routing", RouterConfig)):
        group, hints = parser.add_argument_group(title), get_type_hints(config)
        for each, known in settings_of(config):
            _add_flag(group, each, known, hints[each.name], environ)
    log_level = environ.get(_PREFIX + "LOG_LEVEL", "info")
    levels = f"{', '.join(_LOG_LEVELS)} (info)"
    parser.add_argument("--log-level", default=log_level, type=_log_level, metavar="X", help=levels)


def _add_flag(
    group: argparse._ArgumentGroup,
    each: Field[Any],
    known: Setting,
    hint: object,
    environ: Mapping[str, str],
) -> None:
    default = known.default_text or ("none" if each.default is None else each.default)
    options: dict[str, Any] = {"dest": each.name, "help": _plain(f"{known.meaning} ({default})")}
    given = environ.get(variable_of(known))
    kind = _kind_of(hint)
    if kind is bool:
        # The flag turns the default around.
        turned = given is not None and _is_on(variable_of(known), given)
        is_on = bool(each.default) != turned
        group.add_argument(*known.flags, action="store_false", default=is_on, **options)
        return
    if each.name == "workers":
        options["action"] = "append"
    else:
        # argparse parses a default that is a text as if it were given.
        options["default"] = each.default if given is None else given
    if get_origin(kind) is Literal:
        options["choices"] = get_args(kind)
    else:
        options |= {"type": known.parse or kind, "metavar": known.metavar or "X"}
    group.add_argument(*known.flags, **options)


def _kind_of(hint: object) -> object:
    """The type of a setting's values, None left aside."""
    if get_origin(hint) in (Union, UnionType):
        [hint] = [each for each in get_args(hint) if each is not NoneType]
    return hint


def _log_level(text: str) -> str:
    if text.lower() not in _LOG_LEVELS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(_LOG_LEVELS)}, got {text!r}")
    return text.lower()


def _is_on(variable: str, text: str) -> bool:
    if text.lower() not in (*_ON, *_OFF):
        raise ConfigError(f"{variable}: expected 1 or 0, got {text!r}")
    return text.lower() in _ON


def _plain(markdown: str) -> str:
    """For --help: links and code without their marks."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", markdown)
    return text.replace("`", "").replace("%", "%%")
