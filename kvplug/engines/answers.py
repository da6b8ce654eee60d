"""Answers to followers that join late or missed events: the socket of a publisher that takes asks.

In:  [b"", ask] from a DEALER; a Life.
Out: per message [b"", topic, number, payload], and at the end [b"", b"", END, b""].

A thread of its own, so that a slow client holds up neither live events nor, as nothing here waits
for one, the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import zmq

from kvplug.engines.answer_maker import AnswerMaker
from kvplug.engines.binding import Binding
from kvplug.engines.life import Life
from kvplug.engines.replay_server import END
from kvplug.engines.wake import Wake
from kvplug.protocol import Ask

UNREAD_LIMIT_S: Final = 2.0
"""A client that does not read for so long is left; it asks again when it does."""

MAX_CLIENTS: Final = 4
MAX_WAITING: Final = 256

_MAX_REQUEST_BYTES: Final = 1024  # an ask has 40; the handshake of CURVE needs 400
# Messages on their way to one client: with the largest ones 4 MB. When all clients have as many as
# they take, the pause is short at first, as most read on at once.
_NUM_UNSENT: Final = 16
_SHORTEST_RETRY_MS: Final = 1
_LONGEST_RETRY_MS: Final = 16


@dataclass(slots=True)
class _Sending:
    """An answer on its way."""

    client: bytes
    frames: Iterator[tuple[bytes, bytes, bytes]]
    unsent: tuple[bytes, bytes, bytes]
    deadline: float


class AnswerServer:
    """start, stop, or close if it never started; read maker, num_answers, num_abandoned,
    num_malformed, and failures by cause.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        endpoint: str,
        life: Life,
        topic: bytes,
        logger: logging.Logger,
    ) -> None:
        self.num_answers = self.num_abandoned = self.num_malformed = 0
        self._num_sent = 0
        self.failures: Counter[str] = Counter()
        self.maker = AnswerMaker(life)
        self._topic, self._logger = topic, logger
        self._router = socket
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, _NUM_UNSENT)
        self._router.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        # Without this a ROUTER drops what a slow client has no room for, and nobody is told.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.binding = Binding(self._router, endpoint, "answers about KV events", logger)
        self._waiting: dict[bytes, Ask] = {}
        self._sending: deque[_Sending] = deque()
        self._retry_ms, self._wake = _SHORTEST_RETRY_MS, Wake()
        self._thread = threading.Thread(target=self._run, name="kvplug-answers", daemon=True)

    @property
    def endpoint(self) -> str:
        """Where to ask."""
        return self.binding.endpoint

    def start(self) -> None:
        """Answer from now on, or from when the address is free."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread and close its socket; whether that was done within timeout_s."""
        self._wake.end()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """What was never started is not stopped."""
        self._wake.close()
        self._router.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake.fd, zmq.POLLIN)
        with self._router, self._wake:
            while not self._wake.has_ended:
                ready = dict(poller.poll(self._timeout_ms()))
                try:
                    self.binding.attempt()
                    if self._router in ready:
                        self._receive()
                    self._begin_answers()
                    self._send_some()
                except Exception as error:  # noqa: BLE001  # the next ask may be fine
                    self._count_failure(error)

    def _count_failure(self, error: Exception) -> None:
        cause = type(error).__name__
        self.failures[cause] += 1
        if self.failures[cause] == 1:
            self._logger.warning("kvplug: an answer failed: %s: %s", cause, error, exc_info=error)

    def _timeout_ms(self) -> int | None:
        if self._sending:
            return self._retry_ms
        pauses = [self.binding.pause_s]
        if self._waiting:
            pauses.append(self.maker.pause_s)
        known = [pause for pause in pauses if pause is not None]
        return int(min(known) * 1000) + 1 if known else None

    def _receive(self) -> None:
        for _ in range(MAX_WAITING):
            try:
                request = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            is_ask = len(request) == 3 and not request[1]
            ask = self.maker.read(request[2]) if is_ask else None
            if ask is None:
                self.num_malformed += 1
                self._logger.debug("kvplug: passed over a request of %d parts", len(request) - 1)
            elif len(self._waiting) < MAX_WAITING:
                self._waiting[request[0]] = ask

    def _begin_answers(self) -> None:
        for client, ask in list(self._waiting.items()):
            if len(self._sending) >= MAX_CLIENTS:
                return
            if self.maker.may_answer(ask):
                del self._waiting[client]
                self._begin_answer(client, ask)

    def _begin_answer(self, client: bytes, ask: Ask) -> None:
        try:
            frames = self._frames(ask)
        except Exception as error:  # noqa: BLE001  # others may get theirs; this one asks again
            self._count_failure(error)
        else:
            deadline = time.monotonic() + UNREAD_LIMIT_S
            self._sending.append(_Sending(client, frames, next(frames), deadline))

    def _frames(self, ask: Ask) -> Iterator[tuple[bytes, bytes, bytes]]:
        said = self.maker.answer(ask)
        frames = [(self._topic, number.to_bytes(8, "big"), payload) for number, payload in said]
        return iter([*frames, (b"", END, b"")])

    def _send_some(self) -> None:
        before = self._num_sent
        for _ in range(len(self._sending)):
            answer = self._sending.popleft()
            if self._goes_on(answer):
                self._sending.append(answer)
        has_sent = self._num_sent != before
        longer = min(2 * self._retry_ms, _LONGEST_RETRY_MS)
        self._retry_ms = _SHORTEST_RETRY_MS if has_sent else longer

    def _goes_on(self, answer: _Sending) -> bool:
        """Send as much as the client takes now; False when it is done or gone."""
        try:
            while True:
                self._router.send_multipart((answer.client, b"", *answer.unsent), zmq.NOBLOCK)
                self._num_sent += 1
                answer.deadline = time.monotonic() + UNREAD_LIMIT_S
                answer.unsent = next(answer.frames)
        except StopIteration:
            self.num_answers += 1
            return False
        except zmq.Again:
            if time.monotonic() < answer.deadline:
                return True
        except zmq.ZMQError as error:  # the client is gone
            self._logger.debug("kvplug: an answer was abandoned: %s", error)
        self.num_abandoned += 1
        return False
