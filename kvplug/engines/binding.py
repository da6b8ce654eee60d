"""A socket and the address it is to be bound to.

In:  a ZMQ socket, an endpoint as the engine was given it.
Out: the socket bound, now or, if the address is taken, once it is free; each cause named once.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Final

import zmq

from kvplug.errors import ConfigError, TransportError

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 8.0
# A socket's path has 107 bytes at most; an endpoint adds its name, a rank and `_answers`.
_MAX_FOLDER_BYTES: Final = 70
# What may pass: another process holds the port, an interface is not up yet.
_PASSING: Final = frozenset({errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.ENODEV})


# Where a socket that is bound to every address is found from the same machine.
_LOCAL_ADDRESS: Final = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def endpoint_of_rank(endpoint: str, dp_rank: int) -> str:
    """Where one data-parallel rank is: its number is added to a tcp port, other names get a suffix.

    As in vLLM 0.32, except that it refuses ipc for ranks above 0. Port 0 is any free port anyway.
    """
    scheme, _, address = endpoint.partition("://")
    if scheme != "tcp":
        return f"{endpoint}_dp{dp_rank}" if dp_rank else endpoint
    host, _, port = address.rpartition(":")
    if not host or not (port == "*" or (port.isdecimal() and int(port) + dp_rank < 2**16)):
        raise ConfigError(
            f"cannot publish KV events of rank {dp_rank} at {endpoint!r}: expected "
            "tcp://ADDRESS:PORT with ADDRESS an IP address of this machine or *"
        )
    if port in ("0", "*"):
        return endpoint
    return f"tcp://{host}:{int(port) + dp_rank}"


def private_folder() -> str:
    """A new folder that only this user can enter, with a path short enough for a socket's."""
    usual = tempfile.gettempdir()
    is_short = len(os.fsencode(usual)) <= _MAX_FOLDER_BYTES
    return tempfile.mkdtemp(prefix="kvplug-", dir=usual if is_short else "/tmp")


def local_endpoint(endpoint: str) -> str | None:
    """Where a process on the same machine finds it; None for what cannot be found there."""
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc":  # a name that starts with @ is not a file
        return endpoint if address.startswith("@") else f"ipc://{Path(address).absolute()}"
    if scheme != "tcp":
        return None
    host, _, port = address.rpartition(":")
    if port in ("0", "*"):
        return None  # not bound yet, so nobody knows the port
    return f"tcp://{_LOCAL_ADDRESS.get(host, host)}:{port}"


def answers_beside(endpoint: str) -> str:
    """Where asks are taken if nobody says it: a free port of the same address, or a name beside."""
    scheme, _, address = endpoint.partition("://")
    if scheme != "tcp":
        return f"{endpoint}_answers"
    return f"tcp://{address.rpartition(':')[0]}:0"


def bind_or_raise(binding: Binding) -> None:
    """Bind now; TransportError if the address is taken."""
    try:
        binding.bind()
    except zmq.ZMQError as error:
        raise TransportError(
            f"cannot publish events at {binding.endpoint!r}: expected a free endpoint like "
            f"tcp://127.0.0.1:5557, got: {error}"
        ) from error


class Binding:
    """Call `attempt` from the socket's thread, again after `pause_s`, or `bind`, once and for all.

    Read `is_bound` and `endpoint`. Never connects: an event stream is something to come and fetch.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], endpoint: str, what: str, logger: logging.Logger
    ) -> None:
        self.endpoint = endpoint
        self.is_bound = False
        self._socket, self._what, self._logger = socket, what, logger
        self._pause_s, self._not_before = _FIRST_PAUSE_S, 0.0
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)

    @property
    def pause_s(self) -> float | None:
        """How long until `attempt` has something to do; None if it never will again."""
        if self.is_bound or self._not_before == float("inf"):
            return None
        return max(self._not_before - time.monotonic(), 0.0)

    def attempt(self) -> None:
        """Bind, unless that is done, or was tried a moment ago."""
        if self.is_bound or time.monotonic() < self._not_before:
            return
        try:
            self.bind()
        except zmq.ZMQError as error:
            self._postpone(error)
        else:
            self._logger.info("kvplug: %s at %s", self._what, self.endpoint)

    def bind(self) -> None:
        """Bind now; zmq.ZMQError if that fails."""
        self._socket.bind(self.endpoint)
        self.is_bound = True
        self.endpoint = _with_actual_port(self.endpoint, self._socket)

    def _postpone(self, error: zmq.ZMQError) -> None:
        is_first, may_pass = self._not_before == 0.0, error.errno in _PASSING
        if is_first:
            self._logger.warning(
                "kvplug: no %s at %s: expected an address of this machine that is free, got: %s. "
                "The engine serves without it; %s",
                self._what,
                self.endpoint,
                error.strerror,
                "the address is tried again" if may_pass else "the address is not tried again",
            )
        self._not_before = time.monotonic() + self._pause_s if may_pass else float("inf")
        self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)


def _with_actual_port(endpoint: str, socket: zmq.Socket[bytes]) -> str:
    """The endpoint as it was written, but for a port that the system chose."""
    head, _, port = endpoint.rpartition(":")
    if port not in ("0", "*") or not endpoint.startswith("tcp://"):
        return endpoint
    last = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(last, bytes)
    return f"{head}:{last.decode().rstrip(chr(0)).rpartition(':')[2]}"
