"""The stream and the buckets on a real server: made by whoever comes first, used as found."""

import asyncio
import logging

import pytest

from kvplug.cluster.streams import Streams, StreamSettings
from kvplug.errors import TransportError
from kvplug.nats.connection import NatsConnection
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import PublisherName, Subjects
from tests.nats_servers import nats_servers

SUBJECTS = Subjects("f")


@pytest.fixture(scope="module")
def node():
    with nats_servers() as [node]:
        yield node


@pytest.fixture
async def connection(node):
    connection = NatsConnection(NatsSettings(servers=(node.url,), fleet="f"), "test")
    connection.start()
    yield connection
    await within(connection, empty(connection))
    connection.stop()


def within(connection, coroutine):
    return asyncio.wrap_future(connection.submit(coroutine))


async def empty(connection):
    js = (await connection.connected()).jetstream()
    for info in await js.streams_info():
        await js.delete_stream(info.config.name)


async def test_what_is_missing_is_made_and_then_found(connection):
    async def run():
        streams = Streams(connection, SUBJECTS, StreamSettings(max_bytes=2**20))
        assert await streams.state() is None
        made = await streams.ensure()
        assert (made.last_seq, made.num_messages, made.max_age_s) == (0, 0, 3600)
        js = (await connection.connected()).jetstream()
        await js.publish(SUBJECTS.events(PublisherName("http://a:1", 0)), b"x")
        other = Streams(connection, SUBJECTS, StreamSettings(max_bytes=2**20))
        found = await other.ensure()
        assert (found.created, found.last_seq, other.differences) == (made.created, 1, ())
        assert await other.mark() == 2
        await (await js.key_value(SUBJECTS.state_bucket)).create("lease", b"", msg_ttl=1)
        await (await js.object_store(SUBJECTS.snapshot_bucket)).put("a", b"x")
        await js.delete_stream(SUBJECTS.stream)
        assert (await streams.ensure()).created != made.created

    await within(connection, run())


async def test_several_routers_may_make_them_at_once(connection):
    async def run():
        streams = [Streams(connection, SUBJECTS, StreamSettings()) for _ in range(4)]
        states = await asyncio.gather(*(each.ensure() for each in streams))
        assert len({state.created for state in states}) == 1

    await within(connection, run())


async def test_other_settings_are_named_and_used(connection, caplog):
    async def run():
        js = (await connection.connected()).jetstream()
        await js.add_stream(name=SUBJECTS.stream, subjects=[SUBJECTS.all_events], max_age=60)
        streams = Streams(connection, SUBJECTS, StreamSettings(max_bytes=2**20))
        assert (await streams.ensure()).max_age_s == 60
        assert "max_age: expected 3600.0, seen 60.0" in streams.differences
        assert "max_bytes: expected 1048576, seen -1" in streams.differences
        await streams.ensure()

    with caplog.at_level(logging.INFO):
        await within(connection, run())
    assert len([each for each in caplog.records if "is used as it is" in each.message]) == 1


async def test_a_stream_of_something_else_is_refused(connection):
    async def run():
        js = (await connection.connected()).jetstream()
        await js.add_stream(name=SUBJECTS.stream, subjects=["orders"])
        with pytest.raises(TransportError, match=r"expected the subjects .* name another fleet"):
            await Streams(connection, SUBJECTS, StreamSettings()).ensure()

    await within(connection, run())


async def test_a_limit_of_the_server_is_named(connection):
    async def run():
        with pytest.raises(TransportError, match=r"make stream kvplug-f: .*insufficient"):
            await Streams(connection, SUBJECTS, StreamSettings(max_bytes=2**50)).ensure()

    await within(connection, run())


NOT_ALLOWED = """
authorization {{ users: [ {{ user: r, password: p, permissions: {{
  publish: {{ allow: [{allowed}] }}, subscribe: {{ allow: ["_INBOX.test.>"] }} }} }} ] }}
"""


async def test_who_may_not_make_them_uses_what_is_there(monkeypatch):
    monkeypatch.setattr("kvplug.cluster.streams._TIMEOUT_S", 0.5)
    names = [SUBJECTS.stream, f"KV_{SUBJECTS.state_bucket}", f"OBJ_{SUBJECTS.snapshot_bucket}"]
    allowed = ", ".join(f'"$JS.API.STREAM.INFO.{name}"' for name in names)
    with nats_servers() as [node]:
        admin = NatsConnection(NatsSettings(servers=(node.url,), fleet="f"), "admin")
        admin.start()
        settings = StreamSettings()
        await within(admin, Streams(admin, SUBJECTS, settings).ensure())
        admin.stop()
        node.stop()
        node.config.write_text(node.config.read_text() + NOT_ALLOWED.format(allowed=allowed))
        node.start()
        connection = NatsConnection(NatsSettings(servers=(node.url,), fleet="f"), "test")
        connection._options |= {"user": "r", "password": "p"}
        connection.start()
        try:
            await within(connection, Streams(connection, SUBJECTS, settings).ensure())
            with pytest.raises(TransportError, match="this router no permission"):
                await within(connection, Streams(connection, Subjects("g"), settings).ensure())
        finally:
            connection.stop()


async def test_without_jetstream_it_is_said():
    with nats_servers() as [node]:
        node.stop()
        lines = node.config.read_text().splitlines()
        node.config.write_text("\n".join(each for each in lines if "jetstream" not in each))
        node.start(wait=False)
        connection = NatsConnection(NatsSettings(servers=(node.url,), fleet="f"), "test")
        connection.start()
        try:
            with pytest.raises(TransportError, match="have no JetStream"):
                await within(connection, Streams(connection, SUBJECTS, StreamSettings()).ensure())
        finally:
            connection.stop()
