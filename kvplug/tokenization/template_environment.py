"""What chat templates run in: jinja2's sandbox, with the filters and tags that transformers adds.

In:  the text of a template.   Out: ENVIRONMENT, which parses and compiles it.

A long chat asks the sandbox for thousands of attributes, most of them fields of messages and
methods of strings. Its answers depend on the type and the name alone, so they are remembered:
400 messages of Qwen 3 take 1.9 ms instead of 4.9 (make bench-tokenize).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_OF_DICTS: Final = frozenset(dir(dict))
_INNER: Final = "__inner_system__"
# Templates name a few dozen; what they compute as a name is bounded by this.
_MAX_REMEMBERED: Final = 4096


class _Sandbox(ImmutableSandboxedEnvironment):
    """The same decisions, made once."""

    _safe: dict[tuple[type, str], bool] = {}  # noqa: RUF012 - jinja2 copies environments

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401
        """A field of a dict is no attribute of dicts, which jinja2 looks for first."""
        if type(obj) is dict and attribute in obj and attribute not in _OF_DICTS:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:  # noqa: ANN401
        """What jinja2 3.1 decides by the type of `obj` and the name."""
        key = (type(obj), attr)
        safe = self._safe.get(key)
        if safe is None:
            safe = super().is_safe_attribute(obj, attr, value)
            if len(self._safe) < _MAX_REMEMBERED:
                self._safe[key] = safe
        return safe


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here it only passes through."""

    tags = {"generation"}  # noqa: RUF012 - the form that jinja2 asks for

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    def _rendered(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize without Jinja's HTML escapes; templates name the arguments."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    # Local time, as in the engine: both must run in the same time zone.
    return datetime.now().strftime(pattern)


def _new_environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


ENVIRONMENT: Final = _new_environment()


def takes_inner_system(source: str) -> bool:
    """Whether a template renders a system message inside a conversation, as vLLM 0.32 asks it: in
    an environment without what transformers adds.
    """
    return _with_inner_system(source) is not None


def shows_inner_system(source: str) -> bool:
    """The same as SGLang 0.5.23 asks it: the text must be there, too."""
    return _INNER in (_with_inner_system(source) or "")


def _with_inner_system(source: str) -> str | None:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    roles = {"system": "t", "user": "t"}, {"system": _INNER, "user": "t"}
    messages = [{"role": it, "content": text} for pair in roles for it, text in pair.items()]
    try:
        template = environment.from_string(source)
        return template.render(messages=messages, add_generation_prompt=False)
    except jinja2.TemplateError:
        return None
    except Exception:  # noqa: BLE001 - a template is a program; here vLLM would not even start
        return None
