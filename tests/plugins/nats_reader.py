"""The other end of our stream over NATS: a follower in a few lines, straight from docs/protocol.md.

It reads the stream by its sequence numbers, hears beats, and asks when it lacks something. What it
is told it applies to an index of its own.
"""

import asyncio
from contextlib import asynccontextmanager, suppress

import nats.errors
import nats.js.errors

from kvplug import protocol
from kvplug.nats.client import connect
from kvplug.nats.subjects import Subjects
from kvplug.protocol import Ask, End, Events, Hello, Resident
from tests.plugins.stream_client import RANK, new_index

LIMIT_S = 5.0


class NatsReader:
    """life, next, index; beats and asks as counted. `is_exact`: no hole is known."""

    def __init__(self, client, name, fleet="default", block_size=4):
        self._client, self._subjects, self._name = client, Subjects(fleet), name
        self._block_size = block_size
        self.index = new_index(block_size)
        self.life = self.next = self.seq = 0
        self.past, self.about, self.is_exact = set(), None, False
        self.beats, self.messages, self.num_asks = [], [], 0
        self._wants = asyncio.Event()

    async def start(self, stack):
        await self._client.subscribe(self._subjects.beats(self._name), cb=self._on_beat)
        for run in (self._read, self._ask_for_ever):
            task = asyncio.create_task(run())
            stack.append(task)

    async def _on_beat(self, msg):
        beat = protocol.decode(msg.data)
        self.beats.append((msg.headers, beat))
        seq = int(msg.headers.get("Kvplug-Seq", "0"))
        deadline = asyncio.get_running_loop().time() + 2.0
        while self.seq < seq and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self.take(beat)

    async def _read(self):
        """By sequence numbers; a stream that begins anew is read from its first."""
        js = self._client.jetstream()
        while True:
            try:
                msg = await js.get_msg(
                    self._subjects.stream, self.seq + 1, direct=True, next=True,
                    subject=self._subjects.events(self._name),
                )  # fmt: skip
            except (nats.errors.Error, nats.js.errors.Error, TimeoutError):
                with suppress(nats.errors.Error, nats.js.errors.Error, TimeoutError):
                    info = await js.stream_info(self._subjects.stream)
                    if info.state.last_seq < self.seq:
                        self.seq = 0
                await asyncio.sleep(0.02)
                continue
            self.seq = msg.seq
            if protocol.is_ours(msg.data):
                self.take(protocol.decode(msg.data))

    def take(self, message):
        self.messages.append(message)
        number = message.next if isinstance(message, Hello) else message.number
        if message.life in self.past:
            return
        if message.life != self.life:
            self.past.add(self.life)
            self.life, self.next = message.life, 0
            self.index = new_index(self._block_size)
        if isinstance(message, Events) and number == self.next:
            self.index.apply_packed(RANK, message.packed)
            self.next += 1
        elif number > self.next:
            self.is_exact = False
            self._wants.set()
            return
        if isinstance(message, Hello):
            self.about = message.about
            self.is_exact = number == self.next

    async def _ask_for_ever(self):
        while True:
            await self._wants.wait()
            self._wants.clear()
            with suppress(TimeoutError, nats.errors.Error):
                self._apply(await self.ask(self.life, self.next))
                continue
            self._wants.set()
            await asyncio.sleep(0.2)

    async def ask(self, life=0, next_=0):
        """The messages of an answer."""
        self.num_asks += 1
        return [message async for message in self.answer(protocol.encode(Ask(life, next_)))]

    async def answer(self, request, read=protocol.decode, is_end=lambda it: isinstance(it, End)):
        inbox = self._client.new_inbox()
        replies = await self._client.subscribe(inbox)
        await self._client.publish(self._subjects.asks(self._name), request, reply=inbox)
        try:
            while True:
                msg = await replies.next_msg(LIMIT_S)
                message = read(msg.data)
                yield message
                if is_end(message):
                    return
                if msg.reply:
                    await self._client.publish(msg.reply, b"", reply=inbox)
        finally:
            await replies.unsubscribe()

    def _apply(self, answer):
        for message in answer:
            match message:
                case Hello(life=life, about=about):
                    self.about = about
                    if life != self.life:
                        self.past.add(self.life)
                        self.life, self.next = life, 0
                case Resident(part=part, packed=packed, next=next_):
                    if part == 0:
                        self.index = new_index(self._block_size)
                    self.next = next_
                    self.index.apply_packed(RANK, packed)
                case Events(number=number, packed=packed):
                    if number == self.next:
                        self.index.apply_packed(RANK, packed)
                        self.next += 1
        self.is_exact = True

    def names(self):
        return {int(name) for name in self.index.engine_hashes_of(RANK)}


@asynccontextmanager
async def reading(url, name, **more):
    """A reader of one publisher, until the end."""
    client = await connect(url, max_reconnect_attempts=-1, reconnect_time_wait=0.1,
                                error_cb=_pass_over)  # fmt: skip
    reader, tasks = NatsReader(client, name, **more), []
    await reader.start(tasks)
    try:
        yield reader
    finally:
        while pending := [task for task in tasks if not task.done()]:
            for task in pending:
                task.cancel()  # again, as nats-py swallows some
            await asyncio.wait(pending, timeout=0.05)
        with suppress(OSError, nats.errors.Error):
            await client.close()


async def _pass_over(error):
    """The server is away, as it is to be."""


async def make_stream(url, fleet="default", **more):
    """The stream of a fleet, as routers make it."""
    client = await connect(url)
    subjects = Subjects(fleet)
    await client.jetstream().add_stream(
        name=subjects.stream, subjects=[subjects.all_events], allow_direct=True, **more
    )
    await client.close()
