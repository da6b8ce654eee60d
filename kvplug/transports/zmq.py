"""A subscription to stock event publishers (vLLM, SGLang) over ZMQ PUB/SUB.

In:  an endpoint and a topic prefix.   Out: multipart messages, the topic first, and when the
connection came and went.

Either it connects to one publisher, or it binds and many publishers connect to it. Bound, it is
told that a peer came or went, but not which one; whatever opens a connection (a probe of the port)
is a peer, because ZMQ tells every end of a connection, but not of which ones it was more.

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
_NUM_SEQUENCE_BYTES = 8
_RECONNECT_MS = 100
_MAX_RECONNECT_MS = 1000
# A peer whose machine is gone says no goodbye; libzmq answers these from a thread of its own.
_HEARTBEAT_S = 5.0
_MISSED_HEARTBEATS = 3


class Connection(Enum):
    """What happened to the connection."""

    CAME = "connected"
    WENT = "disconnected"


class ZmqSubscription:
    """One SUB socket with its monitor. Use it from one thread only."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        topic: str,
        *,
        bind: bool = False,
        heartbeat_s: float = _HEARTBEAT_S,
    ) -> None:
        """`endpoint` is the one that was bound, with its port, if `bind` is true.

        A peer that does not answer three heartbeats is gone.
        """
        self.endpoint, self.bind, self._heartbeat_s = endpoint, bind, heartbeat_s
        self._came = zmq.EVENT_ACCEPTED if bind else zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._context, self._topic = context, topic
        self._last_topic: bytes | None = None
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
                messages.append(self._receive_one())
        return messages

    def _receive_one(self) -> list[bytes]:
        """As recv_multipart, without its question after each part whether there are more.

        That costs as much as the parts. A topic as before and eight bytes are the first two parts
        of a stock message, which has three.
        """
        receive = self._socket.recv
        parts = [receive(zmq.NOBLOCK)]
        if parts[0] == self._last_topic:
            parts.append(receive(zmq.NOBLOCK))
            if len(parts[1]) == _NUM_SEQUENCE_BYTES:
                parts.append(receive(zmq.NOBLOCK))
                return parts
        self._last_topic = parts[0]
        while self._socket.getsockopt(zmq.RCVMORE):
            parts.append(receive(zmq.NOBLOCK))
        return parts

    def connection_changes(self) -> list[Connection]:
        """What happened to the connection since the last call, in order."""
        changes = []
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            came = event == self._came
            changes.append(Connection.CAME if came else Connection.WENT)
        return changes

    def renew(self) -> None:
        """Start over with a new socket, without what the old one had queued; not if it is bound."""
        if self.bind:
            raise TransportError(f"cannot renew {self.endpoint!r}: other publishers use it as well")
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
        heartbeat_ms = int(self._heartbeat_s * 1000)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, heartbeat_ms)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _MISSED_HEARTBEATS * heartbeat_ms)
        self._socket.setsockopt(zmq.SUBSCRIBE, self._topic.encode())
        self._monitor = self._socket.get_monitor_socket(self._came | zmq.EVENT_DISCONNECTED)
        try:
            self._attach()
        except zmq.ZMQError as error:
            self.close()
            attempt = "bind" if self.bind else "subscribe to events at"
            raise TransportError(
                f"cannot {attempt} {self.endpoint!r}: expected an endpoint like "
                f"tcp://127.0.0.1:5557, got: {error}"
            ) from error

    def _attach(self) -> None:
        if not self.bind:
            self._socket.connect(self.endpoint)
            return
        self._socket.bind(self.endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
