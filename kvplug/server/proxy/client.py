"""An answer on its way to a client: bytes to the transport of its connection.

In:  status, headers, the body or parts of a stream.   Out: HTTP/1.1 or 1.0 on the connection.

What aiohttp's responses do per part, a task switch and several layers of calls, costs more than the
kernel's work on it (docs/decisions.md, 103). aiohttp reads the requests, and keeps the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import struct
import termios
from collections.abc import Iterable
from http import HTTPStatus
from typing import Final

from aiohttp import web
from aiohttp.http import HttpVersion11

from kvplug.server.observability.journey import current
from kvplug.server.proxy.upstream import lines_of

_PHRASES: Final = {status.value: status.phrase.encode() for status in HTTPStatus}
_BODILESS: Final = frozenset((204, 304))
_LOOKS: Final = 4  # at a client that is behind, within its time limit


CLOSES: Final = web.RequestKey("closes", bool)
"""Of a request whose answer is the last one on its connection."""


class ClientAnswer(web.StreamResponse):
    """`send` the whole answer; or `begin`, `add` parts and `end`. What a handler returns.

    ConnectionResetError if the client is gone, or takes nothing for `timeout_s`.
    """

    def __init__(self, request: web.Request, timeout_s: float) -> None:
        if request.transport is None:
            raise ConnectionResetError("the client left")
        super().__init__()
        self._to, self._writer = request.transport, request.writer
        self._timeout_s = timeout_s
        self._is_1_1 = request.version >= HttpVersion11
        self._keeps = bool(request.keep_alive) and not request.get(CLOSES, False)
        self._most_bytes = self._to.get_write_buffer_limits()[1]
        self._head, self._is_chunked = b"", False

    @property
    def keep_alive(self) -> bool:
        """Whether the connection takes another request after this answer."""
        return self._keeps

    async def send(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """All of it."""
        if self._to.is_closing():
            raise ConnectionResetError("the client left")
        length = b"" if status in _BODILESS else b"Content-Length: %d\r\n" % len(body)
        self._to.writelines((self._head_of(status, headers, length), body))
        if self.is_behind:
            await self.caught_up()

    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """The head of a stream; it goes out with the first part."""
        self._is_chunked = self._is_1_1 and status not in _BODILESS
        self._keeps &= self._is_1_1  # else the end of the connection ends the answer
        length = b"Transfer-Encoding: chunked\r\n" if self._is_chunked else b""
        self._head = self._head_of(status, headers, length)

    def add(self, part: bytes) -> None:
        """Some bytes, never none."""
        if self._is_chunked:
            part = b"%x\r\n%b\r\n" % (len(part), part)
        if self._head:
            part, self._head = self._head + part, b""
        self._write(part)

    def end(self, last: bytes) -> None:
        """The last part, which may be empty."""
        if last:
            self.add(last)
        end = self._head + (b"0\r\n\r\n" if self._is_chunked else b"")
        if end:
            self._write(end)

    def abort(self) -> None:
        """Break it off, so that nobody takes what there is for all of it."""
        self._to.abort()

    @property
    def is_behind(self) -> bool:
        """Whether the client reads more slowly than it is written to."""
        return self._to.get_write_buffer_size() > self._most_bytes

    async def caught_up(self) -> None:
        """Until the client has read most of what there is, however long it takes."""
        num_unread, num_quiet = self._num_unread, 0
        while num_quiet < _LOOKS:
            try:
                async with asyncio.timeout(self._timeout_s / _LOOKS):
                    await self._writer.drain()
            except TimeoutError:
                before, num_unread = num_unread, self._num_unread
                num_quiet = 0 if num_unread < before else num_quiet + 1
            else:
                return
        self.abort()
        raise ConnectionResetError("the client reads nothing")

    @property
    def _num_unread(self) -> int:
        """Bytes that its side has not acknowledged. The kernel takes more from here only once a
        third of its buffer, of up to some MB, is free.
        """
        num, held = self._to.get_write_buffer_size(), struct.pack("i", 0)
        with contextlib.suppress(OSError, ValueError):
            descriptor = self._to.get_extra_info("socket").fileno()
            held = fcntl.ioctl(descriptor, termios.TIOCOUTQ, held)
        return num + int(struct.unpack("i", held)[0])

    def _write(self, data: bytes) -> None:
        """Nothing to a client that left, as its handler is about to be cancelled: uvloop's
        transports, once closed, raise an error.
        """
        if not self._to.is_closing():
            self._to.write(data)

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing: aiohttp calls it behind the handler."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing, too."""

    def _head_of(self, status: int, headers: Iterable[tuple[bytes, bytes]], length: bytes) -> bytes:
        self.set_status(status)
        if not self._keeps:
            length += b"Connection: close\r\n"
        elif not self._is_1_1:
            length += b"Connection: keep-alive\r\n"
        said = {name.lower(): value for name, value in current().answer_headers.items()}
        ours = b"".join(f"{name}: {value}\r\n".encode() for name, value in said.items())
        kept = lines_of(each for each in headers if each[0].lower().decode("latin-1") not in said)
        phrase = _PHRASES.get(status, b"")
        return b"HTTP/1.1 %d %b\r\n%b%b%b\r\n" % (status, phrase, kept, ours, length)
