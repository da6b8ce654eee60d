"""Whatever a server does, a reader that sees the stream and asks ends with what is held."""

import asyncio
import os
import random

import pytest

from kvplug.events import AllBlocksCleared, BlockRemoved
from kvplug.nats.client import connect
from kvplug.nats.subjects import Subjects
from kvplug.protocol import WorkerHello
from tests.nats_servers import nats_servers
from tests.plugins.nats_reader import make_stream, reading
from tests.plugins.test_event_stream import batch, stored
from tests.plugins.test_nats_stream import NAME, at_rest, streaming

NUM_ACTS = 40
SEEDS = range(int(os.environ.get("KVPLUG_TEST_SEEDS", "2")))
STREAM = Subjects("default").stream


class Trouble:
    """One random act after another: of the engine, of the server, of an operator."""

    def __init__(self, node, stream, rnd):
        self.node, self.stream, self.rnd = node, stream, rnd
        self.held, self.next_block = [], 0
        self.acts = [self.publish] * 6 + [
            self.kill, self.pause, self.purge, self.delete_stream, self.lose, self.send_again,
        ]  # fmt: skip

    async def act(self):
        await self.rnd.choice(self.acts)()

    async def publish(self):
        for _ in range(self.rnd.randrange(1, 30)):
            self.stream.publish(batch(*self._events()))
            await asyncio.sleep(0)

    def _events(self):
        if self.rnd.random() < 0.01:
            self.held.clear()
            yield AllBlocksCleared()
        num_blocks = self.rnd.randrange(1, 5)
        yield stored(self.next_block, num_blocks)
        self.held += range(self.next_block, self.next_block + num_blocks)
        self.next_block += num_blocks
        if self.held and self.rnd.random() < 0.5:
            yield BlockRemoved(block_hashes=(self.held.pop(self.rnd.randrange(len(self.held))),))

    async def kill(self):
        self.node.kill()
        await self.publish()
        await asyncio.to_thread(self.node.start)

    async def pause(self):
        self.node.pause()
        await self.publish()
        await asyncio.sleep(self.rnd.random() / 2)
        self.node.resume()

    async def purge(self):
        await self._operate(lambda js: js.purge_stream(STREAM))

    async def delete_stream(self):
        await self._operate(lambda js: js.delete_stream(STREAM))
        await self.publish()
        await make_stream(self.node.url)

    async def _operate(self, do):
        client = await connect(self.node.url)
        await do(client.jetstream())
        await client.close()

    async def lose(self):
        """The engine's own loss: another life, with nothing."""
        self.stream.lose(1, "sender_lost")
        self.held.clear()

    async def send_again(self):
        loop = self.stream._task._connection.loop
        loop.call_soon_threadsafe(self.stream.outbox._go_back, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_reader_ends_with_what_is_held(seed, monkeypatch):
    monkeypatch.setattr("kvplug.engines.nats_stream.MIN_BACKLOG_BYTES", 5000)
    rnd = random.Random(seed)
    with nats_servers() as [node]:
        await make_stream(node.url)
        with streaming(node.url, about=WorkerHello(block_size=4)) as stream:
            async with reading(node.url, NAME) as reader:
                trouble = Trouble(node, stream, rnd)
                for _ in range(NUM_ACTS):
                    await trouble.act()
                await at_rest(reader, stream)
