"""An engine's events as kvplug's own stream: hashed, numbered, and to be had again.

In:  batches of events, from the engine's own thread.
Out: messages of kvplug/protocol.py: [topic, 8-byte number, payload] on an XPUB socket, and answers
to asks (kvplug/engines/answers.py).

`publish` appends to a queue and returns. The sender's thread does the rest, and puts what is queued
meanwhile into one message: no batch waits for a time to pass. If the queue is full, batches are
lost, and nobody can know what the engine holds until its cache is empty: a new life begins with
nothing, and the hello names the defect.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import zmq

from kvplug.curve_keys import ServerKeys
from kvplug.engines.answers import AnswerServer
from kvplug.engines.binding import Binding, answers_beside, bind_or_raise
from kvplug.engines.life import (
    QUEUE_FULL,
    RECORDER_FAILED,
    SENDER_LOST,
    UNDECODABLE,
    Life,
    Numbered,
)
from kvplug.engines.settings import PublisherConfig
from kvplug.engines.wake import Wake
from kvplug.events import EventBatch
from kvplug.protocol import HEARTBEAT_S, WorkerHello

STOP_LIMIT_S: Final = 1.0
"""How long `shutdown` waits for what is queued, for answers, for subscribers that still read."""

MAX_HWM: Final = 1000
"""Messages for a subscriber that does not read: what it missed it gets when it asks."""

_SAID: Final = {
    QUEUE_FULL: "the queue was full; at most %(size)d wait (max_queue_size)",
    SENDER_LOST: "the process that sends them ended",
    RECORDER_FAILED: "the recorder of the engine failed",
    UNDECODABLE: "one cannot be read",
}

# Batches that go into one message, so that a resident set need not wait for more.
_MAX_BATCHES: Final = 64


class _Loss(NamedTuple):
    """Stands in the queue for batches that never came."""

    num_lost: int
    reason: str


class EventStream:
    """publish from the engine's thread, note and shutdown from any. `decode` runs in the sender's.

    Read: endpoint and answers_at (as they are now), life, and the counters num_published (batches
    handed over), num_applied, num_sent (messages), num_dropped (the queue was full), num_lost
    (`lose`), failures by cause.
    """

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
        self.num_published = self.num_applied = self.num_sent = self.num_dropped = 0
        self.failures: Counter[str] = Counter()
        self._max_queue_size = config.max_queue_size
        self._topic = config.topic.encode()
        self._decode, self._logger = decode, logger
        self._queue: deque[object] = deque()
        self._stopping, self._is_asleep, self._num_dropped_before = False, False, 0
        self.num_lost, self._named_losses = 0, set[str]()
        self._next_hello = time.monotonic()
        self.life = Life(about)
        with ExitStack() as undo:
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

    def publish(self, batch: object) -> None:
        """Hand over a batch, which nobody changes any more. Does not wait and does not raise."""
        self.num_published += 1
        if self._stopping or 0 < self._max_queue_size <= len(self._queue):
            self.num_dropped += 1
        else:
            self._queue.append(batch)
        if self._is_asleep:
            self._wake.set()

    def lose(self, num_lost: int, reason: str) -> None:
        """Here `num_lost` batches are missing, between those before and after this call."""
        self.num_lost += num_lost
        self._queue.append(_Loss(num_lost, reason))
        self._wake.set()

    def position(self) -> tuple[int, int]:
        """How many batches are in messages, and the number of the next message."""
        num_applied = self.num_applied
        return num_applied, self.life.settled()[1]

    def note(self, **more: object) -> None:
        """Say this of the engine from now on, as fields of a WorkerHello."""
        self.life.note(**more)
        self._next_hello = 0.0
        self._wake.set()

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
        self._wake = undo.enter_context(Wake())
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
            self._next_hello = 0.0

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
        if self._queue or self.num_dropped != self._num_dropped_before or self._wake.has_ended:
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
        """To newcomers, and to all from time to time."""
        if self._someone_came() or time.monotonic() >= self._next_hello:
            self._send(self.life.hello())
            self._next_hello = time.monotonic() + HEARTBEAT_S

    def _someone_came(self) -> bool:
        has_come = False
        while self._socket.poll(0):
            has_come |= self._socket.recv(zmq.NOBLOCK)[:1] == b"\1"
        return has_come

    def _send_queued(self) -> None:
        if self.num_dropped != self._num_dropped_before and not self._stopping:
            self._begin_again()
        elif self._queue and isinstance(self._queue[0], _Loss):
            self._on_loss(self._queue.popleft())
        elif self._queue:
            for message in self._told():
                self._send(message)

    def _told(self) -> list[Numbered]:
        try:
            return self.life.apply(self._taken())
        except Exception as error:  # noqa: BLE001  # a new life has begun
            self._count_failure(error)
            return [self.life.hello()]

    def _taken(self) -> Iterator[EventBatch]:
        for _ in range(min(len(self._queue), _MAX_BATCHES)):
            if isinstance(self._queue[0], _Loss):
                return
            batch = self._queue.popleft()
            self.num_applied += 1
            try:
                yield self._decode(batch)
            except Exception as error:  # noqa: BLE001  # the next batch may be fine
                self._count_failure(error)
                yield EventBatch(events=(), skipped={UNDECODABLE: 1})

    def _begin_again(self) -> None:
        """Batches are lost. What is queued is from before that, and of no use either."""
        num_dropped = self.num_dropped  # first: what is dropped from here on begins another life
        num_queued = len(self._queue)
        for _ in range(num_queued):
            self._queue.popleft()
        num_lost = num_dropped - self._num_dropped_before + num_queued
        self._num_dropped_before = num_dropped
        self._on_loss(_Loss(num_lost, QUEUE_FULL))

    def _on_loss(self, loss: object) -> None:
        assert isinstance(loss, _Loss)
        self.life.begin_again(loss.num_lost, loss.reason)
        self._send(self.life.hello())
        if loss.reason not in self._named_losses:
            self._named_losses.add(loss.reason)
            self._logger.warning(
                "kvplug: batches of KV events are lost: %s. Followers go by what they are told "
                "from now on, and are exact again when the engine's cache is emptied or it "
                "restarts",
                _SAID.get(loss.reason, loss.reason) % {"size": self._max_queue_size},
            )

    def _send(self, message: Numbered) -> None:
        # An XPUB socket never waits; what a slow subscriber has no room for (hwm) it drops.
        number = message.number.to_bytes(8, "big")
        self._socket.send_multipart((self._topic, number, message.payload))
        self.num_sent += 1

    def _count_failure(self, error: Exception) -> None:
        cause = type(error).__name__
        self.failures[cause] += 1
        if self.failures[cause] == 1:
            self._logger.warning("kvplug: batches of KV events are lost: %s: %s", cause, error)
