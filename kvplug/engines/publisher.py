"""A publisher of KV events that its engine does not feel.

In:  batches of events, from the engine's own thread.
Out: the stock wire of vLLM and SGLang: [topic, 8-byte number, payload] on a PUB socket, and past
batches from a replay socket.

`publish` puts a batch into a bounded queue and returns; a thread encodes and sends.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import zmq

from kvplug.curve_keys import ServerKeys
from kvplug.engines.binding import Binding, bind_or_raise
from kvplug.engines.numbered_batches import NumberedBatches
from kvplug.engines.replay_server import History, ReplayServer
from kvplug.engines.settings import PublisherConfig

STOP_LIMIT_S: Final = 1.0
"""How long `shutdown` waits for what is queued, for a replay, for subscribers that still read."""

_END: Final = None
_Queued = tuple[int, Any] | None


class Publisher(NumberedBatches):
    """NumberedBatches on two ZMQ sockets. Read endpoint and replay_endpoint as they are now.

    `hwm` is in batches; 0 is no limit.
    """

    def __init__(
        self,
        config: PublisherConfig,
        dp_rank: int,
        encode: Callable[[Any], bytes],
        logger: logging.Logger,
        *,
        keys: ServerKeys | None = None,
        must_bind: bool = False,
    ) -> None:
        """`must_bind`: TransportError if an address is taken; else it is tried again."""
        endpoint, replay_endpoint = config.of_rank(dp_rank)
        super().__init__(config.max_queue_size, encode, logger)
        self._topic = config.topic.encode()
        self._queue: queue.SimpleQueue[_Queued] = queue.SimpleQueue()
        self._history = History(maxlen=config.buffer_steps if replay_endpoint else 0)
        with ExitStack() as undo:
            self._open(endpoint, replay_endpoint, config.hwm, keys, undo)
            self._bind(must_bind)
            undo.pop_all()
        self._start()

    @property
    def endpoint(self) -> str:
        """Where batches are published."""
        return self._binding.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where past batches can be asked for."""
        return None if self._replay is None else self._replay.endpoint

    @property
    def answers_at(self) -> str | None:
        """The same, by the name that an EventStream has for it."""
        return self.replay_endpoint

    @property
    def _num_queued(self) -> int:
        return self._queue.qsize()

    def _enqueue(self, number: int, batch: object) -> None:
        self._queue.put((number, batch))

    def shutdown(self) -> None:
        """Send what is queued and close, in three seconds at worst; again is harmless."""
        if self._stopping:
            return
        self._stopping = True
        self._queue.put(_END)
        self._sender.join(STOP_LIMIT_S)
        replay_ended = self._replay is None or self._replay.stop(STOP_LIMIT_S)
        if self._authenticator is not None:
            self._authenticator.stop()
        # A thread that still sends keeps its socket, and the context would wait for it.
        if replay_ended and not self._sender.is_alive():
            self._context.term()

    def _open(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        hwm: int,
        keys: ServerKeys | None,
        undo: ExitStack,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        undo.callback(self._context.destroy, linger=0)
        self._socket = self._context.socket(zmq.PUB)
        self._authenticator = None
        if keys is not None:
            self._authenticator = keys.authenticator(self._context)
            self._authenticator.start()
            undo.callback(self._authenticator.stop)
            keys.protect(self._socket)
        self._socket.setsockopt(zmq.SNDHWM, hwm)
        self._socket.setsockopt(zmq.LINGER, int(STOP_LIMIT_S * 1000))
        self._binding = Binding(self._socket, endpoint, "stream of KV events", self._logger)
        self._replay: ReplayServer | None = None
        if replay_endpoint is not None:
            self._replay = ReplayServer(
                self._context, replay_endpoint, self._history, self._topic, self._logger
            )
            if keys is not None:
                keys.protect(self._replay.socket)

    def _bind(self, must_bind: bool) -> None:
        bindings = [self._binding, *([self._replay.binding] if self._replay else [])]
        for binding in bindings:
            if must_bind:
                bind_or_raise(binding)
            else:
                binding.attempt()

    def _start(self) -> None:
        self._sender = threading.Thread(target=self._run, name="kvplug-publisher", daemon=True)
        self._sender.start()
        if self._replay is not None:
            self._replay.start()

    def _run(self) -> None:
        with self._socket:
            while True:
                self._binding.attempt()
                try:
                    queued = self._queue.get(timeout=self._binding.pause_s)
                except queue.Empty:
                    continue
                if queued is _END:
                    return
                self._send(*queued)

    def _send(self, number: int, batch: object) -> None:
        self._name_drops()
        try:
            frame = number.to_bytes(8, "big")
            payload = self._encode(batch)
            # First, so that a follower that saw this batch live finds it in a replay as well.
            self._history.append((frame, payload))
            # A PUB socket never waits; what a slow subscriber has no room for (hwm) it drops.
            self._socket.send_multipart((self._topic, frame, payload))
            self.num_sent += 1
        except Exception as error:  # noqa: BLE001  # whatever it is, the next batch may be fine
            self._count_failure(error)
