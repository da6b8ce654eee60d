"""Wake a thread that waits in a poll, from another one that never waits.

In:  nothing.   Out: a descriptor that is readable.
"""

from __future__ import annotations

import os
from contextlib import suppress
from types import TracebackType


class Wake:
    """set, and end, from any thread; drain, and `with`, in the one that polls `fd`."""

    def __init__(self) -> None:
        self.has_ended = False
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_open = True

    def set(self) -> None:
        """Make the descriptor readable."""
        if self._is_open:
            with suppress(OSError):  # closed just now, or as often set as it can count
                os.eventfd_write(self.fd, 1)

    def end(self) -> None:
        """For good."""
        self.has_ended = True
        self.set()

    def drain(self) -> None:
        """Make it unreadable again."""
        with suppress(OSError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Nobody polls it any more."""
        if self._is_open:
            self._is_open = False
            os.close(self.fd)

    def __enter__(self) -> Wake:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
