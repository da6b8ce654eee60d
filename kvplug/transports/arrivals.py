"""What has arrived in another thread: messages, connection changes, and a socket that wakes.

In:  whatever one thread puts in.   Out: the same, in order, in the thread that polls `fileno`.
"""

from __future__ import annotations

import socket
from collections import deque
from contextlib import suppress
from typing import Final, Generic, TypeVar

from kvplug.transports.base import Connection

_WAKE_BYTES: Final = 4096

_T = TypeVar("_T")


class Arrivals(Generic[_T]):
    """put, tell and wake from the one thread; fileno, changes, take from the other; close."""

    def __init__(self) -> None:
        self.queue: deque[_T] = deque()
        self._changes: deque[Connection] = deque()
        self._is_woken = False
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    @property
    def fileno(self) -> int:
        """Readable when something has arrived; `changes` makes it wait again."""
        return self._read.fileno()

    def put(self, arrived: _T) -> None:
        """A message, behind the others."""
        self.queue.append(arrived)
        self.wake()

    def tell(self, change: Connection) -> None:
        """A change of the connection."""
        self._changes.append(change)
        self.wake()

    def wake(self) -> None:
        """Whoever polls looks again."""
        if not self._is_woken:
            self._is_woken = True
            with suppress(OSError):  # closed just now
                self._write.send(b"\0")

    def changes(self) -> list[Connection]:
        """Since the last call."""
        with suppress(BlockingIOError):
            self._read.recv(_WAKE_BYTES)
        self._is_woken = False  # what is put from now on wakes again
        return _taken(self._changes, len(self._changes))

    def take(self, max_length: int) -> list[_T]:
        """The next ones."""
        return _taken(self.queue, max_length)

    def close(self) -> None:
        """Drop what is left; again is harmless."""
        self.queue.clear()
        self._read.close()
        self._write.close()


def _taken(queue: deque[_T], max_length: int) -> list[_T]:
    taken: list[_T] = []
    with suppress(IndexError):
        while len(taken) < max_length:
            taken.append(queue.popleft())
    return taken
