"""A replica as a process: reads the fleet's stream and makes snapshots, in which it dies or stops.

In:  a server, a fleet, a name, a threshold.   Out: a line of JSON five times a second: what it has.

What it knows of each publisher is the next number. What a fault hits is decided by how many times
any replica has begun a snapshot: the plan of faults goes over all steps, whoever takes them.

usage: python -m tests.cluster.rounds_replica URL FLEET NAME THRESHOLD
"""

import asyncio
import os
import signal
import struct
import sys
from contextlib import suppress

import msgspec
import nats.errors
from nats.js import api, errors

from kvplug.cluster.checkpoints import STEPS, Checkpoints, CheckpointSettings
from kvplug.cluster.state_key import StateKey
from kvplug.errors import TransportError
from kvplug.nats.connection import NatsConnection
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import Subjects
from tests.cluster.snapshots import Frozen

NUMBER = struct.Struct("<HQ")
"""A message: its publisher, and its number there."""

LEASE_TTL_S = 1
FAULTS = [(kind, step) for step in STEPS for kind in ("kill", "stop")]
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Replica:
    def __init__(self, connection, fleet, name, threshold):
        self._connection, self._subjects, self._name = connection, Subjects(fleet), name
        settings = CheckpointSettings(
            threshold=threshold, min_interval_s=0.2, lease_ttl_s=LEASE_TTL_S, live_s=2.0,
            broken_after_s=5.0,
        )  # fmt: skip
        self._checkpoints = Checkpoints(
            connection, self._subjects, settings, name, on_step=self._step
        )
        self._fault = None
        self.seq, self.next, self.num_missed, self.num_again = 0, {}, 0, 0

    async def run(self):
        client = await self._connection.connected()
        self._js = client.jetstream(timeout=5)
        self._attempts = StateKey(client, self._subjects.state_bucket, "attempts")
        await self._begin()
        await asyncio.gather(self._read(), self._make_snapshots(), self._report())

    async def _begin(self):
        """Again, if another replica purges what is needed in between."""
        while True:
            restored = await self._checkpoints.restore()
            self.seq, self.next = restored.seq, {}
            if restored.snapshot is not None:
                self.next = msgspec.json.decode(restored.snapshot, type=dict[int, int])
            await self._consume()
            info = await self._js.stream_info(self._subjects.stream)
            if info.state.first_seq <= self.seq + 1:
                return

    async def _consume(self):
        stream, name = self._subjects.stream, f"router-{self._name}"
        with suppress(errors.NotFoundError):
            await self._js.delete_consumer(stream, name)
        config = api.ConsumerConfig(
            durable_name=name, ack_policy=api.AckPolicy.ALL, opt_start_seq=self.seq + 1,
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE, max_ack_pending=-1,
        )  # fmt: skip
        await self._js.add_consumer(stream, config)
        self._consumer = await self._js.pull_subscribe_bind(consumer=name, stream=stream)

    async def _read(self):
        while True:
            with suppress(TimeoutError, nats.errors.Error):  # none came, or this was stopped
                messages = await self._consumer.fetch(500, timeout=0.2)
                for message in messages:
                    self._apply(message)
                if messages:
                    await messages[-1].ack()

    def _apply(self, message):
        publisher, number = NUMBER.unpack(message.data)
        expected = self.next.get(publisher, 0)
        self.num_again += number < expected
        self.num_missed += max(0, number - expected)
        self.next[publisher] = max(expected, number + 1)
        self.seq = message.metadata.sequence.stream

    async def _make_snapshots(self):
        while True:
            await asyncio.sleep(0.05)
            with suppress(TransportError):
                if await self._checkpoints.is_due(self.seq):
                    await self._checkpoints.make(self._freeze)

    async def _freeze(self):
        return Frozen(self.seq, msgspec.json.encode(self.next))

    async def _step(self, step):
        if step == "lease":
            self._fault = await self._next_fault()
        if self._fault is not None and self._fault[1] == step:
            fault, self._fault = self._fault, None
            self._say(fault=fault)
            os.kill(os.getpid(), _SIGNALS[fault[0]])

    async def _next_fault(self):
        while True:
            value, revision = await self._attempts.read()
            number = int(value or 0)
            if await self._attempts.replace(str(number + 1).encode(), revision):
                return FAULTS[number % len(FAULTS)]

    async def _report(self):
        while True:
            self._say()
            await asyncio.sleep(0.2)

    def _say(self, **more):
        said = {
            "seq": self.seq, "next": self.next, "missed": self.num_missed,
            "again": self.num_again, "made": self._checkpoints.num_made, **more,
        }  # fmt: skip
        os.write(1, msgspec.json.encode(said) + b"\n")


def main(url, fleet, name, threshold):
    settings = NatsSettings(servers=(url,), fleet=fleet)
    connection = NatsConnection(settings, f"router-{name}")
    connection.start()
    connection.submit(Replica(connection, fleet, name, int(threshold)).run()).result()


if __name__ == "__main__":
    main(*sys.argv[1:])
