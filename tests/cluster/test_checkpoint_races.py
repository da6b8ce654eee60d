"""Two makers of snapshots at once, in any order of their steps: what a late one does is harmless.

Neither has the lease. One may stop for ever after any step. Meanwhile messages come, and states are
reset. After each step the manifest's snapshot can be restored, the manifest has not fallen, and the
stream still has everything that the snapshot has not.
"""

import asyncio
import os
import random

import msgspec

from kvplug.cluster.manifest import ManifestKey
from kvplug.cluster.objects import SnapshotObjects
from tests.cluster.snapshots import ANYBODY, Frozen

NUM_RUNS = int(os.environ.get("KVPLUG_TEST_EXAMPLES", "15"))


class Maker:
    """Goes on by one step when it is told."""

    def __init__(self, fleet, name):
        self._fleet, self._name = fleet, name
        self._checkpoints = fleet.checkpoints(name, on_step=self._stop, live_s=0.0)
        self._may_go, self._has_stopped = asyncio.Event(), asyncio.Event()
        self._task, self.last_step = None, None

    async def advance(self, client):
        if self._task is None or self._task.done():
            await self._checkpoints.restore()
            making = self._checkpoints._make(client, self._freeze)
            self._task, self.last_step = asyncio.create_task(making), None
        else:
            self._may_go.set()
        stopping = asyncio.create_task(self._has_stopped.wait())
        await asyncio.wait([stopping, self._task], return_when=asyncio.FIRST_COMPLETED, timeout=20)
        stopping.cancel()
        self._has_stopped.clear()
        if self._task.done():
            self._task.result()

    async def die(self):
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _freeze(self):
        seq = (await self._fleet.js.stream_info(self._fleet.subjects.stream)).state.last_seq
        return Frozen(seq, msgspec.json.encode([self._checkpoints.manifest is not None, seq]))

    async def _stop(self, step):
        self.last_step = step
        self._has_stopped.set()
        await self._may_go.wait()
        self._may_go.clear()


class Watcher:
    """Looks after each step; `history` is of manifests."""

    def __init__(self, fleet, client):
        self._fleet = fleet
        self._keys = ManifestKey(client, fleet.subjects.state_bucket)
        self._objects = SnapshotObjects(client, fleet.subjects.snapshot_bucket)
        self.history = []

    async def look(self):
        manifest = (await self._keys.read()).manifest
        if manifest is None:
            return
        if not self.history or self.history[-1] != manifest:
            assert not self.history or manifest.is_above(self.history[-1])
            self.history.append(manifest)
        if manifest.object is not None:
            snapshot = await self._objects.get(manifest.object)
            assert msgspec.json.decode(snapshot)[1] == manifest.seq
        state = (await self._fleet.js.stream_info(self._fleet.subjects.stream)).state
        assert state.first_seq <= manifest.seq + 1

    async def names(self):
        return await self._objects.names()


async def race(fleet, rng):
    client = await fleet.connection.connected()
    makers, watcher = [Maker(fleet, "a"), Maker(fleet, "b")], Watcher(fleet, client)
    for _ in range(40):
        what = rng.random()
        number = rng.randrange(len(makers))
        if what < 0.75:
            await makers[number].advance(client)
        elif what < 0.95:
            await fleet.js.publish(fleet.subjects.events(ANYBODY), b"x")
        elif what < 0.98:
            await makers[number].die()
        else:
            await fleet.checkpoints("c").reset()
        await watcher.look()
    for maker in makers:
        await maker.die()
    await fleet.js.publish(fleet.subjects.events(ANYBODY), b"x")
    last = Maker(fleet, "last")
    while last.last_step != "collect":
        await last.advance(client)
        await watcher.look()
    await last.die()
    assert await watcher.names() == [watcher.history[-1].object]
    return len(watcher.history)


async def test_no_order_of_steps_does_harm(server, fleet):
    num_rises = 0
    for seed in range(NUM_RUNS):
        try:
            num_rises += await fleet.run(race(fleet, random.Random(seed)))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert num_rises > 2 * NUM_RUNS
