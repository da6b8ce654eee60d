"""Event publishers over NATS: one of them without a stream, or the stream of a whole fleet.

In:  endpoints `nats://WORKER/RANK`, WORKER percent-encoded; to bind, `nats://` alone.
Out: the contract of kvplug/transports/base.py.

    connect   events, beats and asks of one publisher over NATS core: nothing is kept
    bind      the fleet's stream, where it is to begin, and the beats of all (nats_stream.py)

Messages have the topic `kv@WORKER/RANK`. The connection belongs to whoever made it; what arrives in
its thread wakes the event thread.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from kvplug.errors import TransportError
from kvplug.nats.connection import NatsConnection, translated
from kvplug.nats.subjects import Subjects
from kvplug.transports.arrivals import Arrivals
from kvplug.transports.base import Connection, Message
from kvplug.transports.nats_answer import NatsReplayAnswer, run_in
from kvplug.transports.nats_messages import message_of, publisher_at, topic_of
from kvplug.transports.nats_stream import NatsStreamSource
from kvplug.transports.stream_reading import StreamReading

logger = logging.getLogger(__name__)

# A follower that does not keep up misses messages, and asks for them.
_MAX_QUEUED_MESSAGES: Final = 100_000


class NatsTransport:
    """As Transport. And of the stream: router_id, start_after, applied_seq, reading."""

    def __init__(
        self, connection: NatsConnection, subjects: Subjects, *, router_id: str = ""
    ) -> None:
        """`router_id`: the durable consumer is `router-<router_id>`; it may be set until
        `start_after`. The connection may be started before or after.
        """
        self.router_id = router_id
        self._connection, self._subjects = connection, subjects
        self._sources: set[NatsSource] = set()
        self._stream: NatsStreamSource | None = None
        self._reading = StreamReading()
        connection.on_change(self._changed)

    # -- the stream, from any thread --

    @property
    def applied_seq(self) -> int:
        """Everything in the stream up to here was handed over and applied."""
        return self._reading.applied_seq

    @property
    def reading(self) -> StreamReading:
        """How reading goes on."""
        return self._reading

    def start_after(self, seq: int) -> None:
        """Read the stream from the message behind this one; 0: from the first. Once at least, as
        nothing is read before.
        """
        self._reading.start_after(seq)
        if self._stream is not None:
            self._stream.begin_anew()

    # -- the contract --

    def check(self, endpoint: str) -> None:
        """TransportError if this is no endpoint of one publisher."""
        publisher_at(endpoint)

    def replay_of(self, endpoint: str) -> str | None:
        """A publisher is asked where it publishes."""
        return endpoint

    def connect(self, endpoint: str, topic: str, replay: str | None) -> NatsSource:
        """Follow one publisher over NATS core."""
        source = NatsSource(self._connection, self._subjects, endpoint, topic, replay)
        self._sources = {*(each for each in self._sources if not each.is_closed), source}
        source.open()
        return source

    def bind(self, endpoint: str, topic: str) -> tuple[NatsStreamSource, str]:
        """Read the fleet's stream."""
        if endpoint.removeprefix("nats://"):
            raise TransportError(f"cannot bind {endpoint!r}: expected nats:// alone")
        if not self.router_id:
            raise TransportError(f"cannot bind {endpoint!r}: expected a router id")
        self._stream = NatsStreamSource(
            self._connection, self._subjects, lambda: self.router_id, topic, self._reading
        )
        self._stream.open()
        return self._stream, endpoint

    def close(self) -> None:
        """Close all sources; the connection stays."""
        for source in self._sources:
            source.close()
        if self._stream is not None:
            self._stream.close()

    def _changed(self, is_connected: bool) -> None:
        for source in self._sources:
            source.connection_changed(is_connected)
        if self._stream is not None:
            self._stream.connection_changed(is_connected)


class NatsSource:
    """One publisher over NATS core: OPENED and LOST are those of the connection to the server."""

    def __init__(
        self,
        connection: NatsConnection,
        subjects: Subjects,
        endpoint: str,
        prefix: str,
        replay: str | None,
    ) -> None:
        publisher = publisher_at(endpoint)
        self.endpoint, self.is_closed = endpoint, False
        self._replay = replay
        self._connection, self._subjects = connection, subjects
        self._heard = subjects.events(publisher), subjects.beats(publisher)
        topic = topic_of(publisher)
        self._topic, self._is_wanted = topic.encode(), topic.startswith(prefix)
        self._arrivals: Arrivals[Message] = Arrivals()
        self._subscriptions: list[Subscription] = []
        self._is_open = self._is_lost = False

    def open(self) -> None:
        """Subscribe, as soon as there is a server."""
        self._connection.loop.call_soon_threadsafe(self._look)

    def filenos(self) -> tuple[int, ...]:
        """The one that wakes."""
        return (self._arrivals.fileno,)

    def connection_changes(self) -> list[Connection]:
        """What happened since the last call."""
        return self._arrivals.changes()

    def receive(self, max_messages: int) -> list[Message]:
        """Messages that have arrived."""
        return self._arrivals.take(max_messages)

    def request_replay(self, request: bytes, endpoint: str | None) -> NatsReplayAnswer:
        """Ask the publisher, or another one that it names."""
        asked = self._replay if endpoint is None else endpoint
        if asked is None:
            raise TransportError(f"cannot ask {self.endpoint!r}: expected a replay endpoint")
        publisher = publisher_at(asked)
        subject = self._subjects.asks(publisher)
        topic = topic_of(publisher).encode()
        return NatsReplayAnswer(self._connection, subject, topic, request, self._arrivals.wake)

    def close(self) -> None:
        """Unsubscribe."""
        if self.is_closed:
            return
        self.is_closed = True
        self._arrivals.close()
        run_in(self._connection, self._unsubscribe())

    # -- in the connection's loop --

    def connection_changed(self, is_connected: bool) -> None:
        """Subscribe with the first connection; for the next one there is another source."""
        if is_connected:
            self._look()
        elif self._is_open:
            self._is_lost = True
            self._arrivals.tell(Connection.LOST)

    def _look(self) -> None:
        if self._connection.is_connected and not (self._is_open or self.is_closed):
            self._is_open = True
            self._opening = self._connection.loop.create_task(self._subscribe())

    async def _subscribe(self) -> None:
        client = await self._connection.connected()
        try:
            for subject in self._heard:
                self._subscriptions.append(
                    await client.subscribe(
                        subject, cb=self._hear, pending_msgs_limit=0, pending_bytes_limit=0
                    )
                )
        except (nats.errors.Error, OSError) as error:
            logger.warning("%s: %s", self.endpoint, translated(error, "subscribe to events"))
            self._arrivals.tell(Connection.LOST)
            return
        if self.is_closed:
            await self._unsubscribe()
        self._arrivals.tell(Connection.OPENED)

    async def _hear(self, msg: Msg) -> None:
        is_heard = self._is_wanted and not (self._is_lost or self.is_closed)
        if is_heard and len(self._arrivals.queue) < _MAX_QUEUED_MESSAGES:
            self._arrivals.put(message_of(self._topic, msg, is_live=True))

    async def _unsubscribe(self) -> None:
        subscriptions, self._subscriptions = self._subscriptions, []
        for each in subscriptions:
            with suppress(nats.errors.Error, OSError):
                await each.unsubscribe()
