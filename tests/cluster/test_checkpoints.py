"""Snapshots of a fleet on a real server: when they are made, in which order, what is removed."""

import asyncio

import pytest
from nats.js import api

from kvplug.cluster.checkpoints import STEPS
from kvplug.cluster.lease import Lease
from kvplug.cluster.manifest import ManifestKey
from kvplug.cluster.objects import SnapshotObjects
from kvplug.cluster.state_key import StateKey
from kvplug.cluster.streams import Streams, StreamSettings
from tests.cluster.snapshots import frozen
from tests.waiting import until

DATA = b"a fleet" * 1000


async def manifest_of(fleet):
    keys = ManifestKey(await fleet.client(), fleet.subjects.state_bucket)
    return (await fleet.run(keys.read())).manifest


async def objects_of(fleet):
    return SnapshotObjects(await fleet.client(), fleet.subjects.snapshot_bucket, timeout_s=1)


async def test_a_key_is_replaced_by_who_has_seen_it(fleet):
    key = StateKey(await fleet.client(), fleet.subjects.state_bucket, "k")
    assert await fleet.run(key.read()) == (None, 0)
    first = await fleet.run(key.replace(b"1", 0))
    assert await fleet.run(key.replace(b"2", 0)) is None
    second = await fleet.run(key.replace(b"2", first))
    assert await fleet.run(key.read()) == (b"2", second)
    assert not await fleet.run(key.delete(first))
    assert await fleet.run(key.delete(second))
    value, revision = await fleet.run(key.read())
    assert value is None
    assert await fleet.run(key.replace(b"3", revision))


async def test_a_lease_ends_with_its_holder_and_is_renewed_by_it(fleet):
    client, bucket = await fleet.client(), fleet.subjects.state_bucket
    mine, other = (Lease(client, bucket, holder, 1) for holder in "ab")

    async def hold_and_look():
        async with mine.held() as is_mine:
            assert is_mine
            for _ in range(5):  # for longer than it lasts by itself
                await asyncio.sleep(0.3)
                async with other.held() as is_others:
                    assert not is_others
        async with other.held() as is_others:
            assert is_others

    await fleet.run(hold_and_look())
    key = StateKey(client, bucket, "lease")
    _, revision = await fleet.run(key.read())
    await fleet.run(key.replace(b"of one that died", revision, 1))
    free = False
    while not free:
        free = await fleet.run(mine.is_free())


async def test_a_fleet_without_a_snapshot_begins_with_the_stream(fleet):
    restored = await fleet.run(fleet.checkpoints().restore())
    assert restored == (None, None, 0, None)


async def test_a_snapshot_comes_into_force_and_the_stream_is_purged(fleet):
    made = fleet.checkpoints()
    seq = await fleet.publish(5)
    manifest = await fleet.run(made.make(frozen(seq - 1, DATA)))
    assert (manifest.generation, manifest.seq, manifest.size) == (0, seq - 1, len(DATA))
    state = await fleet.stream()
    assert (state.first_seq, state.messages) == (seq, 1)
    restored = await fleet.run(fleet.checkpoints("b").restore())
    assert (restored.manifest, restored.snapshot, restored.seq) == (manifest, DATA, seq - 1)


async def test_only_the_last_object_stays(fleet):
    made = fleet.checkpoints()
    for number in range(3):
        seq = await fleet.publish(1)
        manifest = await fleet.run(made.make(frozen(seq, DATA + bytes([number]))))
    assert await fleet.run((await objects_of(fleet)).names()) == [manifest.object]
    restored = await fleet.run(fleet.checkpoints("b").restore())
    assert restored.snapshot == DATA + bytes([2])


async def test_the_manifest_only_rises(fleet):
    made = fleet.checkpoints()
    seq = await fleet.publish(3)
    await fleet.run(made.make(frozen(seq - 1)))
    assert await fleet.run(made.make(frozen(seq - 1))) is None
    assert await fleet.run(made.make(frozen(seq - 2))) is None
    assert made.num_overtaken == 2
    assert (await manifest_of(fleet)).seq == seq - 1


async def test_a_number_that_the_stream_does_not_have_is_refused(fleet):
    made = fleet.checkpoints()
    seq = await fleet.publish(3)
    assert await fleet.run(made.make(frozen(seq + 1))) is None
    assert await manifest_of(fleet) is None
    assert await fleet.run(made.make(frozen(seq)))


async def test_one_that_was_overtaken_leaves_no_object(fleet):
    seq = await fleet.publish(3)
    fast = fleet.checkpoints("fast")

    async def overtake(step):
        if step == "upload":
            await fast._make(await fleet.connection.connected(), frozen(seq))

    slow = fleet.checkpoints("slow", on_step=overtake)
    assert await fleet.run(slow.make(frozen(seq - 1))) is None
    manifest = await manifest_of(fleet)
    assert manifest.seq == seq
    assert await fleet.run((await objects_of(fleet)).names()) == [manifest.object]


async def consumer_at(fleet, name, num_acked):
    """A durable consumer that was given all messages, of which so many are acknowledged."""
    config = api.ConsumerConfig(durable_name=name, ack_policy=api.AckPolicy.ALL)
    await fleet.run(fleet.js.add_consumer(fleet.subjects.stream, config))
    bind = fleet.js.pull_subscribe_bind(consumer=name, stream=fleet.subjects.stream)
    subscription = await fleet.run(bind)
    messages = await fleet.run(subscription.fetch((await fleet.stream()).messages))
    await fleet.run(messages[num_acked - 1].ack_sync())
    return subscription


async def test_a_purge_keeps_what_a_replica_has_not_acknowledged(fleet):
    seq = await fleet.publish(10)
    await consumer_at(fleet, "router-b", 4)
    await consumer_at(fleet, "somebody", 2)
    await fleet.run(fleet.checkpoints().make(frozen(seq)))
    assert (await fleet.stream()).first_seq == 5


async def test_a_purge_does_not_wait_for_a_replica_that_is_gone(fleet):
    seq = await fleet.publish(10)
    subscription = await consumer_at(fleet, "router-b", 4)
    waiting = asyncio.ensure_future(fleet.run(subscription.fetch(1, timeout=20)))
    consumer = fleet.js.consumer_info(fleet.subjects.stream, "router-b")
    while not (await fleet.run(consumer)).num_waiting:
        consumer = fleet.js.consumer_info(fleet.subjects.stream, "router-b")
    made = fleet.checkpoints(live_s=0.0)
    await fleet.run(made.make(frozen(seq - 1)))
    assert (await fleet.stream()).first_seq == 5  # it waits for messages, so it lives
    await fleet.publish(1)
    await waiting
    await fleet.run(made.make(frozen(seq)))
    assert (await fleet.stream()).first_seq == seq + 1


async def test_a_new_consumer_keeps_what_it_begins_with(fleet):
    seq = await fleet.publish(10)
    start = api.DeliverPolicy.BY_START_SEQUENCE
    config = api.ConsumerConfig(durable_name="router-b", deliver_policy=start, opt_start_seq=7)
    await fleet.run(fleet.js.add_consumer(fleet.subjects.stream, config))
    await fleet.run(fleet.checkpoints().make(frozen(seq)))
    assert (await fleet.stream()).first_seq == 7


async def test_many_messages_of_many_bytes_make_one_due(fleet):
    made = fleet.checkpoints(threshold=10)
    await fleet.publish(10)
    assert not await fleet.run(made.is_due())
    seq = await fleet.publish(1)
    assert await fleet.run(made.is_due(seq))
    assert not await fleet.run(made.is_due(seq - 1))  # this one lags
    state = await fleet.stream()
    await fleet.run(made.make(frozen(seq, bytes(2 * state.bytes))))
    assert not await fleet.run(made.is_due())
    await fleet.publish(11)
    assert not await fleet.run(made.is_due())  # a snapshot would be larger than they are
    await fleet.publish(15)
    assert await fleet.run(made.is_due())


async def test_the_last_one_must_be_some_time_ago(fleet):
    made = fleet.checkpoints(threshold=1, min_interval_s=60.0)
    seq = await fleet.publish(3)
    assert await fleet.run(made.is_due())
    await fleet.run(made.make(frozen(seq)))
    await fleet.publish(3)
    assert not await fleet.run(made.is_due())
    restarted = fleet.checkpoints(threshold=1, min_interval_s=60.0)
    await fleet.run(restarted.restore())
    assert not await fleet.run(restarted.is_due())
    assert await fleet.run(fleet.checkpoints(threshold=1).is_due())


async def test_a_quiet_fleet_has_one_before_its_messages_end(fleet):
    made = fleet.checkpoints(retention_s=0.4)
    seq = await fleet.publish(1)
    assert not await fleet.run(made.is_due())
    is_due = False
    while not is_due:
        is_due = await fleet.run(made.is_due())
    await fleet.run(made.make(frozen(seq)))
    assert not await fleet.run(made.is_due())


async def test_none_is_due_while_another_replica_makes_one(fleet):
    seq = await fleet.publish(3)
    other = fleet.checkpoints("b", threshold=1)
    seen = []

    async def look(step):
        seen.append((step, await other.is_due()))
        if step == "lease":
            assert await other.make(frozen(seq)) is None

    made = fleet.checkpoints(threshold=1, on_step=look)
    assert await fleet.run(other.is_due())
    await fleet.run(made.make(frozen(seq)))
    assert seen == [(step, False) for step in STEPS]


async def test_a_damaged_snapshot_is_not_used(fleet, caplog):
    seq = await fleet.publish(3)
    made = fleet.checkpoints()
    manifest = await fleet.run(made.make(frozen(seq, DATA)))
    stream = f"OBJ_{fleet.subjects.snapshot_bucket}"
    await fleet.run(fleet.js.delete_msg(stream, 1))
    restored = await fleet.run(fleet.checkpoints("b").restore())
    assert restored.manifest == manifest
    assert (restored.snapshot, restored.seq) == (None, 0)
    assert "damaged" in restored.reason
    assert "engines are asked instead" in caplog.text


async def test_an_older_snapshot_is_better_than_none(fleet):
    seq = await fleet.publish(3)
    await fleet.run(fleet.checkpoints().make(frozen(seq - 1, DATA)))

    async def die(step):
        if step == "manifest":
            raise asyncio.CancelledError

    await fleet.run(fleet.checkpoints().restore())
    dying = fleet.checkpoints(on_step=die)
    with pytest.raises(asyncio.CancelledError):
        await fleet.run(dying.make(frozen(seq, b"new")))
    objects = await objects_of(fleet)
    _old, new = await fleet.run(objects.names())
    await fleet.run(objects.delete(new))
    restored = await fleet.run(fleet.checkpoints("b").restore())
    assert (restored.snapshot, restored.seq) == (DATA, 0)


async def test_a_reset_begins_a_generation_without_a_snapshot(fleet):
    seq = await fleet.publish(3)
    made, follower = fleet.checkpoints(), fleet.checkpoints("b")
    await fleet.run(made.make(frozen(seq, DATA)))
    await fleet.run(follower.restore())
    heard = []

    async def on_manifest(manifest, needs_clear):
        heard.append((manifest.generation, needs_clear))

    watching = fleet.connection.submit(follower.watch(on_manifest))
    manifest = await fleet.run(fleet.checkpoints("c").reset())
    assert (manifest.generation, manifest.seq, manifest.object) == (1, seq, None)
    await until(lambda: heard, "the other replica hears of it")
    assert heard == [(1, True)]
    assert (await fleet.stream()).messages == 0
    assert await fleet.run((await objects_of(fleet)).names()) == []
    restored = await fleet.run(fleet.checkpoints("d").restore())
    assert (restored.snapshot, restored.seq) == (None, seq)
    seq = await fleet.publish(1)
    assert await fleet.run(made.make(frozen(seq))) is None  # it follows the old generation
    after = await fleet.run(follower.make(frozen(seq, DATA)))
    assert (after.generation, after.reset_generation) == (1, 1)
    assert heard == [(1, True)]
    watching.cancel()


async def test_objects_of_a_manifest_that_is_lost_are_collected(fleet):
    seq = await fleet.publish(3)
    made = fleet.checkpoints()
    await fleet.run(made.make(frozen(seq - 1, DATA)))
    await fleet.run(fleet.js.purge_stream(f"KV_{fleet.subjects.state_bucket}"))
    restored = await fleet.run(fleet.checkpoints("b").restore())
    assert (restored.manifest, restored.seq) == (None, 0)
    await fleet.run(made.restore())
    manifest = await fleet.run(made.make(frozen(seq, DATA)))
    assert (manifest.generation, manifest.seq) == (1, seq)
    assert await fleet.run((await objects_of(fleet)).names()) == [manifest.object]


async def test_a_stream_that_was_made_anew_is_read_from_its_beginning(fleet):
    seq = await fleet.publish(3)
    made = fleet.checkpoints()
    await fleet.run(made.make(frozen(seq, DATA)))
    heard = []

    async def on_manifest(manifest, needs_clear):
        heard.append((manifest.generation, needs_clear))

    await fleet.run(fleet.js.delete_stream(fleet.subjects.stream))
    streams = Streams(fleet.connection, fleet.subjects, StreamSettings(max_bytes=2**26))
    await fleet.run(streams.ensure())
    watching = fleet.connection.submit(made.watch(on_manifest))
    restored = await fleet.run(fleet.checkpoints("b").restore())
    assert (restored.manifest.generation, restored.seq) == (1, 0)
    assert restored.snapshot == DATA  # publishers' numbers tell what is new
    await until(lambda: heard, "a living replica hears of it")
    assert heard == [(1, False)]
    seq = await fleet.publish(1)
    assert (await fleet.run(made.make(frozen(seq, b"new")))).seq == seq
    watching.cancel()
