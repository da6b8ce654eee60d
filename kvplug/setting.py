"""Settings: one definition of each, as metadata of a dataclass field.

In:  a default, what it means, what fits.   Out: a field; ConfigError for a value that does not fit.

The command line (kvplug/server/cli.py), its environment variables and the tables of
docs/settings.md are made from these fields.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields
from numbers import Integral, Real
from reprlib import repr as shortened
from typing import Any, Final, NamedTuple, TypeVar

from kvplug.errors import ConfigError

_T = TypeVar("_T")
_KEY: Final = "setting"
_MAX_COUNT: Final = 2**63 - 1


class Limits(NamedTuple):
    """What fits, as a sentence has it after "must be", and as a test of any value."""

    expected: str
    fits: Callable[[Any], bool]

    @property
    def or_none(self) -> Limits:
        """The same, or None."""
        fits = self.fits
        return Limits(f"{self.expected}, or None", lambda value: value is None or fits(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is known of a setting.

    meaning: one line of Markdown. flag: of the command line, as `--name`, `--name, --alias` or
    `--name VALUE`. default_text: how the default is shown, if not as it is. parse: the flag's text
    to a value, if the field's type does not say it.
    """

    meaning: str
    flag: str
    limits: Limits | None
    default_text: str | None
    parse: Callable[[str], Any] | None

    @property
    def flags(self) -> list[str]:
        """All names of the flag."""
        return [part for part in self.flag.replace(",", "").split() if part.startswith("--")]

    @property
    def metavar(self) -> str | None:
        """What stands for its value, if it has a name."""
        return next((part for part in self.flag.split(" ") if not part.startswith("--")), None)


def setting(
    default: _T,
    meaning: str,
    *,
    flag: str,
    limits: Limits | None = None,
    default_text: str | None = None,
    parse: Callable[[str], Any] | None = None,
) -> _T:
    """A dataclass field with this default."""
    known = Setting(
        meaning=meaning, flag=flag, limits=limits, default_text=default_text, parse=parse
    )
    return field(default=default, metadata={_KEY: known})


def settings_of(config: type[Any]) -> Iterator[tuple[Field[Any], Setting]]:
    """The settings of a dataclass, in order."""
    for each in fields(config):
        if _KEY in each.metadata:
            yield each, each.metadata[_KEY]


def check_settings(config: object) -> None:
    """ConfigError for the first value that does not fit."""
    for each, known in settings_of(type(config)):
        value = getattr(config, each.name)
        if known.limits is not None and not known.limits.fits(value):
            raise ConfigError(f"{each.name} must be {known.limits.expected}, got {shown(value)}")


def count(text: str) -> int:
    """For flags: what the tables of an index can count to."""
    try:
        number = int(text)
    except ValueError:
        number = _MAX_COUNT + 1
    if number > _MAX_COUNT:
        raise argparse.ArgumentTypeError(f"expected a whole number below 2**63, got {text!r}")
    return number


def whole(value: object) -> int | float:
    """An int; NaN for all but whole numbers, so it is in no range. True and False are none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return math.nan
    return int(value)


def finite(value: object) -> float:
    """A float; NaN for all but numbers that a float can be. True and False are none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def shown(value: object) -> str:
    """How it is named in a sentence: on one line, and not at length."""
    try:
        return " ".join(shortened(value).split())
    except ValueError:  # Python writes no whole numbers of thousands of digits
        return "a number of thousands of digits"


AT_LEAST_0: Final = Limits("a finite number of at least 0", lambda value: finite(value) >= 0)
WEIGHT: Final = Limits("a number in [0, 1e9]", lambda value: 0 <= finite(value) <= 1e9)
"""Of something in a cost, which stays finite so."""
FINITE_ABOVE_0: Final = Limits("a finite number above 0", lambda value: finite(value) > 0)
ABOVE_0: Final = Limits("above 0", lambda value: finite(value) > 0)
SHARE: Final = Limits("a number in [0, 1]", lambda value: 0 <= finite(value) <= 1)
SWITCH: Final = Limits("True or False", lambda value: isinstance(value, bool))
