"""What a process has counted outlives it: a sum over processes that went down would read as a
restart of all of them.

In:  the metrics of a process.   Out: its counters and those of the ones that died in its place.

Each process leaves its page of /metrics in the shared folder before anyone sees it. While it is
away its counters are read there, and who takes its place goes on from them. So a sum never goes
down; what a killed process counted since it was last asked is lost.
"""

from __future__ import annotations

import logging

from kvplug.server.processes.merging import merged, text_of
from kvplug.shared.folder import SharedFolder

logger = logging.getLogger(__name__)


class LastPage:
    """turned: what a process says of itself to what it says of its place."""

    def __init__(self, folder: SharedFolder, name: str) -> None:
        self._folder, self._name = folder, name
        self._before = last_counters(folder, name)

    def turned(self, page: str) -> str:
        """With what was counted before this process, and kept for the next one."""
        if self._before:
            page = text_of(merged([page, self._before]))
        try:
            self._folder.write(_file_of(self._name), page.encode())
        except OSError as error:  # memory is full: what is counted counts while it lives
            logger.warning("the counters of %s cannot be kept: %s", self._name, error.strerror)
        return page


def last_counters(folder: SharedFolder, name: str) -> str:
    """Without gauges, which say what is; "" if the process has never been asked."""
    try:
        page = folder.read(_file_of(name)).decode()
    except FileNotFoundError:
        return ""
    return text_of(family for family in merged([page]) if family.type != "gauge")


def _file_of(name: str) -> str:
    return f"{name}.metrics"
