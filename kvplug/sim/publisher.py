"""Event batches to the wire that stock vLLM publishes on.

In:  EventBatch, in order.
Out: PUB: [topic, 8-byte sequence number from 0, msgpack]. ROUTER, for who missed some: to the
request [b"", sequence number] the batches from there on as [b"", topic, number, msgpack], then
[b"", b"", -1 as 8 bytes, b""].

Two differences from vLLM 0.32 (ZmqEventPublisher): every tcp endpoint is bound, so 127.0.0.1 can be
published on; and a long replay to a slow peer is queued, where vLLM drops what is over 1000.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from itertools import count
from types import TracebackType
from typing import Final, Self

import zmq

from kvplug import codec
from kvplug.errors import TransportError
from kvplug.events import EventBatch

logger = logging.getLogger(__name__)

END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
_NUM_QUEUED_MESSAGES: Final = 100_000  # per subscriber, as vLLM's `hwm`
_NO_LIMIT: Final = 0
_STOP_LIMIT_S: Final = 5.0


class EventPublisher:
    """A context manager; `endpoint` and `replay_endpoint` are where it listens.

    publish() belongs to one thread and never waits: what a slow subscriber has no room for is
    dropped, and shows as a gap. Replays are served by a thread of their own.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        buffer_steps: int = 10_000,
    ) -> None:
        self.endpoint, self.replay_endpoint = endpoint, replay_endpoint
        self._topic = topic.encode()
        self._numbers = count()
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        self._buffer_lock = threading.Lock()

    def __enter__(self) -> Self:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._pub, self.endpoint = self._bind(zmq.PUB, self.endpoint, _NUM_QUEUED_MESSAGES)
            self._replay = self._start_replay() if self.replay_endpoint else None
        except TransportError:
            self._context.destroy(linger=0)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._replay is not None:
            self._replay.stop()
        self._context.destroy(linger=0)

    def publish(self, batch: EventBatch) -> None:
        """Send a batch to all subscribers, and keep it for replay."""
        number, payload = next(self._numbers).to_bytes(8, "big"), codec.encode(batch)
        # First, so that a follower that saw this batch live finds it in a replay as well.
        with self._buffer_lock:
            self._buffer.append((number, payload))
        self._pub.send_multipart((self._topic, number, payload))

    def _start_replay(self) -> _ReplayThread:
        assert self.replay_endpoint is not None
        router, self.replay_endpoint = self._bind(zmq.ROUTER, self.replay_endpoint, _NO_LIMIT)
        replay = _ReplayThread(router, self)
        replay.start()
        return replay

    def _bind(self, kind: int, endpoint: str, limit: int) -> tuple[zmq.Socket[bytes], str]:
        bound = self._context.socket(kind)
        bound.setsockopt(zmq.SNDHWM, limit)
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as error:
            raise TransportError(
                f"cannot publish events at {endpoint!r}: expected a free endpoint like "
                f"tcp://127.0.0.1:5557, got: {error}"
            ) from error
        return bound, bound.getsockopt_string(zmq.LAST_ENDPOINT)

    def replay_from(self, first: int) -> list[tuple[bytes, bytes, bytes]]:
        """Topic, number and payload of the batches that are kept, from a number on."""
        with self._buffer_lock:
            kept = list(self._buffer)
        return [
            (self._topic, number, payload)
            for number, payload in kept
            if int.from_bytes(number, "big") >= first
        ]


class _ReplayThread:
    """Owns the ROUTER socket: ZMQ sockets belong to one thread."""

    def __init__(self, router: zmq.Socket[bytes], publisher: EventPublisher) -> None:
        self._router, self._publisher = router, publisher
        self._wake_read, self._wake_write = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kvplug-sim-replay", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._wake_write.send(b"\0")
        self._thread.join(_STOP_LIMIT_S)
        self._wake_read.close()
        self._wake_write.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_read.fileno(), zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake_read.fileno() in ready:
                self._router.close(linger=0)
                return
            self._answer(self._router.recv_multipart())

    def _answer(self, request: list[bytes]) -> None:
        if len(request) != 3:
            logger.warning("replay request of %d parts, expected 2", len(request) - 1)
            return
        peer, _, first = request
        for parts in self._publisher.replay_from(int.from_bytes(first, "big")):
            self._router.send_multipart((peer, b"", *parts))
        self._router.send_multipart((peer, b"", b"", END_OF_REPLAY, b""))
