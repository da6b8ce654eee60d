"""What the HTTP services have in common: an address, the signals that stop them.

In:  an address, SIGINT and SIGTERM.   Out: a URL, an error that names the address, an event.
"""

from __future__ import annotations

import asyncio
import errno
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvplug.errors import TransportError

RANK_HEADER: Final = "X-data-parallel-rank"
"""By which a client chooses a data-parallel rank of vLLM 0.32 and SGLang 0.5.23."""

# Of this machine: descriptors, buffers, memory, ports.
_SHORTAGES: Final = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
)


def is_local_shortage(error: BaseException) -> bool:
    """Whether this machine, not the other side, is the reason."""
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def url_of(host: str, port: int) -> str:
    """Where a service that listens there is found; an IPv6 address in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def listening_on(host: str, port: int) -> Iterator[None]:
    """An OSError within means that the address cannot be had: TransportError."""
    try:
        yield
    except OSError as error:
        raise TransportError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def stopped_by_signals() -> asyncio.Event:
    """Set by SIGINT or SIGTERM; a second signal ends the process at once."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _stop_or_abort, stopping)
    return stopping


def _stop_or_abort(stopping: asyncio.Event) -> None:
    if stopping.is_set():
        raise SystemExit(1)
    stopping.set()
