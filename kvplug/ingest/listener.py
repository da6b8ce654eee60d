"""The thread that owns the event sockets.

In:  followers with their endpoints, added and removed from any thread.
Out: every follower is told what arrives, in order, one at a time; replays that it wants are asked
for, and their answers are told, too.

One thread serves all engines: a poll over their sockets, and a socket pair that wakes it for
commands, because ZMQ sockets belong to one thread.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable

import zmq

from kvplug.errors import TransportError
from kvplug.ingest.follower import Follower
from kvplug.ingest.replay_order import ReplayOrder
from kvplug.transports.zmq import Connection, ZmqSubscription
from kvplug.transports.zmq_replay import ZmqReplay

logger = logging.getLogger(__name__)

# Applied at once; other threads get the interpreter in between. And per socket and round, so that
# one busy engine does not keep the others waiting.
_MAX_MESSAGES = 32
_MAX_RUNS_PER_ROUND = 8
_TICK_S = 0.2
_STOP_TIMEOUT_S = 5.0


class EventListener:
    """start, follow, unfollow, stop."""

    def __init__(self) -> None:
        self._subscriptions: dict[Follower, ZmqSubscription] = {}
        self._replay_endpoints: dict[Follower, str] = {}
        self._replays: dict[Follower, tuple[ReplayOrder, ZmqReplay]] = {}
        self._next_tick_s = 0.0
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._poller = zmq.Poller()
        self._thread = threading.Thread(target=self._run, name="kvplug-events", daemon=True)

    def start(self) -> None:
        """Begin to listen; the first of all calls."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake_read, self._wake_write = socket.socketpair()
        self._thread.start()

    def follow(
        self, follower: Follower, endpoint: str, topic: str = "", replay: str | None = None
    ) -> None:
        """Subscribe; `replay` is the endpoint where the engine replays what it sent before.

        Raises TransportError for an endpoint that ZMQ does not understand.
        """
        _require_endpoint(endpoint)
        if replay is not None:
            _require_endpoint(replay)
        follower.can_replay = replay is not None
        self._order(lambda: self._subscribe(follower, endpoint, topic, replay))

    def unfollow(self, follower: Follower) -> None:
        """Close the subscription of a follower, if it has one."""
        self._order(lambda: self._unsubscribe(follower))

    def stop(self) -> None:
        """End the thread, which closes all sockets; it is left alone if that takes long."""
        self._order(self._end)
        self._thread.join(_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("the thread of the event sockets is busy: it closes them when it is not")
            return
        self._wake_read.close()
        self._wake_write.close()

    def _order(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._wake_write.send(b"\0")

    def _run(self) -> None:
        try:
            self._serve_until_stopped()
        finally:
            self._close_all()

    def _serve_until_stopped(self) -> None:
        self._rebuild_poller()
        while not self._stopping:
            ready = dict(self._poller.poll(int(1000 * _TICK_S)))
            if self._wake_read.fileno() in ready:
                self._wake_read.recv(4096)
            while not self._commands.empty():
                self._commands.get()()
            is_tick = self._is_tick()
            for follower, subscription in list(self._subscriptions.items()):
                is_ready = not ready.keys().isdisjoint(subscription.sockets)
                if is_ready or is_tick or follower in self._replays:
                    self._serve_safely(follower, subscription, is_tick=is_tick)

    def _close_all(self) -> None:
        # Here, as a socket that another thread closes is an error in the middle of its use.
        for follower in list(self._subscriptions):
            self._unsubscribe(follower)
        self._context.destroy(linger=0)

    def _is_tick(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._next_tick_s:
            return False
        self._next_tick_s = now_s + _TICK_S
        return True

    def _serve_safely(
        self, follower: Follower, subscription: ZmqSubscription, *, is_tick: bool
    ) -> None:
        try:
            self._serve(follower, subscription)
            if is_tick:
                follower.tick()
            self._serve_replay(follower)
        except Exception:  # a mistake of ours with one worker must not deafen the others
            logger.exception("%s: following its events failed, starting over", follower.rank)
            self._renew(follower, subscription)

    def _serve(self, follower: Follower, subscription: ZmqSubscription) -> None:
        for change in subscription.connection_changes():
            if change is Connection.WENT:
                self._renew(follower, subscription)
                return
            follower.on_connected()
        for _ in range(_MAX_RUNS_PER_ROUND):
            messages = subscription.receive(_MAX_MESSAGES)
            if messages:
                follower.receive_many(messages)
            if len(messages) < _MAX_MESSAGES:
                return

    def _serve_replay(self, follower: Follower) -> None:
        """Ask for what the follower wants, if it is not asked for yet; hand over what came."""
        order, (asked, replay) = follower.replay_order, self._replays.get(follower, (None, None))
        if asked is not order:
            self._close_replay(follower)
            replay = self._open_replay(follower, order)
        if replay is None:
            return
        follower.replayed(replay.receive(_MAX_MESSAGES))
        if replay.is_ended and follower.replay_order is order:
            follower.replay_ended()

    def _open_replay(self, follower: Follower, order: ReplayOrder | None) -> ZmqReplay | None:
        if order is None:
            return None
        replay = ZmqReplay(self._context, self._replay_endpoints[follower], order.start)
        self._replays[follower] = order, replay
        self._rebuild_poller()
        return replay

    def _close_replay(self, follower: Follower) -> None:
        if follower in self._replays:
            self._replays.pop(follower)[1].close()
            self._rebuild_poller()

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
        for _, replay in self._replays.values():
            self._poller.register(replay.socket, zmq.POLLIN)

    def _subscribe(self, follower: Follower, endpoint: str, topic: str, replay: str | None) -> None:
        if replay is not None:
            self._replay_endpoints[follower] = replay
        self._subscriptions[follower] = ZmqSubscription(self._context, endpoint, topic)
        self._rebuild_poller()

    def _unsubscribe(self, follower: Follower) -> None:
        subscription = self._subscriptions.pop(follower, None)
        self._close_replay(follower)
        self._replay_endpoints.pop(follower, None)
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
