"""A real server with a fleet's stream and buckets, and replicas that make snapshots, for tests."""

import asyncio
from contextlib import asynccontextmanager

from kvplug.cluster.checkpoints import Checkpoints, CheckpointSettings
from kvplug.cluster.streams import Streams, StreamSettings
from kvplug.nats.connection import NatsConnection
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import PublisherName, Subjects

ANYBODY = PublisherName("http://a:8000", 0)


class Frozen:
    """`data` as if it were a fleet at `seq`."""

    def __init__(self, seq, data=b""):
        self.seq, self._data = seq, data

    def encode(self):
        return memoryview(self._data)


def frozen(seq, data=b""):
    async def freeze():
        return Frozen(seq, data)

    return freeze


class Fleet:
    """Of one server: calls run in the loop of a connection of its own."""

    def __init__(self, url, name):
        self.subjects = Subjects(name)
        self.connection = NatsConnection(NatsSettings(servers=(url,), fleet=name), "tests")
        self.connection.start()

    async def run(self, coroutine):
        return await asyncio.wrap_future(self.connection.submit(coroutine))

    async def client(self):
        return await self.run(self.connection.connected())

    async def begin(self):
        await self.run(
            Streams(self.connection, self.subjects, StreamSettings(max_bytes=2**26)).ensure()
        )
        self.js = (await self.client()).jetstream()

    def checkpoints(self, router_id="a", *, on_step=None, **settings):
        settings = {"min_interval_s": 0.0, "watch_s": 0.05} | settings
        more = {} if on_step is None else {"on_step": on_step}
        return Checkpoints(
            self.connection, self.subjects, CheckpointSettings(**settings), router_id, **more
        )

    async def publish(self, num_messages, payload=b"x"):
        """Returns the last one's stream sequence."""

        async def publish_all():
            subject = self.subjects.events(ANYBODY)
            acks = [await self.js.publish(subject, payload) for _ in range(num_messages)]
            return acks[-1].seq

        return await self.run(publish_all())

    async def stream(self):
        return (await self.run(self.js.stream_info(self.subjects.stream))).state


@asynccontextmanager
async def a_fleet(url, name):
    """With its stream and buckets."""
    fleet = Fleet(url, name)
    try:
        await fleet.begin()
        yield fleet
    finally:
        fleet.connection.stop()
