"""Replicas that see each other on a real server, and two of one id."""

import asyncio

import msgspec
import pytest

from kvplug.cluster.presence import Presence
from kvplug.nats.connection import NatsConnection
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import Subjects
from tests.nats_servers import nats_servers
from tests.waiting import until

SUBJECTS = Subjects("f")


@pytest.fixture(scope="module")
def node():
    with nats_servers() as [node]:
        yield node


class Replica:
    def __init__(self, node, router_id, seq=0):
        self.connection = NatsConnection(NatsSettings(servers=(node.url,)), f"router-{router_id}")
        self.connection.start()
        self.presence = Presence(
            self.connection,
            SUBJECTS,
            router_id,
            lambda said: msgspec.structs.replace(said, applied_seq=seq),
        )

    async def begin(self):
        await self.do(self.presence.begin())
        self.connection.submit(self.presence.run())

    def do(self, coroutine):
        return asyncio.wrap_future(self.connection.submit(coroutine))


@pytest.fixture
async def start(node):
    replicas = []

    async def start(*given):
        replicas.append(Replica(node, *given))
        await replicas[-1].begin()
        return replicas[-1].presence

    start.replicas = replicas
    yield start
    for each in replicas:
        each.connection.stop()


async def test_replicas_see_each_other_come_and_go(start):
    one, two = await start("a", 7), await start("b", 9)
    await until(lambda: one.others() and two.others(), "both are seen")
    assert (one.others()["b"].applied_seq, two.others()["a"].applied_seq) == (9, 7)
    await start.replicas[1].do(two.end())
    await until(lambda: not one.others(), "the one that left is gone")
    assert not one.is_double


async def test_a_second_router_of_one_id_takes_another(start, caplog):
    one, two = await start("a"), await start("a")
    assert one.router_id == "a"
    assert two.router_id.startswith("a-")
    assert not two.is_double
    await until(lambda: two.router_id in one.others(), "each is seen under its own id")
    assert "give each a --router-id of its own" in caplog.text


async def test_two_that_met_late_say_so(start, caplog):
    one, two = await start("a"), await start("b")
    two.router_id = "a"
    await until(lambda: one.is_double and two.is_double, "both know it")
    assert "another router has the id a, too" in caplog.text


async def test_what_nobody_of_us_said_is_ignored(start):
    one = await start("a")
    client = await start.replicas[0].do(start.replicas[0].connection.connected())

    async def say():
        for payload in (b"", b"{}", b"[" * 5000, b'{"router_id": 1, "process": ""}'):
            await client.publish(SUBJECTS.replica("x"), payload)
        await client.flush()

    await start.replicas[0].do(say())
    two = await start("b")
    await until(lambda: list(one.others()) == ["b"] and two.others(), "only one is there")
