"""Objects of NATS' object store on a real server: whole, or refused."""

import os

import msgspec
import pytest

from kvplug.cluster.objects import CHUNK_NBYTES, BrokenObjectError, SnapshotObjects
from kvplug.errors import TransportError


@pytest.fixture
async def objects(fleet):
    return SnapshotObjects(await fleet.client(), fleet.subjects.snapshot_bucket, timeout_s=2)


def stream_of(fleet):
    return f"OBJ_{fleet.subjects.snapshot_bucket}"


@pytest.mark.parametrize("size", [0, 1, CHUNK_NBYTES, 40 * CHUNK_NBYTES + 7])
async def test_what_is_got_is_what_was_put(fleet, objects, size):
    data = os.urandom(size)
    await fleet.run(objects.put("a", memoryview(data)))
    assert await fleet.run(objects.get("a")) == data
    assert await fleet.run(objects.names()) == ["a"]


async def test_other_clients_read_it(fleet, objects):
    data = os.urandom(CHUNK_NBYTES + 1)
    await fleet.run(objects.put("a", memoryview(data)))
    store = await fleet.run(fleet.js.object_store(fleet.subjects.snapshot_bucket))
    assert (await fleet.run(store.get("a"))).data == data


async def test_nothing_is_left_of_what_was_deleted(fleet, objects):
    for name in ("a", "b"):
        await fleet.run(objects.put(name, memoryview(b"x")))
    await fleet.run(objects.delete("a"))
    await fleet.run(objects.delete("a"))
    assert await fleet.run(objects.names()) == ["b"]
    info = await fleet.run(fleet.js.stream_info(stream_of(fleet)))
    assert info.state.messages == 2
    with pytest.raises(BrokenObjectError, match="no snapshot a any more"):
        await fleet.run(objects.get("a"))


@pytest.mark.parametrize("which", [0, 1, 2])
async def test_a_missing_chunk_is_an_error(fleet, objects, which):
    await fleet.run(objects.put("a", memoryview(os.urandom(3 * CHUNK_NBYTES))))
    await fleet.run(fleet.js.delete_msg(stream_of(fleet), 1 + which))
    with pytest.raises(BrokenObjectError, match="damaged"):
        await fleet.run(objects.get("a"))


async def test_other_bytes_are_an_error(fleet, objects):
    await fleet.run(objects.put("a", memoryview(b"abc")))
    first = await fleet.run(fleet.js.get_msg(stream_of(fleet), 1))
    await fleet.run(fleet.js.delete_msg(stream_of(fleet), 1))
    await fleet.run(fleet.js.publish(first.subject, b"xyz"))
    with pytest.raises(BrokenObjectError, match="damaged"):
        await fleet.run(objects.get("a"))


async def test_uploads_that_never_ended_are_deleted(fleet, objects):
    await fleet.run(objects.put("a", memoryview(b"abc")))
    bucket = fleet.subjects.snapshot_bucket
    await fleet.run(fleet.js.publish(f"$O.{bucket}.C.never", b"x"))
    await fleet.run(objects.put("b", memoryview(b"abc")))
    assert await fleet.run(objects.delete_broken(60.0, than="b")) == 0
    assert await fleet.run(objects.delete_broken(0.0, than="b")) == 1
    assert await fleet.run(objects.get("a")) == await fleet.run(objects.get("b")) == b"abc"
    assert await fleet.run(objects.delete_broken(0.0, than="none")) == 0


async def test_a_bucket_that_is_not_there(fleet):
    nowhere = SnapshotObjects(await fleet.client(), "nowhere", timeout_s=2)
    with pytest.raises(TransportError, match="cannot put the snapshot a"):
        await fleet.run(nowhere.put("a", memoryview(b"x")))
    with pytest.raises(TransportError, match="cannot list the snapshots"):
        await fleet.run(nowhere.names())


@pytest.mark.parametrize("size", [-1, 10**15])
async def test_no_room_is_made_for_a_size_that_cannot_be(fleet, objects, size):
    await fleet.run(objects.put("a", memoryview(b"abc")))
    found = (await fleet.run(objects._find("a"))).stored
    meta = msgspec.json.encode(msgspec.structs.replace(found, size=size))
    await fleet.run(fleet.js.publish(objects._meta_subject("a"), meta))
    with pytest.raises(BrokenObjectError, match="damaged"):
        await fleet.run(objects.get("a"))
