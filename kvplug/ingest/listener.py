"""The thread that owns the event sockets.

In:  followers with their endpoints, added and removed from any thread.
Out: every follower is told what arrives, in order, one at a time.

One thread serves all engines: a poll over their sockets, and a socket pair that wakes it for
commands, because ZMQ sockets belong to one thread.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable

import zmq

from kvplug.errors import TransportError
from kvplug.ingest.follower import Follower
from kvplug.transports.zmq import Connection, ZmqSubscription

logger = logging.getLogger(__name__)

# Per socket and round: one busy engine does not keep the others waiting.
_MAX_MESSAGES_PER_ROUND = 256
_STOP_TIMEOUT_S = 5.0


class EventListener:
    """start, follow, unfollow, stop."""

    def __init__(self) -> None:
        self._subscriptions: dict[Follower, ZmqSubscription] = {}
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._poller = zmq.Poller()
        self._thread = threading.Thread(target=self._run, name="kvplug-events", daemon=True)

    def start(self) -> None:
        """Begin to listen; the first of all calls."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake_read, self._wake_write = socket.socketpair()
        self._thread.start()

    def follow(self, follower: Follower, endpoint: str, topic: str = "") -> None:
        """Subscribe; raises TransportError for an endpoint that ZMQ does not understand."""
        _require_endpoint(endpoint)
        self._order(lambda: self._subscribe(follower, endpoint, topic))

    def unfollow(self, follower: Follower) -> None:
        """Close the subscription of a follower, if it has one."""
        self._order(lambda: self._unsubscribe(follower))

    def stop(self) -> None:
        """End the thread and close all sockets."""
        self._order(self._end)
        self._thread.join(_STOP_TIMEOUT_S)
        self._wake_read.close()
        self._wake_write.close()
        self._context.destroy(linger=0)

    def _order(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._wake_write.send(b"\0")

    def _run(self) -> None:
        self._rebuild_poller()
        while not self._stopping:
            ready = dict(self._poller.poll())
            if self._wake_read.fileno() in ready:
                self._wake_read.recv(4096)
            while not self._commands.empty():
                self._commands.get()()
            for follower, subscription in list(self._subscriptions.items()):
                self._serve_safely(follower, subscription)
        for subscription in self._subscriptions.values():
            subscription.close()

    def _serve_safely(self, follower: Follower, subscription: ZmqSubscription) -> None:
        try:
            self._serve(follower, subscription)
        except Exception:  # a mistake of ours with one worker must not deafen the others
            logger.exception("%s: following its events failed, starting over", follower.rank)
            self._renew(follower, subscription)

    def _serve(self, follower: Follower, subscription: ZmqSubscription) -> None:
        for change in subscription.connection_changes():
            if change is Connection.WENT:
                self._renew(follower, subscription)
                return
            follower.on_connected()
        for frames in subscription.receive(_MAX_MESSAGES_PER_ROUND):
            follower.receive(frames)

    def _renew(self, follower: Follower, subscription: ZmqSubscription) -> None:
        # What the old life still had queued is of no use, and the new one must not mix with it.
        subscription.renew()
        self._rebuild_poller()
        follower.on_disconnected()

    def _rebuild_poller(self) -> None:
        self._poller = zmq.Poller()
        self._poller.register(self._wake_read.fileno(), zmq.POLLIN)
        for subscription in self._subscriptions.values():
            for each in subscription.sockets:
                self._poller.register(each, zmq.POLLIN)

    def _subscribe(self, follower: Follower, endpoint: str, topic: str) -> None:
        self._subscriptions[follower] = ZmqSubscription(self._context, endpoint, topic)
        self._rebuild_poller()

    def _unsubscribe(self, follower: Follower) -> None:
        subscription = self._subscriptions.pop(follower, None)
        if subscription is not None:
            subscription.close()
            self._rebuild_poller()

    def _end(self) -> None:
        self._stopping = True


def _require_endpoint(endpoint: str) -> None:
    # Tried on a socket of its own: the error belongs to the caller, not to the listener's thread.
    with zmq.Context() as context, context.socket(zmq.SUB) as probe:
        try:
            probe.connect(endpoint)
        except zmq.ZMQError as error:
            raise TransportError(
                f"cannot subscribe to events at {endpoint!r}: expected an endpoint like "
                f"tcp://127.0.0.1:5557, got: {error}"
            ) from error
