"""kvplug's own stream over ZMQ, passed on as it is: the engine's lives and numbers, its answers.

In:  messages of its publisher (kvplug/protocol.py).
Out: the same on NATS; asks of readers to the publisher, and its answers back.

What is lost on the ZMQ side is a hole in the numbers, which readers see. A hello of the engine goes
out as a beat once all that came before it is in the stream: so a lost last message shows, too.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from msgspec import structs

from kvplug import protocol
from kvplug.engines.life import Numbered
from kvplug.errors import TransportError
from kvplug.forwarder.output import Outgoing, Said
from kvplug.ingest import trust
from kvplug.ingest.replay import ReplaySettings, Request
from kvplug.ingest.trust import TrustState
from kvplug.protocol import HEARTBEAT_S, Ask, End, Events, Hello, ProtocolError, WorkerHello
from kvplug.transports.base import Message

logger = logging.getLogger(__name__)

_SILENT_S: Final = 1.5 * HEARTBEAT_S
_NUM_HELLOS: Final = 8
_MAX_ANSWER_BYTES: Final = 2**30
_MARGIN_S: Final = 5.0


@dataclass(slots=True)
class _Asked:
    """An ask of a reader on its way to the engine, and what came back so far."""

    ask: Ask
    answer: Future[list[Numbered]] = field(default_factory=Future)
    messages: list[Numbered] = field(default_factory=list)
    num_bytes: int = 0
    request: Request | None = None


class OwnWire:
    """A Wire (kvplug/forwarder/output.py); the event thread feeds it."""

    backlog_bytes = num_blocks = 0
    pause_s = 0.0

    def __init__(
        self,
        name: str,
        send: Callable[[list[Outgoing]], None],
        beat_soon: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        settings: ReplaySettings | None = None,
    ) -> None:
        self.skipped: Counter[str] = Counter()
        self.about: WorkerHello | None = None
        self._name, self._send, self._beat_soon, self._clock = name, send, beat_soon, clock
        self._settings = settings or ReplaySettings()
        self._said: tuple[int, WorkerHello] | None = None
        self._num_told = self._num_tries = 0
        # How many messages were told before it, when it came, and a hello.
        self._hellos: deque[tuple[int, float, Hello]] = deque(maxlen=_NUM_HELLOS)
        self._asked: _Asked | None = None
        self._can_replay = self._is_connected = False

    # -- from the event thread --

    @property
    def state(self) -> TrustState:
        """Whether the engine is heard; what its readers know is theirs to say."""
        if not self._is_connected:
            return trust.INTERRUPTED
        return trust.EXACT if self._is_alive else trust.NO_HEARTBEAT

    @property
    def request(self) -> Request | None:
        """What the engine is to be asked for."""
        asked = self._asked
        if asked is None or not self._is_connected:
            return None
        if asked.request is None:
            asked.request = self._request_of(asked.ask)
        return asked.request

    def start(self) -> None:
        """The engine says when a life begins."""

    def connected(self, *, can_replay: bool) -> None:
        """The stream is there (again)."""
        self._can_replay, self._is_connected = can_replay, True

    def disconnected(self) -> None:
        """The stream is gone; so are its signs of life."""
        self._is_connected = False
        self._fail("the stream of the engine is gone")

    def receive(self, messages: list[Message]) -> None:
        """Pass them on."""
        told = [each for each in map(self._told, messages) if each is not None]
        if told:
            self._send(told)

    def replayed(self, messages: list[Message]) -> None:
        """A part of the answer to `request`."""
        asked = self._asked
        if asked is None or asked.request is None:
            return
        asked.request.deadline_s = self._clock() + self._settings.answer_timeout_s
        for message in messages:
            payload = self._without_endpoint(message.payload)
            asked.messages.append(Numbered(message.sequence or 0, payload))
            asked.num_bytes += len(payload)
        if asked.num_bytes > _MAX_ANSWER_BYTES:
            self._fail("an answer is too long")

    def replay_ended(self) -> None:
        """The answer is complete, if its last message says so."""
        asked = self._asked
        if asked is None:
            return
        if not asked.messages or not _is_end(asked.messages[-1].payload):
            self._fail("an answer is incomplete")
            return
        self._asked, self._num_tries = None, 0
        with suppress(InvalidStateError):  # nobody waits for it any more
            asked.answer.set_result(asked.messages)

    def tick(self) -> None:
        """Time has passed."""
        request = None if self._asked is None else self._asked.request
        if request is not None and self._clock() > min(request.deadline_s, request.expires_s):
            self._fail("the engine does not answer")

    @property
    def _is_alive(self) -> bool:
        return bool(self._hellos) and self._clock() - self._hellos[-1][1] <= _SILENT_S

    def _told(self, message: Message) -> Outgoing | None:
        try:
            said = protocol.decode(message.payload)
        except ProtocolError as error:
            self._skip(error.reason, str(error))
            return None
        if isinstance(said, Hello):
            return self._heard(said)
        if not isinstance(said, Events):
            self._skip("out_of_order", f"a {type(said).__name__} on the stream")
            return None
        self._num_told += 1
        return Outgoing(said.life, said.number, message.payload, said.number + 1)

    def _heard(self, hello: Hello) -> Outgoing | None:
        """Into the stream if it says what the last one did not; as a beat in any case."""
        self.about = hello.about
        hello = _on_nats(hello)
        is_news = self._said != (hello.life, hello.about)
        self._said = hello.life, hello.about
        self._num_told += is_news
        self._hellos.append((self._num_told, self._clock(), hello))
        self._beat_soon()
        if not is_news:
            return None
        return Outgoing(hello.life, hello.next, protocol.encode(hello), hello.next)

    def _skip(self, reason: str, detail: str) -> None:
        if not self.skipped[reason]:
            logger.warning("%s: a message is not passed on: %s: %s", self._name, reason, detail)
        self.skipped[reason] += 1

    def _request_of(self, ask: Ask) -> Request:
        now_s = self._clock()
        named = None if self.about is None else self.about.answers_at
        is_configured = self._can_replay and (named is None or self._num_tries % 2 == 0)
        return Request(
            payload=protocol.encode(ask),
            endpoint=None if is_configured else named,
            began_s=now_s,
            deadline_s=now_s + self._settings.answer_timeout_s,
            expires_s=now_s + self._settings.max_answer_s,
        )

    def _fail(self, reason: str) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            self._num_tries += 1
            with suppress(InvalidStateError):
                asked.answer.set_exception(TransportError(f"cannot ask {self._name}: {reason}"))

    def _without_endpoint(self, payload: bytes) -> bytes:
        with suppress(ProtocolError):
            said = protocol.decode(payload)
            if isinstance(said, Hello):
                return protocol.encode(_on_nats(said))
        return payload

    # -- from the connection's loop --

    def beat(self, said: Said) -> bytes | None:
        """The engine's last hello before which all is in the stream; None if it is silent."""
        if not self._is_alive:
            return None
        fitting = [
            hello
            for num_told, _, hello in list(self._hellos)
            if said.takes_nothing or (num_told <= said.num_settled and hello.life == said.life)
        ]
        return protocol.encode(fitting[-1]) if fitting else None

    def on_alone(self) -> None:
        """The engine's life is the same as before, and its numbers show what is missing."""

    def on_drop(self) -> None:
        """The engine's next hello shows it."""

    def read(self, request: bytes) -> Ask | None:
        """The ask in a message; None if it is none."""
        with suppress(ProtocolError):
            ask = protocol.decode(request)
            return ask if isinstance(ask, Ask) else None
        return None

    def may_answer(self, _: Ask) -> bool:
        """The engine has limits of its own."""
        return True

    # -- from a thread for answers --

    def answer(self, ask: Ask) -> list[Numbered]:
        """What the engine says to it; TransportError or TimeoutError."""
        asked = self._asked = _Asked(ask)
        if not self._is_connected:  # looked at last: the stream may go just now
            self._fail("the stream of the engine is gone")
        return asked.answer.result(self._settings.max_answer_s + _MARGIN_S)


def _on_nats(hello: Hello) -> Hello:
    """Without the endpoint on ZMQ: readers ask by subject."""
    return structs.replace(hello, about=structs.replace(hello.about, answers_at=None))


def _is_end(payload: bytes) -> bool:
    with suppress(ProtocolError):
        return isinstance(protocol.decode(payload), End)
    return False
