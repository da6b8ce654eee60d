"""A publisher's messages on their way into a stream of NATS: in order, at least once, bounded.

In:  messages with the number that follows each; a connection that comes and goes.
Out: messages on one subject, each acknowledged by the stream that keeps it; how far that is.

64 of them may be unacknowledged. They are kept, and sent again from the first of them on when the
connection was lost, an acknowledgement is late, or the stream refused one (go-back-N): readers pass
over a number that they have. When what waits has more bytes than its limit, all of it is dropped:
saying all again is cheaper then, and readers ask when they see the hole in the numbers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.nuid import NUID

from kvplug.nats.client import subscribed
from kvplug.nats.connection import NatsConnection

MIN_BACKLOG_BYTES: Final = 2**22
"""What may wait for a server at least."""

STUCK_S: Final = 1.0
"""So long after the last progress, a server that is there takes nothing."""

_WINDOW: Final = 64
_ACK_LIMIT_S: Final = 2.0
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0
_TOO_LARGE: Final = 10054  # of JetStream: beyond the stream's max_msg_size
_NO_STREAM: Final = "no stream keeps this subject"


class _Refusal(msgspec.Struct):
    err_code: int = 0
    description: str = ""


class _Ack(msgspec.Struct):
    seq: int = 0
    error: _Refusal | None = None


_ACK: Final = msgspec.json.Decoder(_Ack)


@dataclass(slots=True)
class _Waiting:
    """A message that the stream may not have."""

    payload: bytes
    following: int
    headers: dict[str, str] | None
    is_settled: bool = False


class Outbox:
    """put and begin from the connection's loop, where `run` is a task.

    Read: following (the number behind the last message that was acknowledged, or dropped), last_seq
    (of the last one acknowledged, in the stream), is_stuck, and the counters num_sent, num_resent,
    num_dropped, num_too_large, refusals by what the stream said.
    """

    def __init__(
        self,
        connection: NatsConnection,
        subject: str,
        logger: logging.Logger,
        *,
        limit_bytes: Callable[[], int] = lambda: MIN_BACKLOG_BYTES,
        uses_stream: bool = True,
    ) -> None:
        """`uses_stream`: without one, a message is settled when it is sent."""
        self.following, self.last_seq = 0, 0
        self.num_sent = self.num_resent = self.num_dropped = self.num_too_large = 0
        self.refusals: dict[str, int] = {}
        self.on_drop: Callable[[], None] = lambda: None
        self.on_stuck: Callable[[], None] = lambda: None
        self._connection, self._subject, self._logger = connection, subject, logger
        self._limit_bytes, self._uses_stream = limit_bytes, uses_stream
        self._inbox = f"{connection.inbox_prefix}.{NUID().next().decode()}"
        self._messages: deque[_Waiting] = deque()
        self._num_bytes = self._num_in_flight = self._most_in_flight = 0
        self._first = 0  # index of the first message that waits; acknowledgements name theirs
        self._sent_s = self._progress_s = self._not_before_s = 0.0
        self._pause_s, self._is_stuck_told = _FIRST_PAUSE_S, False
        self._named: set[str] = set()
        self._wake = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Messages that are not settled."""
        return len(self._messages)

    @property
    def is_stuck(self) -> bool:
        """Whether messages wait that a connected server has not taken for STUCK_S."""
        if not self._messages or not self._connection.is_connected:
            return False
        return time.monotonic() - self._progress_s >= STUCK_S

    def put(self, payload: bytes, following: int, headers: dict[str, str] | None = None) -> None:
        """Send it behind all others; `following` is the number that the next one will have."""
        if not self._messages:
            self._on_progress()
        self._messages.append(_Waiting(payload, following, headers))
        self._num_bytes += len(payload)
        self._wake.set()
        if self._num_bytes > self._limit_bytes():
            self._drop()

    def begin(self, following: int) -> None:
        """What waits is of no use any more, as another life has begun."""
        self._forget()
        self.following = following

    async def run(self) -> None:
        """Send what there is, for ever."""
        client = await self._connection.connected()
        with self._connection.listening(self._on_change):
            async with subscribed(client, f"{self._inbox}.*", self._on_ack, is_bounded=False):
                while True:
                    await self._send_some(client)
                    await self._wait()

    def _on_change(self, is_connected: bool) -> None:
        """What was in flight is in flight no more. It has waited all along: the first beat on a new
        connection must not say that what the stream has is all.
        """
        self._is_stuck_told = False
        self._go_back(pause_s=0.0)

    def _on_progress(self) -> None:
        self._progress_s, self._is_stuck_told = time.monotonic(), False

    async def _send_some(self, client: Client) -> None:
        while self._may_send():
            message = self._messages[self._num_in_flight]
            index = self._first + self._num_in_flight
            if not self._num_in_flight:
                self._sent_s = time.monotonic()
            self._num_in_flight += 1
            self._count(index)
            reply = f"{self._inbox}.{index}" if self._uses_stream else ""
            try:
                await client.publish(self._subject, message.payload, reply, message.headers)
            except nats.errors.MaxPayloadError:
                self._give_up(message)
            except (nats.errors.Error, OSError) as error:
                self._on_refusal(type(error).__name__)
            else:
                if not self._uses_stream:
                    self._settle(message, 0)

    def _may_send(self) -> bool:
        return (
            self._num_in_flight < min(len(self._messages), _WINDOW)
            and self._connection.is_connected
            and time.monotonic() >= self._not_before_s
        )

    def _count(self, index: int) -> None:
        self.num_sent += 1
        if index < self._most_in_flight:
            self.num_resent += 1
        self._most_in_flight = max(self._most_in_flight, index + 1)

    async def _wait(self) -> None:
        """For a message, for progress, or until an acknowledgement is late."""
        loop = asyncio.get_running_loop()
        pause_s = self._pause_until_due()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(None if pause_s is None else loop.time() + pause_s):
                await self._wake.wait()
        self._wake.clear()
        if self.is_stuck and not self._is_stuck_told:
            self._is_stuck_told = True
            self.on_stuck()
        if self._num_in_flight and time.monotonic() >= self._sent_s + _ACK_LIMIT_S:
            self._on_refusal("no acknowledgement in time")

    def _pause_until_due(self) -> float | None:
        if not self._messages or not self._connection.is_connected:
            return None
        late_s = self._sent_s + _ACK_LIMIT_S if self._num_in_flight else self._not_before_s
        dues = [late_s] if self._is_stuck_told else [late_s, self._progress_s + STUCK_S]
        return max(min(dues) - time.monotonic(), 0.001)

    async def _on_ack(self, msg: Msg) -> None:
        index = int(msg.subject.rpartition(".")[2])
        if not self._first <= index < self._first + len(self._messages):
            return  # settled, or dropped
        message = self._messages[index - self._first]
        if not msg.data:  # "503", from the server: nobody listens
            self._on_refusal(_NO_STREAM)
            return
        ack = _ACK.decode(msg.data)
        if ack.error is None:
            self._pause_s = _FIRST_PAUSE_S
            self._settle(message, ack.seq)
        elif ack.error.err_code == _TOO_LARGE:
            self._give_up(message)
        else:
            self._on_refusal(ack.error.description)

    def _settle(self, message: _Waiting, seq: int) -> None:
        message.is_settled = True
        self.last_seq = seq or self.last_seq
        while self._messages and self._messages[0].is_settled:
            first = self._messages.popleft()
            self.following = first.following
            self._num_bytes -= len(first.payload)
            self._first += 1
            self._num_in_flight = max(self._num_in_flight - 1, 0)
            self._sent_s = time.monotonic()
            self._on_progress()
        if self._num_in_flight < len(self._messages):
            self._wake.set()

    def _give_up(self, message: _Waiting) -> None:
        self.num_too_large += 1
        self._name(
            f"an event message of {len(message.payload)} bytes is too large for the server or its "
            "stream: expected room for 512 KiB (max_payload, max_msg_size). Readers ask for it"
        )
        self._settle(message, 0)

    def _on_refusal(self, what: str) -> None:
        self.refusals[what] = self.refusals.get(what, 0) + 1
        self._name(f"the server does not take events of {self._subject}: {what}. They wait")
        self._go_back(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _go_back(self, pause_s: float) -> None:
        """To the first that waits; those behind it go out once more, so that order is kept."""
        for message in islice(self._messages, self._num_in_flight):
            message.is_settled = False
        self._num_in_flight = 0
        self._not_before_s = time.monotonic() + pause_s
        self._wake.set()

    def _drop(self) -> None:
        self.num_dropped += len(self._messages)
        self._name(
            f"events are dropped: more than {self._num_bytes / 2**20:.1f} MiB wait for the server. "
            "Readers ask for what they miss"
        )
        self.following = self._messages[-1].following
        self._forget()
        self.on_drop()

    def _forget(self) -> None:
        self._first += len(self._messages)
        self._messages.clear()
        self._num_bytes = self._num_in_flight = 0

    def _name(self, what: str) -> None:
        """Each cause once, numbers aside."""
        cause = "".join(each for each in what if not each.isdigit())
        if cause not in self._named:
            self._named.add(cause)
            self._logger.warning("kvplug: NATS: %s", what)
