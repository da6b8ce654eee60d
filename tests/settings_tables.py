"""The tables of settings in docs/settings.md, made from the configuration: python -m
tests.settings_tables writes them.

In:  the settings of ServerConfig, RouterConfig and ClusterConfig.
Out: the page, with its two tables replaced.
"""

import re
from pathlib import Path

from kvplug.router.config import RouterConfig
from kvplug.server.cluster_config import ClusterConfig
from kvplug.server.config import ServerConfig
from kvplug.setting import settings_of
from kvplug.setting_flags import variable_of

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"


def flags():
    rows = [
        (_flag(known), _shown(field, known), known.meaning)
        for config in (ServerConfig, RouterConfig, ClusterConfig)
        for field, known in settings_of(config)
    ]
    rows.append(("`--log-level`", "info", "debug, info, warning, error"))
    rows.append(("`--config FILE`", "none", "[file of settings](#a-file-of-settings)"))
    text = "print the settings that would be used, and exit: 0, or 2 if they are wrong"
    rows.append(("`--check-config`", "off", text))
    return _table(("flag", "default", "meaning"), rows)


def fields():
    rows = [
        (f"`{field.name}`", _literal(field.default), _same_as(field, known))
        for field, known in settings_of(RouterConfig)
    ]
    return _table(("field", "default", "meaning"), rows)


def _same_as(field, known):
    # A switch turns its field off.
    return f"{'False ' if field.default is True else ''}as `{known.flags[0]}`"


def _flag(known):
    return ", ".join(f"`{name}`" for name in known.flag.split(", "))


def _shown(field, known):
    return known.default_text or ("none" if field.default is None else str(field.default))


def _literal(default):
    return f'"{default}"' if isinstance(default, str) else str(default)


def _table(head, rows):
    first, *others = [f"| {' | '.join(row)} |\n" for row in (head, *rows)]
    return first + "|---" * len(head) + "|\n" + "".join(others)


def page(text):
    """The text with its tables as they should be."""
    for head, table in (("flag", flags()), ("field", fields())):
        text = re.sub(
            rf"\| {head} \| default .*?\n\n",
            lambda _, t=table: t + "\n",
            text,
            count=1,
            flags=re.DOTALL,
        )
    return text


def variables():
    """Of the environment, each with its flag."""
    return {
        variable_of(known): known.flags[0]
        for config in (ServerConfig, RouterConfig, ClusterConfig)
        for _, known in settings_of(config)
    }


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
