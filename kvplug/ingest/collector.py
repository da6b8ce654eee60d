"""One endpoint that many engines connect to and publish their events.

In:  followers with their topics, added and removed from any thread.
Out: every follower is told what its worker says, in order, one at a time.

The other form, a connection of ours to each engine, is kvplug/ingest/listener.py.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable

import zmq

from kvplug.ingest.dispatch import TopicDispatcher
from kvplug.ingest.follower import Follower
from kvplug.topics import PREFIX, Topic
from kvplug.transports.zmq import Connection, ZmqSubscription

# Between two looks at the commands; see kvplug/ingest/listener.py.
_MAX_MESSAGES_PER_ROUND = 256
_STOP_TIMEOUT_S = 5.0


class EventCollector:
    """start, follow, unfollow, stop. `endpoint` is what the engines connect to."""

    def __init__(self, endpoint: str, topic: str = PREFIX) -> None:
        """`topic` narrows what is received to topics that begin with it."""
        self.endpoint, self._topic = endpoint, topic
        self.dispatcher = TopicDispatcher()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvplug-collector", daemon=True)

    def start(self) -> None:
        """Bind and begin to listen; the first of all calls. TransportError if it cannot bind."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            # The socket is made here, so that the caller gets the error, and used by the thread.
            self._subscription = ZmqSubscription(
                self._context, self.endpoint, self._topic, bind=True
            )
        except Exception:
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._subscription.endpoint
        self._wake_read, self._wake_write = socket.socketpair()
        self._thread.start()

    def follow(self, follower: Follower, topic: Topic) -> None:
        """Hand the topic's messages to the follower; ConfigError if another one has them."""
        self._order_and_wait(lambda: self.dispatcher.add(follower, topic))

    def unfollow(self, follower: Follower) -> None:
        """Leave the follower alone from now on."""
        self._order_and_wait(lambda: self.dispatcher.remove(follower))

    def stop(self) -> None:
        """End the thread and close all sockets; nothing if it was never started."""
        if not self._thread.is_alive():
            return
        self._order(self._end)
        self._thread.join(_STOP_TIMEOUT_S)
        self._wake_read.close()
        self._wake_write.close()
        self._context.destroy(linger=0)

    def _order(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._wake_write.send(b"\0")

    def _order_and_wait(self, command: Callable[[], None]) -> None:
        """Run it in the thread that dispatches; what it raises is raised here."""
        outcome: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._order(lambda: outcome.put(_error_of(command)))
        error = outcome.get(timeout=_STOP_TIMEOUT_S)
        if error is not None:
            raise error

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read.fileno(), zmq.POLLIN)
        for each in self._subscription.sockets:
            poller.register(each, zmq.POLLIN)
        while not self._stopping:
            if self._wake_read.fileno() in dict(poller.poll()):
                self._wake_read.recv(4096)
            while not self._commands.empty():
                self._commands.get()()
            self._serve()
        self._subscription.close()

    def _serve(self) -> None:
        for change in self._subscription.connection_changes():
            if change is Connection.CAME:
                self.dispatcher.on_peer_came()
            else:
                self.dispatcher.on_peer_lost()
        for frames in self._subscription.receive(_MAX_MESSAGES_PER_ROUND):
            self.dispatcher.receive(frames)

    def _end(self) -> None:
        self._stopping = True


def _error_of(command: Callable[[], None]) -> Exception | None:
    try:
        command()
    except Exception as error:  # noqa: BLE001 - handed to the thread that gave the command
        return error
    return None
