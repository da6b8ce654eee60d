"""The stream of a whole fleet through one durable consumer, and the beats of all its publishers.

In:  a stream sequence to begin behind, set by the owner.   Out: an AskingSource, kvplug/transports.

The consumer is made anew at each start, after each loss of the connection, and whenever the server
says nothing for 3 s or says that it is gone: behind what was handed over last, so nothing is left
out. What comes twice is dropped by the publishers' own numbers.

Two threads: the connection's loop fills a queue and asks the server for more when half of a batch
has been taken from it; the event thread takes. So a slow event thread makes the server wait, and
nothing is lost.

A beat says how far the publisher's messages are in the stream, and waits here until they have come,
for 1 s at most: a reader that is later than that had better ask.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext, api
from nats.js.errors import NotFoundError

from kvplug.errors import TransportError
from kvplug.nats.connection import NatsConnection, translated
from kvplug.nats.subjects import PublisherName, Subjects
from kvplug.topics import Topic
from kvplug.transports.arrivals import Arrivals
from kvplug.transports.base import Connection, Message
from kvplug.transports.nats_answer import NatsReplayAnswer, run_in
from kvplug.transports.nats_messages import STREAM_SEQUENCE, Topics, message_of, number_in
from kvplug.transports.nats_pull import Pull
from kvplug.transports.stream_reading import Delivered, StreamReading

logger = logging.getLogger(__name__)

_SILENCE_S: Final = 3.0
_LOOK_S: Final = 0.05
_ACK_S: Final = 1.0
_PAUSE_S: Final = 0.25
_MAX_PAUSE_S: Final = 2.0
_TIMEOUT_S: Final = 3.0
_DELETE_TIMEOUT_S: Final = 1.0
_HOLD_S: Final = 1.0
_MAX_HELD: Final = 20_000
# Beats that wait for the event thread, of a publisher that says too much; others come again.
_MAX_BEAT_BYTES: Final = 16 * 2**20
_BEAT_OVERHEAD_BYTES: Final = 500
# Of the consumer: one that is gone for longer begins behind its snapshot again.
_INACTIVE_S: Final = 600.0
# Messages that nobody acknowledged are sent again: not to a replica that is paused for a while.
_ACK_WAIT_S: Final = 60.0
_MAX_UNACKED: Final = 200_000


class NatsStreamSource:
    """As AskingSource. And connection_changed, begin_anew."""

    def __init__(
        self,
        connection: NatsConnection,
        subjects: Subjects,
        router_id: Callable[[], str],
        prefix: str,
        reading: StreamReading,
    ) -> None:
        """`router_id`: asked for when the consumer is made."""
        self._connection, self._subjects, self._router_id = connection, subjects, router_id
        self.reading = reading
        self._topics = Topics(prefix)
        self._arrivals: Arrivals[Delivered] = Arrivals()
        self._anew = asyncio.Event()
        self._pull: Pull | None = None
        self._delivered_seq, self._acked = 0, ""
        self._held: deque[tuple[float, int, Delivered]] = deque()
        self._held_seq = 0  # the lowest that a beat waits for
        self._num_beat_bytes_in = self._num_beat_bytes_out = 0
        self._beats: Subscription | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closed = self._is_gone = False

    def open(self) -> None:
        """Read as soon as there is a server, a stream, and a sequence to begin behind."""
        self._connection.loop.call_soon_threadsafe(self._open)

    def begin_anew(self) -> None:
        """Look again where to begin; from any thread."""
        with suppress(RuntimeError):  # the connection has ended
            self._connection.loop.call_soon_threadsafe(self._anew.set)

    # -- in the event thread --

    def filenos(self) -> tuple[int, ...]:
        """The one that wakes."""
        return (self._arrivals.fileno,)

    def connection_changes(self) -> list[Connection]:
        """OPENED once, as publishers do not connect to anybody; INTERRUPTED and RESUMED."""
        return self._arrivals.changes()

    def receive(self, max_messages: int) -> list[Message]:
        """Messages of the stream, and beats between them; what was received before is applied."""
        self.reading.apply()
        arrived = self._arrivals.take(max_messages)
        of_stream = [each for each in arrived if each.epoch]
        self._num_beat_bytes_out += sum(each.num_bytes for each in arrived if not each.epoch)
        if of_stream:
            self._note_taken(of_stream)
        return [each.message for each in arrived if each.message is not None]

    def _note_taken(self, taken: list[Delivered]) -> None:
        self.reading.take(taken[-1])
        pull = self._pull
        if pull is not None:
            pull.took(taken)
            if pull.is_hungry:
                run_in(self._connection, pull.more())

    def request_replay(self, request: bytes, endpoint: str | None) -> NatsReplayAnswer:
        """Publishers are asked by topic."""
        raise TransportError(f"cannot ask {endpoint!r}: expected a topic")

    def ask(self, topic: str, request: bytes) -> NatsReplayAnswer:
        """Ask the publisher with this topic."""
        parsed = Topic.parse(topic)
        publisher = None if parsed is None else PublisherName.parse(parsed.pod)
        if publisher is None:
            raise TransportError(f"cannot ask {topic!r}: expected a topic like kv@WORKER/0")
        subject = self._subjects.asks(publisher)
        wake = self._arrivals.wake
        return NatsReplayAnswer(self._connection, subject, topic.encode(), request, wake)

    def close(self) -> None:
        """Read no more; the consumer stays."""
        if not self._is_closed:
            self._is_closed = True
            self._arrivals.close()
            run_in(self._connection, self._end())

    # -- in the connection's loop --

    def connection_changed(self, is_connected: bool) -> None:
        """Go on where it was."""
        if self._is_closed:
            return
        self._arrivals.tell(Connection.RESUMED if is_connected else Connection.INTERRUPTED)
        self._anew.set()

    def _open(self) -> None:
        self._arrivals.tell(Connection.OPENED)
        if not self._connection.is_connected:
            self._arrivals.tell(Connection.INTERRUPTED)
        loop = self._connection.loop
        self._tasks = [loop.create_task(each) for each in (self._run(), self._tend_beats())]

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._beats is not None:
            with suppress(nats.errors.Error, OSError):
                await self._beats.unsubscribe()

    async def _run(self) -> None:
        pause_s = _PAUSE_S
        while True:
            try:
                await self._read()
            except (nats.errors.Error, OSError, TimeoutError, TransportError) as error:
                self._say(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            else:
                pause_s = _PAUSE_S

    def _say(self, error: Exception) -> None:
        stream = self._subjects.stream
        said = error if isinstance(error, TransportError) else translated(error, "read the stream")
        text = f"stream {stream}: {said}; it is tried again"
        if self._connection.is_connected and text != self.reading.error:
            self.reading.error = text
            logger.warning("NATS: %s", text)

    async def _read(self) -> None:
        """With one consumer, until another one is needed."""
        self._anew.clear()
        self._is_gone = False
        if not (self._connection.is_connected and self.reading.may_begin):
            await self._anew.wait()
            return
        client = await self._connection.connected()
        js = client.jetstream(timeout=_TIMEOUT_S)
        seq = await self._position(js)
        await self._make_consumer(client, seq)
        self._delivered_seq, self._acked = seq, ""
        self._pull = pull = self._pull_of(client, self.reading.begin_epoch(seq))
        await pull.start()
        self.reading.error = None
        try:
            await self._watch(pull, client)
        finally:
            await pull.stop()
        if self._is_gone:  # whatever takes it away, as another router of this id, may do it again
            await asyncio.sleep(_PAUSE_S)

    async def _position(self, js: JetStreamContext) -> int:
        """Behind which message to begin. A stream that has less than was read lost its end, or is
        another one, and gives numbers again: it is read from its first message.
        """
        try:
            info = await js.stream_info(self._subjects.stream)
        except NotFoundError as error:
            raise TransportError("it does not exist; a router that may make it does") from error
        created, seq = str(info.created), self.reading.taken_seq
        is_other = self.reading.created not in (None, created)
        self.reading.created = created
        if not is_other and info.state.last_seq >= seq:
            return seq
        self.reading.num_rewound += 1
        why = "is another one" if is_other else "lost its end"
        logger.warning(
            "NATS: stream %s %s: it is read from the first message", info.config.name, why
        )
        return 0

    async def _make_consumer(self, client: Client, seq: int) -> None:
        """The start of one that exists cannot be changed. One replica, in memory: it is made anew
        whenever its server is lost, and a group of three takes up to half a minute to elect a
        leader when a server was lost just before.
        """
        stream, name = self._subjects.stream, self._consumer
        with suppress(NotFoundError):
            # While the servers have no leader there is no answer, and none to wait for.
            await client.jetstream(timeout=_DELETE_TIMEOUT_S).delete_consumer(stream, name)
        config = api.ConsumerConfig(
            name=name,
            durable_name=name,
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=seq + 1,
            ack_policy=api.AckPolicy.ALL,
            ack_wait=_ACK_WAIT_S,
            max_ack_pending=_MAX_UNACKED,
            inactive_threshold=_INACTIVE_S,
            num_replicas=1,
            mem_storage=True,
        )
        await client.jetstream(timeout=_TIMEOUT_S).add_consumer(stream, config)
        self.reading.num_consumers += 1

    @property
    def _consumer(self) -> str:
        return f"router-{self._router_id()}"

    def _pull_of(self, client: Client, epoch: int) -> Pull:
        return Pull(
            client,
            f"$JS.API.CONSUMER.MSG.NEXT.{self._subjects.stream}.{self._consumer}",
            self._arrivals,
            epoch,
            self,
        )

    def read(self, msg: Msg) -> Message | None:
        """A message of the stream; None if nobody wants it."""
        topic = self._topics.of(msg.subject)
        return None if topic is None else message_of(topic, msg, is_live=False)

    def came(self, seq: int) -> None:
        """Beats that waited for this message may go."""
        self._delivered_seq = seq
        if self._held and seq >= self._held_seq:
            self._release()

    def gone(self, reason: str) -> None:
        """Another consumer is needed."""
        self._is_gone = True
        logger.info("NATS: the consumer %s is made anew: %s", self._consumer, reason)
        self._anew.set()

    async def _watch(self, pull: Pull, client: Client) -> None:
        while not self._anew.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._anew.wait(), _ACK_S)
            self.reading.num_pending = pull.num_pending
            applied = self.reading.applied
            if applied.reply and applied.reply != self._acked:
                self._acked = applied.reply
                await client.publish(applied.reply, b"+ACK")
            if self._connection.is_connected and monotonic() - pull.heard_s > _SILENCE_S:
                self.gone(f"no heartbeat for {_SILENCE_S:g} s")

    # -- beats --

    async def _tend_beats(self) -> None:
        client = await self._connection.connected()
        self._beats = await client.subscribe(
            self._subjects.all_beats,
            cb=self._hear_beat,
            pending_msgs_limit=0,
            pending_bytes_limit=0,
        )
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._held and self._held[0][0] <= monotonic():
                self._release()

    async def _hear_beat(self, msg: Msg) -> None:
        topic = self._topics.of(msg.subject)
        if topic is None or self._is_closed or not self.reading.may_begin:
            return
        if self._num_beat_bytes_in - self._num_beat_bytes_out > _MAX_BEAT_BYTES:
            return
        num_bytes = len(msg.data) + _BEAT_OVERHEAD_BYTES
        beat = Delivered(message_of(topic, msg, is_live=True), num_bytes=num_bytes)
        seq = number_in((msg.headers or {}).get(STREAM_SEQUENCE, "")) or 0
        if seq <= self._delivered_seq:
            self._arrivals.put(beat)
        elif len(self._held) < _MAX_HELD:
            self.reading.num_held += 1
            self._held_seq = min(seq, self._held_seq) if self._held else seq
            self._held.append((monotonic() + _HOLD_S, seq, beat))
        else:
            return
        self._num_beat_bytes_in += num_bytes

    def _release(self) -> None:
        now_s, held, self._held = monotonic(), self._held, deque()
        for due_s, seq, beat in held:
            if seq > self._delivered_seq and due_s > now_s:
                self._held.append((due_s, seq, beat))
                continue
            self.reading.num_late += seq > self._delivered_seq
            self._arrivals.put(beat)
        self._held_seq = min((seq for _, seq, _ in self._held), default=0)
