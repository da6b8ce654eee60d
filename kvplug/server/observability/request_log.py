"""How the log is written: for people or, line by line as JSON, for programs.

In:  records; `facts` of a request.   Out: lines on stderr.

Facts are counts, times, names and ids: no prompts, answers, queries or headers.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import msgspec

from kvplug.server.config import LogFormat
from kvplug.server.observability.journey import requests_logger


def configure(log_format: LogFormat, level: str, *, logs_requests: bool) -> None:
    """The root logger writes to stderr from now on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    requests_logger.setLevel(logging.INFO if logs_requests else logging.CRITICAL)


class TextLines(logging.Formatter):
    """Time, level, logger, message, and facts as `name=value`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, without a traceback."""
        facts = " ".join(f"{name}={value}" for name, value in _facts_of(record).items())
        line = super().formatMessage(record)
        return f"{line} {facts}" if facts else line


class JsonLines(logging.Formatter):
    """An object on each line: time, level, logger, message, facts; traceback, if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_facts_of(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


def _facts_of(record: logging.LogRecord) -> dict[str, Any]:
    facts: dict[str, Any] = getattr(record, "facts", {})
    return facts
