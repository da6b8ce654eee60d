"""Flags of a command line, made from settings, each with an environment variable.

In:  the fields of a dataclass (kvplug/setting.py), the environment, what a file said.
Out: arguments of an argparse parser.

Each flag has a variable, which counts where the flag is not given: `--max-body-bytes` is
KVPLUG_MAX_BODY_BYTES. What may be given several times is separated by spaces there.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from kvplug._version import __version__
from kvplug.errors import ConfigError
from kvplug.setting import Setting, settings_of
from kvplug.setting_file import LOG_LEVELS, FileSettings, kind_of

PREFIX: Final = "KVPLUG_"
_CONFIG: Final = "--config"
_ON: Final = ("1", "true", "yes", "on")
_OFF: Final = ("0", "false", "no", "off", "")


def variable_of(known: Setting) -> str:
    """The environment variable of a flag."""
    return PREFIX + known.flags[0].removeprefix("--").replace("-", "_").upper()


def file_named(argv: Sequence[str] | None, environ: Mapping[str, str]) -> Path | None:
    """The file of settings, which is read before the flags that overrule it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(_CONFIG, type=Path, default=environ.get(PREFIX + "CONFIG"))
    path: Path | None = parser.parse_known_args(argv)[0].config
    return path


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """`--version` and `--config`."""
    parser.add_argument("--version", action="version", version=f"kvplug {__version__}")
    text = "YAML file of settings (docs/settings.md); flags and environment variables overrule it"
    parser.add_argument(_CONFIG, metavar="FILE", help=text)


def add_flags(
    parser: argparse.ArgumentParser,
    title: str,
    config: type[Any],
    environ: Mapping[str, str],
    found: FileSettings,
) -> None:
    """A group of all settings of a dataclass."""
    group, hints = parser.add_argument_group(title), get_type_hints(config)
    for each, known in settings_of(config):
        given = environ.get(variable_of(known))
        # argparse parses a default that is a text as if it were given.
        default = found.values.get(each.name, each.default) if given is None else given
        _add_flag(group, each, known, hints[each.name], default)


def add_log_level(
    parser: argparse.ArgumentParser, environ: Mapping[str, str], found: FileSettings
) -> None:
    """`--log-level`."""
    default = environ.get(PREFIX + "LOG_LEVEL", found.values.get("log_level", "info"))
    levels = f"{', '.join(LOG_LEVELS)} (info)"
    parser.add_argument("--log-level", default=default, type=_log_level, metavar="X", help=levels)


def taken(arguments: Mapping[str, Any], config: type[Any]) -> dict[str, Any]:
    """Of parsed arguments, those that are settings of this dataclass."""
    names = {each.name for each, _ in settings_of(config)}
    return {name: value for name, value in arguments.items() if name in names}


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
