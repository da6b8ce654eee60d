"""A pull consumer that is read by a callback: nats-py's own fetch waits for each message.

In:  a client, a consumer that exists.   Out: what was delivered, into a queue, in order.

Requests overlap: the next one goes out when half of a batch is asked for or waits in the queue, so
the server never waits for a reader that keeps up, and the queue is bounded for one that does not.
nats-py drops what is beyond a subscription's own limits, so there are none.
"""

from __future__ import annotations

from contextlib import suppress
from time import monotonic
from typing import Final, Protocol

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from kvplug.transports.arrivals import Arrivals
from kvplug.transports.base import Message
from kvplug.transports.stream_reading import Delivered

_BATCH: Final = 512
_MAX_BYTES: Final = 8 * 2**20
_EXPIRES_S: Final = 5.0
_HEARTBEAT_S: Final = 1.0
_REQUEST: Final = msgspec.json.encode(
    {
        "batch": _BATCH,
        "max_bytes": _MAX_BYTES,
        "expires": int(_EXPIRES_S * 1e9),
        "idle_heartbeat": int(_HEARTBEAT_S * 1e9),
    }
)
# $JS.ACK.STREAM.CONSUMER.NUM_DELIVERED.STREAM_SEQ.CONSUMER_SEQ.TIME.PENDING; a domain adds two in
# front and a token at the end.
_NUM_TOKENS: Final = 9
_SEQ_AT: Final = 5
_PENDING_AT: Final = 8


class Taker(Protocol):
    """Who wants what is delivered."""

    def read(self, msg: Msg) -> Message | None:
        """The message; None if nobody wants it."""

    def came(self, seq: int) -> None:
        """The message with this sequence is in the queue, and so are all before it."""

    def gone(self, reason: str) -> None:
        """Nothing comes any more."""


class Pull:
    """start, more, stop; took; heard_s, is_hungry, num_pending."""

    def __init__(
        self,
        client: Client,
        subject: str,
        arrivals: Arrivals[Delivered],
        epoch: int,
        taker: Taker,
    ) -> None:
        """`subject`: where the consumer is asked for more; `epoch`: of what it delivers."""
        self.heard_s = monotonic()
        self.num_pending = 0
        self._client, self._subject, self._arrivals, self._epoch = client, subject, arrivals, epoch
        self._taker = taker
        self._num_asked = 0  # messages that the server may still send
        self._num_bytes_in = self._num_bytes_out = 0
        self._subscription: Subscription | None = None

    @property
    def is_hungry(self) -> bool:
        """Whether it is time to ask for more; from any thread."""
        has_room = self._num_bytes_in - self._num_bytes_out <= _MAX_BYTES
        return has_room and self._num_asked + len(self._arrivals.queue) <= _BATCH // 2

    def took(self, taken: list[Delivered]) -> None:
        """These were taken from the queue; in the thread that takes."""
        self._num_bytes_out += sum(each.num_bytes for each in taken if each.epoch == self._epoch)

    async def start(self) -> None:
        """Ask for the first ones."""
        self._inbox = self._client.new_inbox()
        self._subscription = await self._client.subscribe(
            self._inbox, cb=self._arrived, pending_msgs_limit=0, pending_bytes_limit=0
        )
        await self.more()

    async def more(self) -> None:
        """Ask for more, if it is time to."""
        if self.is_hungry and self._subscription is not None:
            self._num_asked += _BATCH
            with suppress(nats.errors.Error, OSError):  # silence tells
                await self._client.publish(self._subject, _REQUEST, self._inbox)

    async def stop(self) -> None:
        """Take nothing more."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            with suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()

    async def _arrived(self, msg: Msg) -> None:
        if self._subscription is None:
            return
        self.heard_s = monotonic()
        if not msg.reply:
            await self._take_status(msg.headers or {})
            return
        tokens = msg.reply.split(".")
        shift = 0 if len(tokens) == _NUM_TOKENS else 2
        seq, self.num_pending = int(tokens[_SEQ_AT + shift]), int(tokens[_PENDING_AT + shift])
        self._num_asked -= 1
        num_bytes = len(msg.data)
        self._num_bytes_in += num_bytes
        message = self._taker.read(msg)
        self._arrivals.put(Delivered(message, seq, msg.reply, num_bytes, self._epoch))
        self._taker.came(seq)

    async def _take_status(self, headers: dict[str, str]) -> None:
        """100: a heartbeat; 404, 408 and a full batch of bytes end a request; else it is gone."""
        status, said = headers.get("Status"), headers.get("Description", "")
        if status == "100":
            return
        left = headers.get("Nats-Pending-Messages", "")
        self._num_asked -= min(self._num_asked, int(left) if left.isdecimal() else self._num_asked)
        if status in ("404", "408") or "MaxBytes" in said or "Batch Completed" in said:
            await self.more()
        else:
            self._taker.gone(f"{status} {said}".strip())
