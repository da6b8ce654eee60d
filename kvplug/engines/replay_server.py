"""Past batches again, for a follower that missed some: the replay socket of vLLM and SGLang.

In:  requests [b"", first number]; a History that the sender fills.
Out: per batch [b"", topic, number, payload], oldest first, and at the end [b"", b"", END, b""].

A thread of its own, so live batches go on meanwhile and an idle engine is not polled.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from typing import Final

import zmq

from kvplug.engines.binding import Binding

END: Final = (-1).to_bytes(8, "big", signed=True)
"""Stands where the number is, when a replay is complete."""

_MAX_REQUEST_BYTES: Final = 1024  # a request has 40; the handshake of CURVE needs 400
# A client that does not read for so long is left; it asks again when it does.
_SEND_LIMIT_MS: Final = 2000

History = deque[tuple[bytes, bytes]]
"""(number as 8 bytes, payload) of the last batches, in order. One thread appends."""


class ReplayServer:
    """start, stop; read num_replays and num_abandoned. `binding` is tried before start."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        history: History,
        topic: bytes,
        logger: logging.Logger,
    ) -> None:
        self.num_replays = self.num_abandoned = 0
        self._history, self._topic, self._logger = history, topic, logger
        self._router = context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        # Without this a ROUTER drops what a slow client has no room for, and nobody is told.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.SNDTIMEO, _SEND_LIMIT_MS)
        self.binding = Binding(self._router, endpoint, "replay of KV events", logger)
        self._is_odd_request_named = False
        self._thread = threading.Thread(target=self._run, name="kvplug-replay", daemon=True)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """To be protected by keys before it is bound."""
        return self._router

    @property
    def endpoint(self) -> str:
        """Where replays are asked for."""
        return self.binding.endpoint

    def start(self) -> None:
        """Answer requests from now on, or from when the address is free."""
        self._wake_read, self._wake_write = socket.socketpair()
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread and close its socket; whether that was done within timeout_s."""
        self._wake_write.close()  # the thread sees the end of its wake-up line
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_read.fileno(), zmq.POLLIN)
        with self._router, self._wake_read:
            while self._wake_read.fileno() not in (ready := dict(poller.poll(self._pause_ms()))):
                self.binding.attempt()
                if self._router in ready:
                    self._serve_safely()

    def _pause_ms(self) -> int | None:
        pause_s = self.binding.pause_s
        return None if pause_s is None else int(pause_s * 1000) + 1

    def _serve_safely(self) -> None:
        try:
            self._serve(self._router.recv_multipart(zmq.NOBLOCK))
        except zmq.ZMQError as error:  # the client is gone, or does not read
            self.num_abandoned += 1
            self._logger.debug("kvplug: a replay was abandoned: %s", error)

    def _serve(self, request: list[bytes]) -> None:
        match request:
            case [client, b"", first] if len(first) == 8:
                self._replay(client, first)
            case _:
                self._name_odd_request(len(request) - 1)

    def _name_odd_request(self, num_parts: int) -> None:
        level = logging.DEBUG if self._is_odd_request_named else logging.WARNING
        self._is_odd_request_named = True
        self._logger.log(
            level,
            "kvplug: passed over a replay request of %d parts, expected 2: an empty one and a "
            "number of 8 bytes",
            num_parts,
        )

    def _replay(self, client: bytes, first: bytes) -> None:
        # Big-endian numbers of one length are in the order of their bytes. The copy is one step
        # for the interpreter, so the sender may append meanwhile.
        batches = [entry for entry in self._history.copy() if entry[0] >= first]
        for number, payload in batches:
            self._router.send_multipart((client, b"", self._topic, number, payload))
        self._router.send_multipart((client, b"", b"", END, b""))
        self.num_replays += 1
        self._logger.debug("kvplug: replayed %d batches", len(batches))
