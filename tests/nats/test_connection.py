"""The connection: a server that comes later, that is killed and comes back; where it must not."""

import asyncio
import gc
import os
import signal
from contextlib import asynccontextmanager

import pytest

from kvplug.errors import ConfigError, TransportError
from kvplug.nats.connection import NatsConnection
from kvplug.nats.server import EmbeddedServer
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import PublisherName, Subjects, publisher_of
from tests.nats_servers import nats_servers
from tests.waiting import until


async def test_it_comes_back_after_a_killed_server():
    with nats_servers() as [node]:
        node.kill()
        connection = NatsConnection(NatsSettings(servers=(node.url,)), "test")
        changes = []
        connection.on_change(changes.append)
        connection.start()
        try:
            node.start()
            await until(lambda: connection.is_connected, "it is connected")
            node.kill()
            await until(lambda: not connection.is_connected, "it is lost")
            node.start()
            await until(lambda: connection.is_connected, "it is back")
            assert changes == [True, False, True]
            assert connection.num_reconnects == 1
            answer = asyncio.wrap_future(connection.submit(echoed(connection, b"hello")))
            assert await answer == b"hello"
        finally:
            connection.stop()


async def test_a_failed_attempt_leaves_no_socket():
    """pytest fails on a socket that only the garbage collector closes."""
    with nats_servers() as [node]:
        connection = NatsConnection(NatsSettings(servers=(node.url,)), "test")
        connection.start()
        try:
            await until(lambda: connection.is_connected, "it is connected")
            node.kill()
            async with asyncio.timeout(20), refusing(node.port) as attempts:
                await until(lambda: len(attempts) >= 3, "it was tried three times")
            node.start()
            await until(lambda: connection.is_connected, "it is back")
            gc.collect()
        finally:
            connection.stop()


@asynccontextmanager
async def refusing(port):
    """A server that is not NATS, in place of one that was; yields the connections it was given."""
    attempts = []

    async def answer(reader, writer):
        attempts.append(writer)
        writer.write(b"SSH-2.0\r\n")
        await reader.read()  # until the other end closes
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port)
    async with server:
        yield attempts


async def echoed(connection, payload):
    client = await connection.connected()
    heard = asyncio.get_running_loop().create_future()

    async def hear(message):
        heard.set_result(message.data)

    inbox = client.new_inbox()
    assert inbox.startswith("_INBOX.test.")
    await client.subscribe(inbox, cb=hear)
    await client.publish(inbox, payload)
    return await asyncio.wait_for(heard, 10)


async def test_an_embedded_server_keeps_its_folder_and_ends(tmp_path):
    server = EmbeddedServer(tmp_path / "nats", port=0)
    for _ in range(2):
        server.start()
        process_id = server.process_id
        connection = NatsConnection(NatsSettings(servers=(server.url,)), "test")
        connection.start()
        await until(lambda connection=connection: connection.is_connected, "it is connected")
        connection.stop()
        server.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


async def test_an_embedded_server_that_cannot_start_again_is_tried_until_it_can(tmp_path, caplog):
    server = EmbeddedServer(tmp_path / "nats", port=0)
    server.start()
    keeping = asyncio.create_task(server.keep())
    try:
        binary, server._binary = server._binary, tmp_path / "removed"
        launched, tries = server._launched, []
        server._launched = lambda: (tries.append("one"), launched())[1]
        os.kill(server.process_id, signal.SIGKILL)
        await until(lambda: len(tries) == 3, "it is tried again and again")
        assert server.num_restarts == 0
        server._binary = binary
        await until(lambda: server.num_restarts == 1, "it is back")
        assert caplog.text.count("cannot start nats-server") == 1
    finally:
        keeping.cancel()
        server.stop()


def test_a_folder_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TransportError, match=r"files in .*/file/nats: expected a folder"):
        EmbeddedServer(tmp_path / "file" / "nats", port=0).start()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"servers": ()}, "no NATS server is named"),
        ({"servers": ("http://a:1",)}, "'http://a:1' is no NATS URL"),
        ({"servers": ("nats://me:secret@a:1",)}, "may not name a user"),
        ({"servers": ("nats://a:1",), "fleet": "a.b"}, "a fleet's name has"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, expected):
    with pytest.raises(ConfigError, match=expected) as refused:
        NatsSettings(**settings)
    assert "secret" not in str(refused.value)


def test_variables_name_servers_and_files(tmp_path):
    seed = tmp_path / "seed"
    seed.write_text("SU")
    seed.chmod(0o640)
    variables = {"KVPLUG_NATS": "nats://a:1, nats://b:2", "KVPLUG_NATS_NKEY_FILE": str(seed)}
    settings = NatsSettings.from_variables(variables)
    assert settings.servers == ("nats://a:1", "nats://b:2")
    assert settings.nkey_file == seed
    assert NatsSettings.from_variables({}) is None
    seed.chmod(0o644)
    with pytest.raises(ConfigError, match="everybody can read it"):
        NatsSettings.from_variables(variables)
    with pytest.raises(ConfigError, match="KVPLUG_NATS_FLEET needs KVPLUG_NATS"):
        NatsSettings.from_variables({"KVPLUG_NATS_FLEET": "a"})


@pytest.mark.parametrize("worker", ["http://10.0.0.1:8000", "pod-1", "a b.*>~/é", "x"])
def test_any_worker_is_one_token(worker):
    publisher, subjects = PublisherName(worker, 3), Subjects("default")
    for subject in (subjects.events(publisher), subjects.asks(publisher)):
        assert subject.count(".") == 4
        assert not set(" *>") & set(subject)
        assert publisher_of(subject) == publisher
    assert PublisherName.parse(str(publisher)) == publisher


@pytest.mark.parametrize("subject", ["kvplug.a.kv.b", "x.a.kv.b.0", "kvplug.a.kv.b.x", ""])
def test_other_subjects_are_nobodys(subject):
    assert publisher_of(subject) is None
