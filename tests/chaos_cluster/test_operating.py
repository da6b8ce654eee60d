"""What a run does to streams and buckets: the server has it, and readers see the damage."""

import asyncio

import nats
import pytest
from nats.js.api import ObjectMeta
from nats.js.errors import NotFoundError

from kvplug.nats.client import connect
from kvplug.nats.subjects import Subjects
from tests.chaos_cluster.operating import FLEET, Operator
from tests.nats_servers import nats_servers

SUBJECTS = Subjects(FLEET)
SNAPSHOT = bytes(range(256)) * 2000


@pytest.fixture
def url():
    with nats_servers() as (node,):
        asyncio.run(_fill(node.url))
        yield node.url


async def _fill(url):
    async with await connect(url) as client:
        js = client.jetstream()
        await js.add_stream(name=SUBJECTS.stream, subjects=[SUBJECTS.all_events], max_age=3600)
        for number in range(3):
            await js.publish(f"kvplug.{FLEET}.kv.a.0", b"%d" % number)
        await js.pull_subscribe("", "router-a", SUBJECTS.stream)
        bucket = await js.create_key_value(bucket=SUBJECTS.state_bucket)
        await bucket.put("lease", b"l")
        await bucket.put("manifest", b"m")
        objects = await js.create_object_store(SUBJECTS.snapshot_bucket)
        await objects.put("1-1-a", SNAPSHOT, meta=ObjectMeta(name="1-1-a"))


async def _snapshot(url):
    async with await connect(url) as client:
        objects = await client.jetstream().object_store(SUBJECTS.snapshot_bucket)
        return (await asyncio.wait_for(objects.get("1-1-a"), 2)).data


def test_the_stream(url):
    operator = Operator([url])
    assert operator.stream() == (1, 3, 3)
    operator.keep_for(2)
    operator.purge()
    assert operator.stream()[1:] == (3, 0)
    assert set(operator.consumers()) == {"router-a"}
    operator.delete_consumers()
    assert not operator.consumers()
    operator.delete_stream()
    with pytest.raises(NotFoundError):
        operator.stream()


def test_the_manifest(url):
    operator = Operator([url])
    assert operator.manifest() == b"m"
    operator.delete_manifest()
    assert operator.manifest() is None


def test_changed_bytes_fail_the_digest(url):
    assert asyncio.run(_snapshot(url)) == SNAPSHOT
    Operator([url]).change_bytes()
    with pytest.raises(nats.errors.Error):
        asyncio.run(_snapshot(url))


def test_a_chunk_that_is_gone_never_comes(url):
    Operator([url]).delete_chunk()
    with pytest.raises((TimeoutError, nats.errors.Error)):
        asyncio.run(_snapshot(url))
