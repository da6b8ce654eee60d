"""An engine's events as kvplug's own stream: hashed, numbered, and to be had again.

In:  batches of events, from the engine's own thread (kvplug/engines/life_stream.py).
Out: messages of kvplug/protocol.py: [topic, 8-byte number, payload] on an XPUB socket, and answers
to asks (kvplug/engines/answers.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import zmq

from kvplug.curve_keys import ServerKeys
from kvplug.engines.answers import AnswerServer
from kvplug.engines.binding import Binding, answers_beside, bind_or_raise
from kvplug.engines.life import Numbered
from kvplug.engines.life_stream import STOP_LIMIT_S, LifeStream
from kvplug.engines.settings import PublisherConfig
from kvplug.events import EventBatch
from kvplug.protocol import HEARTBEAT_S, WorkerHello

MAX_HWM: Final = 1000
"""Messages for a subscriber that does not read: what it missed it gets when it asks."""


class EventStream(LifeStream):
    """A LifeStream on two ZMQ sockets."""

    def __init__(
        self,
        config: PublisherConfig,
        about: WorkerHello,
        decode: Callable[[Any], EventBatch],
        logger: logging.Logger,
        *,
        keys: ServerKeys | None = None,
        must_bind: bool = False,
    ) -> None:
        """`must_bind`: TransportError if an address is taken; else it is tried again."""
        super().__init__(config.max_queue_size, about, decode, logger)
        self._topic = config.topic.encode()
        self._next_hello = time.monotonic()
        with ExitStack() as undo:
            undo.callback(self._wake.close)
            self._open(config, about.dp_rank, keys, undo)
            self._bind(must_bind)
            undo.pop_all()
        self._start()

    @property
    def endpoint(self) -> str:
        """Where events are published."""
        return self._binding.endpoint

    @property
    def answers_at(self) -> str:
        """Where followers ask."""
        return self._answers.endpoint

    def shutdown(self) -> None:
        """Send what is queued and close, in three seconds at worst; again is harmless."""
        if self._stopping:
            return
        self._stopping = True
        self._wake.end()
        self._sender.join(STOP_LIMIT_S)
        answers_ended = self._answers.stop(STOP_LIMIT_S)
        if self._authenticator is not None:
            self._authenticator.stop()
        # A thread that still sends keeps its socket, and the context would wait for it.
        if answers_ended and not self._sender.is_alive():
            self._context.term()

    def _open(
        self, config: PublisherConfig, dp_rank: int, keys: ServerKeys | None, undo: ExitStack
    ) -> None:
        endpoint, ask_endpoint = config.of_rank(dp_rank)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        undo.callback(self._context.destroy, linger=0)
        self._authenticator = None
        self._socket = self._context.socket(zmq.XPUB)
        router = self._context.socket(zmq.ROUTER)
        if keys is not None:
            self._authenticator = keys.authenticator(self._context)
            self._authenticator.start()
            undo.callback(self._authenticator.stop)
            for each in (self._socket, router):
                keys.protect(each)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.setsockopt(zmq.SNDHWM, min(config.hwm or MAX_HWM, MAX_HWM))
        self._socket.setsockopt(zmq.LINGER, int(STOP_LIMIT_S * 1000))
        self._binding = Binding(self._socket, endpoint, "stream of KV events", self._logger)
        ask_endpoint = ask_endpoint or answers_beside(endpoint)
        self._answers = AnswerServer(router, ask_endpoint, self.life, self._topic, self._logger)
        undo.callback(self._answers.close)

    def _bind(self, must_bind: bool) -> None:
        for binding in (self._binding, self._answers.binding):
            if must_bind:
                bind_or_raise(binding)
            else:
                binding.attempt()
        self._tell_where()

    def _tell_where(self) -> None:
        """An ask finds the publisher even where the address was taken at first."""
        answers_at = self.answers_at.replace("//0.0.0.0:", "//*:").replace("//[::]:", "//*:")
        if self._answers.binding.is_bound and answers_at != self.life.about.answers_at:
            self.life.note(answers_at=answers_at)

    def _start(self) -> None:
        self._sender = threading.Thread(target=self._run, name="kvplug-publisher", daemon=True)
        self._sender.start()
        self._answers.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake.fd, zmq.POLLIN)
        with self._socket, self._wake:
            while self._queue or not self._wake.has_ended:
                self._wait(poller)
                try:
                    self._binding.attempt()
                    self._tell_where()
                    self._say_hello()
                    self._send_queued()
                except Exception as error:  # noqa: BLE001  # whatever it is, the next may be fine
                    self._count_failure(error)
            self._is_asleep = False

    def _wait(self, poller: zmq.Poller) -> None:
        """Until there is something to do. Nobody who appends sees that we sleep when we do not."""
        self._is_asleep = True
        if self._has_work or self.life.has_news or self._wake.has_ended:
            self._is_asleep = False
            return
        pauses = [self._next_hello - time.monotonic(), self._binding.pause_s, self._answers_pause_s]
        pause_s = max(0.0, min(pause for pause in pauses if pause is not None))
        poller.poll(int(pause_s * 1000) + 1)
        self._is_asleep = False
        self._wake.drain()

    @property
    def _answers_pause_s(self) -> float | None:
        # Its thread binds; this one tells where.
        return None if self.life.about.answers_at else self._answers.binding.pause_s

    def _say_hello(self) -> None:
        """To newcomers, and to all from time to time or if there is something new to say."""
        is_due = self.life.has_news or time.monotonic() >= self._next_hello
        if self._someone_came() or is_due:
            self._send(self.life.hello())
            self._next_hello = time.monotonic() + HEARTBEAT_S

    def _someone_came(self) -> bool:
        has_come = False
        while self._socket.poll(0):
            has_come |= self._socket.recv(zmq.NOBLOCK)[:1] == b"\1"
        return has_come

    def _send(self, message: Numbered) -> None:
        # An XPUB socket never waits; what a slow subscriber has no room for (hwm) it drops.
        number = message.number.to_bytes(8, "big")
        self._socket.send_multipart((self._topic, number, message.payload))
        self.num_sent += 1
