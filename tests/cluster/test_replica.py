"""A Replica on a real server, without a router's HTTP service: what must not end it."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from kvplug import Rank, Router, RouterConfig
from kvplug.cluster.checkpoints import Checkpoints
from kvplug.cluster.objects import SnapshotObjects
from kvplug.cluster.parts import Part
from kvplug.cluster.replica import Replica, ReplicaSettings
from kvplug.cluster.state_key import StateKey
from kvplug.errors import TransportError
from kvplug.ingest import trust
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from kvplug.nats.settings import NatsSettings
from kvplug.topics import Topic
from kvplug.transports.nats_messages import topic_of
from tests.cluster.snapshots import ANYBODY, frozen
from tests.ingest.life_publisher import LifePublisher
from tests.waiting import until

RANK = Rank(ANYBODY.worker)


class Following:
    """A router with one worker, whose events come over NATS; replica, thread, follower."""

    def __init__(self, url, fleet, **settings):
        self.router = Router(RouterConfig(block_size=4))
        self.router.add_worker(RANK.worker)
        nats = NatsSettings(servers=(url,), fleet=fleet.subjects.fleet)
        self.replica = Replica(self.router, ReplicaSettings(nats=nats, router_id="a", **settings))
        self.thread = EventThread(self.replica.transports)

    async def restore(self):
        self.thread.start()
        self.replica.start(self.thread)
        assert await self.replica.prepared()
        self.replica.restore()

    async def begin(self):
        await self.restore()
        self.follow()

    async def begin_late(self, *heard):
        """A follower has heard something before the servers are there."""
        self.thread.start()
        self.replica.start(self.thread)
        self.follow(*heard)

    def follow(self, *heard):
        self.follower = Follower(self.router, RANK)
        self.replica.resume(self.follower)
        self.thread.follow_topic(self.follower, Topic.parse(topic_of(ANYBODY)))
        if heard:
            self.thread.call(lambda: self.follower.receive(list(heard)))
        self.replica.follow(lambda: [self.follower])

    @property
    def held(self):
        with self.router.locked():
            return sorted(self.router.index_of(RANK).engine_hashes_of(RANK).tolist())

    async def stop(self):
        self.thread.stop()
        await self.replica.stop()


@pytest.fixture
async def following(server, fleet):
    made = Following(server.url, fleet, snapshot_threshold=1)
    yield made
    await made.stop()


@pytest.fixture
async def snapshot_of(server, fleet):
    """Has a snapshot made of what a publisher has said; returns its stream sequence."""

    async def make(*messages):
        made = Following(server.url, fleet)
        await made.begin()
        seqs = [await fleet.publish(1, each.payload) for each in messages]
        replica = made.replica
        await until(lambda: replica.status.applied_seq == seqs[-1], "all is applied")
        await fleet.run(fleet.checkpoints("z").make(replica._freeze))
        await made.stop()
        return seqs[-1]

    return make


@asynccontextmanager
async def beating(fleet, publisher):
    """It gives signs of life, often."""
    client, subject = await fleet.client(), fleet.subjects.beats(ANYBODY)

    async def beat():
        while True:
            await fleet.run(client.publish(subject, publisher.hello().payload))
            await asyncio.sleep(0.05)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def is_exact(following, publisher):
    await until(
        lambda: following.follower.trust is trust.EXACT and following.held == publisher.held,
        "all is known",
    )


async def damage_the_manifest(fleet):
    key = StateKey(await fleet.client(), fleet.subjects.state_bucket, "manifest")
    _, revision = await fleet.run(key.read())
    await fleet.run(key.replace(b"{no JSON", revision))


async def test_a_reset_replaces_a_damaged_manifest(fleet):
    made, resetting = fleet.checkpoints(), fleet.checkpoints("b")
    await fleet.run(made.make(frozen(await fleet.publish(3), b"data")))
    generation = made.manifest.generation
    await damage_the_manifest(fleet)
    manifest = await fleet.run(resetting.reset())
    assert manifest.reset_generation == manifest.generation > generation, "living ones take it up"
    restored = await fleet.run(fleet.checkpoints("c").restore())
    assert (restored.snapshot, restored.reason) == (None, None)
    client = await fleet.client()
    objects = SnapshotObjects(client, fleet.subjects.snapshot_bucket)
    assert await fleet.run(objects.names()) == []


async def test_a_snapshot_that_fails_is_named_and_followed_by_others(fleet, following, monkeypatch):
    monkeypatch.setattr("kvplug.cluster.replica.MIN_SNAPSHOT_INTERVAL_S", 0.0)
    monkeypatch.setattr("kvplug.cluster.replica._LOOK_S", 0.05)
    monkeypatch.setattr("kvplug.cluster.replica.freeze", lambda *_: 1 // 0)
    publisher = LifePublisher()
    await following.begin()
    for message in (publisher.hello(), publisher.store(3), publisher.store(1)):
        await fleet.publish(1, message.payload)
    status = lambda: following.replica.status  # noqa: E731
    await until(lambda: Part.SNAPSHOT in status().problems, "it is named")
    assert "ZeroDivisionError" in status().problems[Part.SNAPSHOT]
    monkeypatch.undo()
    monkeypatch.setattr("kvplug.cluster.replica._LOOK_S", 0.05)
    await until(lambda: status().num_snapshots, "the next one succeeds")


async def test_a_look_that_fails_is_no_problem_any_more_once_one_succeeds(
    fleet, following, monkeypatch
):
    monkeypatch.setattr("kvplug.cluster.replica._LOOK_S", 0.05)
    is_due = Checkpoints.is_due

    async def failing(*_):
        raise TransportError("no leader")

    monkeypatch.setattr(Checkpoints, "is_due", failing)
    await following.begin()
    status = lambda: following.replica.status  # noqa: E731
    await until(lambda: Part.SNAPSHOT in status().problems, "it is named")
    monkeypatch.setattr(Checkpoints, "is_due", is_due)
    await until(lambda: Part.SNAPSHOT not in status().problems, "it is over")
    assert status().num_snapshots == 0


async def test_a_damaged_manifest_leaves_events_followed_and_is_named(fleet, following):
    publisher = LifePublisher()
    await damage_the_manifest(fleet)
    await following.begin()
    for message in (publisher.hello(), publisher.store(3)):
        await fleet.publish(1, message.payload)
    await until(lambda: following.follower.num_messages, "the stream is read")
    async with beating(fleet, publisher):
        await is_exact(following, publisher)
    assert "expected a manifest" in following.replica.status.problems[Part.RESTORE]


async def test_a_late_snapshot_gives_no_blocks_to_who_has_spoken_meanwhile(
    fleet, following, snapshot_of
):
    former, restarted = LifePublisher(), LifePublisher()
    await snapshot_of(former.hello(), former.store(3))
    await following.begin_late(restarted.hello())
    await until(lambda: following.replica.status.restored_bytes, "the snapshot is there")
    async with beating(fleet, restarted):
        await until(lambda: following.replica.status.num_consumers, "the stream is read")
        await is_exact(following, restarted)


async def test_blocks_of_who_is_not_followed_are_not_those_of_who_is_later(
    fleet, following, snapshot_of
):
    publisher = LifePublisher()
    await snapshot_of(publisher.hello(), publisher.store(3))
    await following.restore()
    assert following.held == publisher.held
    following.replica.follow(list)
    await until(lambda: not following.held, "they are forgotten")
    position = Follower(following.router, RANK)
    following.replica.resume(position)
    assert position.position() is None


async def test_messages_that_the_stream_has_no_more_are_not_waited_for(fleet, following):
    seq = await fleet.publish(3)
    await fleet.run(fleet.js.purge_stream(fleet.subjects.stream))
    await following.begin()
    await until(lambda: following.replica.status.is_ready, "it is ready")
    status = following.replica.status
    assert (status.stream.last_seq, status.lag_messages, status.lag_s) == (seq, 0, 0.0)


async def test_one_that_was_not_started_is_stopped_at_once(server, fleet):
    made = Following(server.url, fleet)
    async with asyncio.timeout(1):
        await made.stop()


async def test_buckets_that_are_deleted_are_made_again(fleet, following, monkeypatch):
    monkeypatch.setattr("kvplug.cluster.replica.MIN_SNAPSHOT_INTERVAL_S", 0.0)
    monkeypatch.setattr("kvplug.cluster.replica._LOOK_S", 0.05)
    await following.begin()
    for bucket in (f"KV_{fleet.subjects.state_bucket}", f"OBJ_{fleet.subjects.snapshot_bucket}"):
        await fleet.run(fleet.js.delete_stream(bucket))
    publisher = LifePublisher()
    for message in (publisher.hello(), publisher.store(3), publisher.store(1)):
        await fleet.publish(1, message.payload)
    await until(lambda: following.replica.status.num_snapshots, "a snapshot is made")
