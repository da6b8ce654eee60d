"""What nginx says of a request that is over, in a datagram of its access log.

In:  datagrams (syslog with JSON in it).   Out: an End for each that can be read.

They come by UDP on loopback, not on a Unix socket: of those a container's kernel keeps 11
(net.unix.max_dgram_qlen), which a thousand clients that leave at once overflow; of UDP as many as
fit the socket's buffer, hundreds with Linux's default. What is lost is load until it expires.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

import msgspec

logger = logging.getLogger(__name__)

_BUFFER_BYTES: Final = 2**23
_MAX_BYTES: Final = 2**12
_MAX_AT_ONCE: Final = 256


class End(msgspec.Struct, frozen=True):
    """A request that is over. Of each upstream that it went to, in order and separated by " : ",
    nginx's `upstream` statuses, times to `connect` and to the `header`, in seconds, "-" for none;
    done: "OK", or empty if the client left; bytes: of the answer's body; total: seconds.
    """

    id: str
    status: int
    done: str = ""
    bytes: int = 0
    upstream: str = ""
    connect: str = ""
    header: str = ""
    total: float = 0.0

    @property
    def client_left(self) -> bool:
        """Before the whole answer was out."""
        return not self.done


_decoder = msgspec.json.Decoder(End)


def read(datagram: bytes) -> End | None:
    """After the syslog header, as `<190>Nov 21 19:00:00 kvplug: {`; None if it is none of ours."""
    begin = datagram.find(b"{")
    try:
        return _decoder.decode(datagram[begin:]) if begin >= 0 else None
    except (msgspec.DecodeError, RecursionError):
        return None


class Ends:
    """start, stop; each End goes to `note`, other datagrams nowhere."""

    def __init__(self, note: Callable[[End], None]) -> None:
        self._note = note

    def start(self, port: int) -> None:
        """Listen on 127.0.0.1; OSError."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        try:
            self._socket.bind(("127.0.0.1", port))
        except OSError:
            self._socket.close()
            raise
        asyncio.get_running_loop().add_reader(self._socket, self._receive)

    def stop(self) -> None:
        """Listen no more."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _receive(self) -> None:
        """What is there, up to a number: others have their turn."""
        for _ in range(_MAX_AT_ONCE):
            try:
                datagram = self._socket.recv(_MAX_BYTES)
            except BlockingIOError:
                return
            if (end := read(datagram)) is not None:
                self._note(end)
