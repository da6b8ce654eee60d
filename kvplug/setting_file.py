"""A file of settings, as `--config FILE` names it: YAML, by the names of the fields.

In:  a file, a dataclass of settings (kvplug/setting.py), and others that have a section each.
Out: values for the fields, or a ConfigError that begins with FILE:LINE.

A key may also be the name of its flag, without dashes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from kvplug.errors import ConfigError
from kvplug.setting import Setting, settings_of, shown

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_LOG_LEVEL: Final = "log_level"
_MAX_BYTES: Final = 2**24
_KINDS: Final[dict[object, tuple[str, tuple[type, ...], Callable[[Any], object]]]] = {
    int: ("a whole number", (int,), int),
    float: ("a number", (int, float), float),
    str: ("a text", (str,), str),
    bool: ("true or false", (bool,), bool),
    Path: ("a path", (str,), Path),
}

_Key = tuple[Field[Any], Setting, object]
Sections = Mapping[str, type[Any]]
_NO_SECTIONS: Final[Sections] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class FileSettings:
    """values: by field, what a file says; lines: where it says that."""

    path: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    def located(self, message: str) -> str:
        """A message of a configuration, with the line of the first field that it names."""
        named = [
            (found.start(), line)
            for name, line in self.lines.items()
            if (found := re.search(rf"\b{name.removesuffix('s')}s?\b", message))
        ]
        return f"{self.path}:{min(named)[1]}: {message}" if named else message


def read_settings(path: Path, config: type[Any], sections: Sections = _NO_SECTIONS) -> FileSettings:
    """What the file says; ConfigError for a key that is unknown or given twice, and for a value of
    another type. `sections`: by key, the dataclasses of settings that are in a mapping of their
    own.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"config: cannot read {str(path)!r}: {error.strerror}") from error
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"config: {str(path)!r} is too large: expected at most 16 MiB")
    try:
        root = yaml.compose(text.decode(), Loader=yaml.SafeLoader)
        return _Reader(str(path), config, sections).read(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{at}: expected YAML: {error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: expected YAML: {' '.join(str(error).split())}") from error


class _Reader:
    """read the root of one file."""

    def __init__(self, path: str, config: type[Any], sections: Sections) -> None:
        self._path, self._config, self._sections = path, config, sections
        self._found = FileSettings(path)
        self._constructor = yaml.SafeLoader("")

    def read(self, root: yaml.Node | None) -> FileSettings:
        keys = _keys_of(self._config)
        known = {**keys, **self._sections, _LOG_LEVEL: None}
        for name, node, value in self._items(root, known):
            if name == _LOG_LEVEL:
                self._take(name, node, self._one_of(node, value, LOG_LEVELS))
            elif name in self._sections:
                self._read_section(self._sections[name], value)
            else:
                self._take(keys[name][0].name, node, self._value(node, value, keys[name]))
        return self._found

    def _read_section(self, config: type[Any], root: yaml.Node) -> None:
        known = _keys_of(config)
        for name, node, value in self._items(root, known):
            self._take(known[name][0].name, node, self._value(node, value, known[name]))

    def _items(
        self, root: yaml.Node | None, known: Mapping[str, Any]
    ) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """The keys of a mapping that are known, each with its node and that of its value."""
        if root is None or root.tag.endswith(":null"):
            return
        if not isinstance(root, yaml.MappingNode):
            raise self._error(root, "expected a mapping, `key: value` on each line")
        for key, value in root.value:
            name = str(key.value).replace("-", "_") if isinstance(key, yaml.ScalarNode) else ""
            if name not in known:
                raise self._error(
                    key, f"unknown key {shown(str(key.value))}{self._nearest(name, known)}"
                )
            yield name, key, value

    def _take(self, name: str, node: yaml.Node, value: object) -> None:
        if name in self._found.values:
            before = self._found.lines[name]
            raise self._error(node, f"{name} is given twice; line {before} has it already")
        self._found.values[name] = value
        self._found.lines[name] = node.start_mark.line + 1

    def _value(self, key_node: yaml.Node, node: yaml.Node, key: _Key) -> object:
        _, known, hint = key
        if node.tag.endswith(":null") and NoneType in get_args(hint):
            return None
        if get_origin(hint) is tuple:
            return self._list(key_node, node, get_args(hint)[0])
        kind = kind_of(hint)
        if get_origin(kind) is Literal:
            parse = known.parse or (lambda text: text)
            return self._one_of(key_node, node, get_args(kind), parse)
        return self._plain(key_node, node, kind)

    def _plain(self, key: yaml.Node, node: yaml.Node, kind: object) -> object:
        value = self._constructor.construct_object(node, deep=True)
        expected, types, make = _KINDS[kind]
        if not isinstance(value, types) or (isinstance(value, bool) and kind is not bool):
            raise self._error(node, f"{key.value}: expected {expected}, got {shown(value)}")
        return make(value)

    def _one_of(
        self,
        key: yaml.Node,
        node: yaml.Node,
        values: tuple[str, ...],
        parse: Callable[[str], Any] = str,
    ) -> str:
        value: str = parse(str(node.value))
        if value not in values:
            text = f"{key.value}: expected one of {', '.join(values)}; got {shown(node.value)}"
            raise self._error(node, text)
        return value

    def _list(self, key: yaml.Node, node: yaml.Node, item: type[Any]) -> tuple[object, ...]:
        if not isinstance(node, yaml.SequenceNode):
            raise self._error(node, f"{key.value}: expected a list, `- item` on each line")
        return tuple(self._item(each, item) for each in node.value)

    def _item(self, node: yaml.Node, item: type[Any]) -> object:
        """One worker, say: as its flag has it, or its fields one by one."""
        try:
            if isinstance(node, yaml.ScalarNode):
                return item.parse(node.value)
            hints, known = get_type_hints(item), {each.name: each for each in fields(item)}
            given = {
                name: self._plain(key, value, kind_of(hints[name]))
                for name, key, value in self._items(node, known)
            }
            made: Any = item
            return item.parse(made(**given).text)  # which checks each of them
        except (ConfigError, TypeError) as error:
            if str(error).startswith(f"{self._path}:"):
                raise
            raise self._error(node, str(error)) from error

    def _nearest(self, name: str, known: Mapping[str, Any]) -> str:
        """The remedy."""
        for section, config in self._sections.items():
            if name in _keys_of(config):
                return f"; it belongs under `{section}`"
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        return (
            f"; did you mean `{close[0]}`?" if close else f"; known are {', '.join(sorted(known))}"
        )

    def _error(self, node: yaml.Node, text: str) -> ConfigError:
        return ConfigError(f"{self._path}:{node.start_mark.line + 1}: {text}")


def _keys_of(config: type[Any]) -> dict[str, _Key]:
    """By key, the fields; the flag of a switch turns its field around, and is no key."""
    hints, keys = get_type_hints(config), {}
    for each, known in settings_of(config):
        names = [] if hints[each.name] is bool else [flag.strip("-") for flag in known.flags]
        for name in (each.name, *names):
            keys[name.replace("-", "_")] = (each, known, hints[each.name])
    return keys


def kind_of(hint: object) -> object:
    """The type of a setting's values, None left aside."""
    if get_origin(hint) in (Union, UnionType):
        [hint] = [each for each in get_args(hint) if each is not NoneType]
    return hint
