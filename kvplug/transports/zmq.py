"""Event publishers (vLLM, SGLang, kvplug) over ZMQ: their PUB/SUB stream and their replay socket.

In:  endpoints and a topic prefix.   Out: the contract of kvplug/transports/base.py.

A source either connects to one publisher, or binds and many publishers connect to it. Bound, it
learns that a peer came or went, but not which one; whatever opens a connection (a probe of the
port) is a peer.

ZMQ reconnects by itself and says nothing, so a message after a reconnection looks like any other.
A monitor socket reports the loss; the event thread then opens another source, without what the
publisher's former incarnation had queued.

    stream    [topic, 8-byte big-endian sequence number, payload]; older publishers send no number
    replay    we send ["", request], DEALER to ROUTER; of stock publishers it is an 8-byte number
              vLLM answers ["", topic, 8-byte number, payload] *, then ["", "", -1 in 8 bytes, ""]
              older publishers leave the topic out

SGLang's are the same, and ours, where the request is an Ask and a hello may name the socket. Seen
on vLLM 0.32.0 and SGLang 0.5.23; no topic before vllm#45177.
"""

from __future__ import annotations

import time
from contextlib import suppress
from math import inf
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvplug.curve_keys import ClientKeys
from kvplug.errors import TransportError
from kvplug.transports.base import Connection, Message

_MAX_MESSAGE_BYTES: Final = 64 * 2**20
# As many as vLLM's and SGLang's publishers queue (their `hwm`). An engine drops the part of a
# replay that finds no room here; its buffer has 10,000 messages by default (`buffer_steps`).
_MAX_QUEUED_MESSAGES: Final = 100_000
# ZMQ allows 1,023 by default, and a source has up to four.
_MAX_SOCKETS: Final = 65_535
_NUM_SEQUENCE_BYTES: Final = 8
_END_OF_REPLAY: Final = b"\xff" * _NUM_SEQUENCE_BYTES
_AT_ONCE: Final = int(zmq.NOBLOCK)  # converting the enum costs a third of a receive
_RECONNECT_MS: Final = 100
_MAX_RECONNECT_MS: Final = 1000
_RETRY_HANDSHAKE_S: Final = 1.0
# A peer whose machine is gone says no goodbye; libzmq answers these from a thread of its own.
_HEARTBEAT_S: Final = 5.0
_MISSED_HEARTBEATS: Final = 3

_ANY_HOST: Final = frozenset({"*", "0.0.0.0", "[::]", "::", "0"})

_Context = zmq.Context[zmq.Socket[bytes]]


def message_of(frames: list[bytes]) -> Message:
    """Name the parts of [topic, number, payload] or [topic, payload]."""
    match frames:
        case [topic, sequence, payload] if len(sequence) == _NUM_SEQUENCE_BYTES:
            return Message(topic, int.from_bytes(sequence, "big"), payload)
        case [topic, payload]:
            return Message(topic, None, payload)
    sizes = ", ".join(str(len(frame)) for frame in frames[:4])
    seen = f"{len(frames)} parts (bytes: {sizes})"
    return Message(
        frames[0] if frames else b"",
        None,
        b"",
        "cannot read a message: expected [topic, 8-byte sequence number, payload] or "
        f"[topic, payload]; got {seen}",
    )


def reachable(named: str, connected: str) -> str:
    """The endpoint that a publisher names, seen from where its stream was connected.

    TransportError unless it is tcp, or ipc as the stream is: whoever publishes must not open files
    of this machine.
    """
    scheme, _, address = named.partition("://")
    stream_scheme, _, stream_address = connected.partition("://")
    if scheme == "ipc" == stream_scheme:
        return named
    host, _, port = address.rpartition(":")
    if scheme != "tcp" or not port.isdecimal() or (host in _ANY_HOST and stream_scheme != "tcp"):
        raise TransportError(
            f"cannot ask the publisher of {connected!r} at {named!r:.200}: expected an endpoint "
            "like tcp://10.0.0.7:5558"
        )
    return f"tcp://{stream_address.rpartition(':')[0] if host in _ANY_HOST else host}:{port}"


class ZmqTransport:
    """All sockets of one context."""

    def __init__(
        self, *, heartbeat_s: float = _HEARTBEAT_S, keys: ClientKeys | None = None
    ) -> None:
        """A peer that does not answer three heartbeats is gone. With `keys`, all connections are
        encrypted, and only to publishers that have the secret to the public key in them.
        """
        self._heartbeat_s, self._keys = heartbeat_s, keys
        self._context: _Context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._sources: list[ZmqSource] = []

    def check(self, endpoint: str) -> None:
        """TransportError if ZMQ cannot connect to such an endpoint."""
        # On a context of its own: sockets of ours belong to the event thread.
        try:
            with zmq.Context() as context, context.socket(zmq.SUB) as probe:
                probe.connect(endpoint)
        except zmq.ZMQError as error:
            raise _cannot("subscribe to events at", endpoint, error) from error

    def replay_of(self, endpoint: str) -> str | None:
        """Nobody knows: it must be said."""
        return None

    def connect(self, endpoint: str, topic: str, replay: str | None) -> ZmqSource:
        """Subscribe to the publisher there."""
        return self._open(endpoint, topic, replay, bind=False)

    def bind(self, endpoint: str, topic: str) -> tuple[ZmqSource, str]:
        """Let publishers connect; a port `*` is any free one. TransportError with keys, which are
        a client's.
        """
        if self._keys is not None:
            raise TransportError(
                f"cannot bind {endpoint!r} with CURVE keys: expected publishers to connect to"
            )
        source = self._open(endpoint, topic, None, bind=True)
        return source, source.endpoint

    def close(self) -> None:
        """Close all sockets at once."""
        for source in self._sources:
            source.close()
        self._context.destroy(linger=0)

    def _open(self, endpoint: str, topic: str, replay: str | None, *, bind: bool) -> ZmqSource:
        sockets = _Sockets(self._context, self._keys)
        source = ZmqSource(
            sockets, endpoint, topic, replay, heartbeat_s=self._heartbeat_s, bind=bind
        )
        self._sources = [*(each for each in self._sources if not each.is_closed), source]
        return source


class ZmqSource:
    """One SUB socket with its monitor."""

    def __init__(
        self,
        sockets: _Sockets,
        endpoint: str,
        topic: str,
        replay: str | None,
        *,
        heartbeat_s: float,
        bind: bool = False,
    ) -> None:
        """`endpoint` becomes the one that was bound, with its port, if `bind` is true."""
        self.endpoint, self._replay = endpoint, replay
        self._sockets = sockets
        self._is_open, self._retry_at_s = bind, inf
        self._last_topic: bytes | None = None
        self._opened = zmq.EVENT_ACCEPTED if bind else zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._monitor: zmq.Socket[bytes] | None = None
        attempt = "bind" if bind else "subscribe to events at"
        self._socket = sockets.open(zmq.SUB, attempt, endpoint)
        try:
            self._set_options(topic, int(heartbeat_s * 1000))
            self._attach(bind=bind)
        except zmq.ZMQError as error:
            self.close()
            raise _cannot(attempt, endpoint, error) from error

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._socket.closed

    def filenos(self) -> tuple[int, ...]:
        """Of messages, and of connection changes."""
        assert self._monitor is not None
        return self._socket.fileno(), self._monitor.fileno()

    def connection_changes(self) -> list[Connection]:
        """What happened to the connection since the last call, in order."""
        assert self._monitor is not None
        changes = []
        with suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
                if event == self._opened:
                    self._is_open, self._retry_at_s = True, inf
                    changes.append(Connection.OPENED)
                elif self._is_open:
                    changes.append(Connection.LOST)
                else:  # a handshake failed: nothing was lost
                    self._retry_at_s = time.monotonic() + _RETRY_HANDSHAKE_S
        if time.monotonic() >= self._retry_at_s:
            self._connect_again()
        return changes

    def _connect_again(self) -> None:
        """ZMQ itself gives up for good when a publisher refuses a key, which may be allowed now."""
        self._retry_at_s = inf
        with suppress(zmq.ZMQError):  # it may have dropped the endpoint
            self._socket.disconnect(self.endpoint)
        with suppress(zmq.ZMQError):
            self._socket.connect(self.endpoint)

    def receive(self, max_messages: int) -> list[Message]:
        """Messages that have arrived, without waiting."""
        messages: list[Message] = []
        with suppress(zmq.Again):
            while len(messages) < max_messages:
                messages.append(self._receive_one())
        return messages

    def _receive_one(self) -> Message:
        """As recv_multipart, without its question after each part whether there are more.

        That costs as much as the parts. A topic as before and eight bytes are the first two parts
        of a stock message, which has three.
        """
        receive = self._socket.recv
        topic = receive(_AT_ONCE)
        parts = [topic]
        if topic == self._last_topic:
            sequence = receive(_AT_ONCE)
            if len(sequence) == _NUM_SEQUENCE_BYTES:
                return Message(topic, int.from_bytes(sequence, "big"), receive(_AT_ONCE))
            parts.append(sequence)
        self._last_topic = topic
        while self._socket.getsockopt(zmq.RCVMORE):
            parts.append(receive(_AT_ONCE))
        return message_of(parts)

    def request_replay(self, request: bytes, endpoint: str | None) -> ZmqReplayAnswer:
        """Ask the replay socket, or another endpoint that the publisher named."""
        asked = self._replay if endpoint is None else reachable(endpoint, self.endpoint)
        if asked is None:
            raise TransportError(f"cannot ask {self.endpoint!r}: expected a replay endpoint")
        return ZmqReplayAnswer(self._sockets, asked, request)

    def close(self) -> None:
        """Close both sockets at once."""
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        self._socket.close(linger=0)

    def _set_options(self, topic: str, heartbeat_ms: int) -> None:
        options = {
            zmq.RECONNECT_IVL: _RECONNECT_MS,
            zmq.RECONNECT_IVL_MAX: _MAX_RECONNECT_MS,
            zmq.HEARTBEAT_IVL: heartbeat_ms,
            zmq.HEARTBEAT_TIMEOUT: _MISSED_HEARTBEATS * heartbeat_ms,
        }
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())

    def _attach(self, *, bind: bool) -> None:
        self._monitor = self._socket.get_monitor_socket(self._opened | zmq.EVENT_DISCONNECTED)
        if not bind:
            self._socket.connect(self.endpoint)
            return
        self._socket.bind(self.endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)


class ZmqReplayAnswer:
    """One request to the replay socket of a publisher."""

    def __init__(self, sockets: _Sockets, endpoint: str, request: bytes) -> None:
        """TransportError for a bad endpoint."""
        self.is_ended = False
        attempt = "ask for a replay at"
        self._socket = sockets.open(zmq.DEALER, attempt, endpoint)
        try:
            self._socket.connect(endpoint)
            self._socket.send_multipart([b"", request], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.close()
            raise _cannot(attempt, endpoint, error) from error

    def filenos(self) -> tuple[int, ...]:
        """Of the one socket."""
        return (self._socket.fileno(),)

    def receive(self, max_messages: int) -> list[Message]:
        """Messages that have arrived, without waiting; may set `is_ended`."""
        messages: list[Message] = []
        with suppress(zmq.Again):
            while len(messages) < max_messages and not self.is_ended:
                self._read(self._socket.recv_multipart(_AT_ONCE), messages)
        return messages

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)

    def _read(self, frames: list[bytes], messages: list[Message]) -> None:
        match frames:
            case [b"", *topic, sequence, payload] if (
                len(topic) < 2 and len(sequence) == _NUM_SEQUENCE_BYTES
            ):
                if sequence == _END_OF_REPLAY:
                    self.is_ended = True
                else:
                    number = int.from_bytes(sequence, "big")
                    messages.append(Message(b"".join(topic), number, payload))


class _Sockets:
    """open: a socket of the context, with our limits and keys."""

    def __init__(self, context: _Context, keys: ClientKeys | None) -> None:
        self._context, self._keys = context, keys

    def open(self, kind: int, attempt: str, endpoint: str) -> zmq.Socket[bytes]:
        """TransportError, which says what was attempted, if there is none."""
        try:
            made = self._context.socket(kind)
        except zmq.ZMQError as error:  # no descriptors are left, most likely
            raise TransportError(f"cannot {attempt} {endpoint!r}: no socket: {error}") from error
        made.setsockopt(zmq.IPV6, 1)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        made.setsockopt(zmq.RCVHWM, _MAX_QUEUED_MESSAGES)
        if self._keys is not None:
            self._keys.apply(made)
        return made


def _cannot(attempt: str, endpoint: str, error: zmq.ZMQError) -> TransportError:
    return TransportError(
        f"cannot {attempt} {endpoint!r}: expected an endpoint like tcp://127.0.0.1:5557, "
        f"got: {error}"
    )
