"""Event streams within one process, for engines that run beside their router, and for tests.

In:  payloads that a MemoryPublisher publishes.   Out: the contract of kvplug/transports/base.py.

    memory = MemoryTransport()
    events = EventThread({"memory": lambda: memory})
    events.follow(follower, "memory://engine", replay="memory://engine")
    memory.publisher("memory://engine").publish(payload)

A publisher may start before or after those who follow it, and end and start again, as an engine
does.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, TypeVar

from kvplug.errors import TransportError
from kvplug.transports.base import Connection, Message

# A follower that does not keep up misses messages, as with a stock publisher's `hwm`.
_MAX_QUEUED_MESSAGES: Final = 100_000

Answer = Callable[[bytes], Iterable[bytes]]
"""Of a publisher to a request: payloads."""

_T = TypeVar("_T")


class MemoryTransport:
    """publisher() makes the other ends. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: list[MemorySource] = []
        self._publishers: list[MemoryPublisher] = []

    def publisher(
        self,
        endpoint: str,
        *,
        topic: str = "",
        buffer_steps: int = 10_000,
        answer: Answer | None = None,
    ) -> MemoryPublisher:
        """A new incarnation of a publisher, connected to all who follow the endpoint.

        answer: what it says to a request, which is called in the thread that asks and must not
        publish; by default the request is the number of the first message to send again, in 8
        bytes.
        """
        publisher = MemoryPublisher(self, endpoint, topic.encode(), buffer_steps, answer)
        with self._lock:
            self._publishers.append(publisher)
            for source in self._followers_of(publisher):
                source.put(Connection.OPENED)
        return publisher

    def check(self, endpoint: str) -> None:
        """Every name is an endpoint."""
        if not endpoint.partition("://")[2]:
            raise TransportError(
                f"cannot subscribe to events at {endpoint!r}: expected an endpoint like memory://engine"
            )

    def replay_of(self, endpoint: str) -> str | None:
        """Nobody knows: it must be said."""
        return None

    def connect(self, endpoint: str, topic: str, replay: str | None) -> MemorySource:
        """Subscribe to all publishers of the endpoint; `replay` names where answers come from."""
        source = MemorySource(self, endpoint, topic.encode(), replay)
        with self._lock:
            self._sources.append(source)
            for publisher in self._publishers:
                if publisher.endpoint == endpoint:
                    source.put(Connection.OPENED)
        return source

    def bind(self, endpoint: str, topic: str) -> tuple[MemorySource, str]:
        """The same: publishers need no connection."""
        return self.connect(endpoint, topic, None), endpoint

    def close(self) -> None:
        """Close all sources."""
        for source in list(self._sources):
            source.close()

    def replay(self, endpoint: str, request: bytes) -> list[Message] | None:
        """What the endpoint's publisher answers; None without one."""
        with self._lock:
            publishers = [each for each in self._publishers if each.endpoint == endpoint]
            return publishers[-1].answer_to(request) if publishers else None

    def publish(self, publisher: MemoryPublisher, payload: bytes) -> None:
        """Number a message, keep it and hand it to all who follow."""
        with self._lock:
            message = publisher.keep(payload)
            for source in self._followers_of(publisher):
                source.put(message)

    def leave(self, publisher: MemoryPublisher) -> None:
        """The publisher has ended."""
        with self._lock:
            if publisher in self._publishers:
                self._publishers.remove(publisher)
                for source in self._followers_of(publisher):
                    source.put(Connection.LOST)

    def forget(self, source: MemorySource) -> None:
        """Hand nothing to this source any more."""
        with self._lock, suppress(ValueError):
            self._sources.remove(source)

    def _followers_of(self, publisher: MemoryPublisher) -> list[MemorySource]:
        return [each for each in self._sources if each.endpoint == publisher.endpoint]


class MemoryPublisher:
    """publish, close. One incarnation of an engine: its numbers begin at 0."""

    def __init__(
        self,
        transport: MemoryTransport,
        endpoint: str,
        topic: bytes,
        buffer_steps: int,
        answer: Answer | None,
    ) -> None:
        """Made by MemoryTransport.publisher. `buffer_steps` messages are kept for replays."""
        self.endpoint, self._answer = endpoint, answer
        self._transport, self._topic = transport, topic
        self._num_published = 0
        self._kept: deque[Message] = deque(maxlen=buffer_steps)

    def publish(self, payload: bytes) -> None:
        """Hand a payload to all who follow. From any thread."""
        self._transport.publish(self, payload)

    def close(self) -> None:
        """End this incarnation; again is harmless."""
        self._transport.leave(self)

    def keep(self, payload: bytes) -> Message:
        """Called by the transport, which holds its lock."""
        message = Message(self._topic, self._num_published, payload)
        self._num_published += 1
        self._kept.append(message)
        return message

    def answer_to(self, request: bytes) -> list[Message]:
        """Called by the transport, which holds its lock."""
        if self._answer is not None:
            payloads = enumerate(self._answer(request))
            return [Message(self._topic, number, payload) for number, payload in payloads]
        first = int.from_bytes(request, "big")
        return [each for each in self._kept if each.sequence is not None and each.sequence >= first]


class MemorySource:
    """A queue, and a socket pair that wakes whoever polls for it."""

    def __init__(
        self, transport: MemoryTransport, endpoint: str, topic: bytes, replay: str | None
    ) -> None:
        self.endpoint = endpoint
        self._transport, self._topic, self._replay = transport, topic, replay
        self._messages: deque[Message] = deque()
        self._changes: deque[Connection] = deque()
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def put(self, arrived: Message | Connection) -> None:
        """Called by the transport, which holds its lock."""
        if isinstance(arrived, Connection):
            self._changes.append(arrived)
        elif arrived.topic.startswith(self._topic) and len(self._messages) < _MAX_QUEUED_MESSAGES:
            self._messages.append(arrived)
        with suppress(OSError):  # full: it is awake already
            self._write.send(b"\0")

    def filenos(self) -> tuple[int, ...]:
        """The one that wakes."""
        return (self._read.fileno(),)

    def connection_changes(self) -> list[Connection]:
        """What happened since the last call, in order."""
        with suppress(BlockingIOError):
            self._read.recv(4096)
        return _take(self._changes, len(self._changes))

    def receive(self, max_messages: int) -> list[Message]:
        """Messages that have arrived, in order."""
        return _take(self._messages, max_messages)

    def request_replay(self, request: bytes, endpoint: str | None) -> MemoryReplayAnswer:
        """What the publisher at the endpoint answers; nothing comes if there is none."""
        asked = self._replay if endpoint is None else endpoint
        if asked is None:
            raise TransportError(f"cannot ask {self.endpoint!r}: expected a replay endpoint")
        return MemoryReplayAnswer(self._transport.replay(asked, request))

    def close(self) -> None:
        """Drop what is queued."""
        self._transport.forget(self)
        self._read.close()
        self._write.close()


class MemoryReplayAnswer:
    """All of it has arrived when it is asked for."""

    def __init__(self, messages: list[Message] | None) -> None:
        self._messages, self._is_silent = deque(messages or ()), messages is None
        self.is_ended = False

    def filenos(self) -> tuple[int, ...]:
        """None: the event thread looks at an open answer on each round."""
        return ()

    def receive(self, max_messages: int) -> list[Message]:
        """The next part; may set `is_ended`."""
        part = _take(self._messages, max_messages)
        self.is_ended = not self._messages and not self._is_silent
        return part

    def close(self) -> None:
        """Drop the rest."""
        self._messages.clear()


def _take(queue: deque[_T], max_length: int) -> list[_T]:
    taken: list[_T] = []
    with suppress(IndexError):
        while len(taken) < max_length:
            taken.append(queue.popleft())
    return taken
