"""A subscription to one stock event publisher (vLLM, SGLang) over ZMQ PUB/SUB.

In:  an endpoint and a topic prefix.   Out: multipart messages, and when the connection came and
went.

ZMQ reconnects by itself and says nothing, so a message after a reconnection looks like any other.
A monitor socket tells the two lives apart; `renew` then leaves whatever the old life had queued.
"""

from __future__ import annotations

from contextlib import suppress
from enum import Enum

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvplug.errors import TransportError

_MAX_MESSAGE_BYTES = 64 * 2**20
# As many as vLLM's and SGLang's publishers queue (their `hwm`).
_MAX_QUEUED_MESSAGES = 100_000
_RECONNECT_MS = 100
_MAX_RECONNECT_MS = 1000
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Connection(Enum):
    """What happened to the connection."""

    CAME = "connected"
    WENT = "disconnected"


class ZmqSubscription:
    """One SUB socket with its monitor. Use it from one thread only."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, topic: str) -> None:
        self.endpoint = endpoint
        self._context, self._topic = context, topic
        self._open()

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """What to poll for input: messages, and connection changes."""
        return self._socket, self._monitor

    def receive(self, max_messages: int) -> list[list[bytes]]:
        """Messages that have arrived, without waiting."""
        messages: list[list[bytes]] = []
        with suppress(zmq.Again):
            while len(messages) < max_messages:
                messages.append(self._socket.recv_multipart(zmq.NOBLOCK))
        return messages

    def connection_changes(self) -> list[Connection]:
        """What happened to the connection since the last call, in order."""
        changes = []
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            came = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            changes.append(Connection.CAME if came else Connection.WENT)
        return changes

    def renew(self) -> None:
        """Start over with a new socket, without what the old one had queued."""
        self.close()
        self._open()

    def close(self) -> None:
        """Close both sockets at once; safe to call twice."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        self._socket.setsockopt(zmq.SUBSCRIBE, self._topic.encode())
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        try:
            self._socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(
                f"cannot subscribe to events at {self.endpoint!r}: expected an endpoint like "
                f"tcp://127.0.0.1:5557, got: {error}"
            ) from error
