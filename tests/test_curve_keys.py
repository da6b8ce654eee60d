"""Keys from files, and who gets through: over real sockets."""

import logging
import os
import resource
import shutil
import time
from contextlib import suppress

import pytest
import zmq
from zmq.auth import create_certificates
from zmq.utils import z85

from kvplug.curve_keys import ClientKeys, ServerKeys
from kvplug.errors import ConfigError
from tests.waiting import until


@pytest.fixture
def keys(tmp_path):
    """make(name) -> (public, secret) key files."""

    def make(name):
        public, secret = create_certificates(tmp_path, name)
        os.chmod(secret, 0o600)
        return public, secret

    return make


@pytest.fixture
def allowed(tmp_path):
    folder = tmp_path / "clients"
    folder.mkdir()
    return folder


@pytest.fixture
def server(keys):
    return keys("server")


def allow(folder, public):
    with open(public) as file:
        (folder / os.path.basename(public)).write_text(file.read())


class Rig:
    """One protected ROUTER that counts what comes through."""

    def __init__(self, server_keys):
        self.context, self.clients = zmq.Context(), []
        self.authenticator = server_keys.authenticator(self.context)
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        server_keys.protect(self.router)

    def bind(self):
        self.router.bind("tcp://127.0.0.1:*")
        return self.router.getsockopt_string(zmq.LAST_ENDPOINT)

    def client(self, endpoint, keys=None):
        client = self.context.socket(zmq.DEALER)
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RECONNECT_IVL, 50)
        if keys is not None:
            keys.apply(client)
        client.connect(endpoint)
        with suppress(zmq.Again):  # it is refused already
            client.send(b"hello", zmq.NOBLOCK)
        self.clients.append(client)
        return client

    def gets_through(self):
        return bool(self.router.poll(0))

    def close(self):
        for each in (self.router, *self.clients):
            each.close()
        self.authenticator.stop()
        self.context.destroy(linger=0)


@pytest.fixture
def rig(request, server, allowed):
    rig = Rig(ServerKeys.from_files(server[1], allowed))
    yield rig
    rig.close()


async def test_an_allowed_client_gets_through_and_others_do_not(rig, server, keys, allowed):
    good, bad = keys("good"), keys("bad")
    allow(allowed, good[0])
    rig.authenticator.start()
    endpoint = rig.bind()
    rig.client(endpoint)  # without keys
    rig.client(endpoint, ClientKeys.from_files(bad[1], server[0]))
    await until(lambda: rig.authenticator.num_denied > 0, "one is refused by its key")
    assert not rig.gets_through()
    rig.client(endpoint, ClientKeys.from_files(good[1], server[0]))
    await until(rig.gets_through, "the allowed one comes through")


async def test_a_key_that_is_added_later_counts(rig, server, keys, allowed):
    late = keys("late")
    rig.authenticator.start()
    endpoint = rig.bind()
    rig.client(endpoint, ClientKeys.from_files(late[1], server[0]))
    await until(lambda: rig.authenticator.num_denied > 0, "it is refused")
    allow(allowed, late[0])
    rig.client(endpoint, ClientKeys.from_files(late[1], server[0]))
    await until(rig.gets_through, "it comes through")


async def test_descriptors_beyond_1023_are_answered(rig, server, keys, allowed):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"at most {hard} descriptors are allowed here")
    good = keys("good")
    allow(allowed, good[0])
    opened = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    try:
        opened.append(os.open(os.devnull, os.O_RDONLY))
        while opened[-1] < 1024:
            opened.append(os.dup(opened[0]))
        rig.authenticator.start()
        endpoint = rig.bind()
        rig.client(endpoint, ClientKeys.from_files(good[1], server[0]))
        await until(rig.gets_through, "it comes through")
        assert rig.authenticator.is_alive
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def old(path):
    """As if it had been written a minute ago: its content may be remembered."""
    os.utime(path, (time.time() - 60,) * 2)


@pytest.fixture
def clients(server, allowed):
    clients = Allowed(server, allowed)
    yield clients
    clients.context.destroy()


class Allowed:
    """Whether an authenticator allows keys, asked directly."""

    def __init__(self, server, folder):
        self.context = zmq.Context()
        self.authenticator = ServerKeys.from_files(server[1], folder).authenticator(self.context)

    def __contains__(self, key):
        public = ClientKeys.from_files(key[1], key[0]).public
        return self.authenticator._allows([z85.decode(public)])


def test_a_junk_file_does_not_keep_a_removed_key_allowed(clients, keys, allowed, caplog):
    good, gone = keys("good"), keys("gone")
    for key in (good, gone):
        allow(allowed, key[0])
    assert good in clients
    assert gone in clients
    (allowed / "junk.key").write_text("junk")
    (allowed / "gone.key").unlink()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert gone not in clients
            assert good in clients
    [named] = caplog.records
    assert "junk.key" in named.getMessage()


def test_a_file_that_is_written_after_it_was_created_counts(clients, keys, allowed):
    late = keys("late")
    (allowed / "late.key").write_text("")
    assert late not in clients
    allow(allowed, late[0])
    assert late in clients


@pytest.mark.parametrize("was_read_long_ago", [False, True])
def test_a_key_that_is_replaced_in_its_file_is_refused_at_once(
    clients, keys, allowed, monkeypatch, was_read_long_ago
):
    former, present = keys("former"), keys("present")
    file = allowed / "router.key"
    shutil.copyfile(former[0], file)
    if was_read_long_ago:
        monkeypatch.setattr("kvplug.curve_keys._TICK_NS", 0)
        old(file)
    assert former in clients
    shutil.copyfile(present[0], file)
    assert former not in clients
    assert present in clients


def test_an_unchanged_file_is_read_once(clients, keys, allowed, monkeypatch):
    good = keys("good")
    allow(allowed, good[0])
    monkeypatch.setattr("kvplug.curve_keys._TICK_NS", 0)
    assert good in clients
    with monkeypatch.context() as patched:
        patched.setattr("kvplug.curve_keys._certificate", lambda path: pytest.fail(f"read {path}"))
        clients.authenticator._clients.refresh()
    assert good in clients


def test_without_its_folder_nobody_is_allowed(clients, keys, allowed):
    good = keys("good")
    allow(allowed, good[0])
    assert good in clients
    allowed.rename(allowed.parent / "elsewhere")
    assert good not in clients


def test_what_is_no_file_allows_nobody(clients, keys, allowed):
    good = keys("good")
    allow(allowed, good[0])
    os.mkfifo(allowed / "pipe.key")
    (allowed / "folder.key").mkdir()
    (allowed / "lost.key").symlink_to(allowed / "nowhere")
    assert good in clients


async def test_without_an_authenticator_nobody_gets_through(rig, server, keys, allowed):
    good = keys("good")
    allow(allowed, good[0])
    endpoint = rig.bind()
    client = rig.client(endpoint, ClientKeys.from_files(good[1], server[0]))
    monitor = client.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
    )
    await until(lambda: monitor.poll(0), "it is refused")
    client.disable_monitor()
    monitor.close()
    assert not rig.gets_through()
    assert not rig.authenticator.is_alive


async def test_without_a_folder_the_public_key_of_the_server_is_enough(server, keys):
    rig, any_client, other = Rig(ServerKeys.from_files(server[1])), keys("any"), keys("other")
    endpoint = rig.bind()
    rig.client(endpoint, ClientKeys.from_files(any_client[1], other[0]))  # of another server
    rig.client(endpoint)
    assert not rig.router.poll(200)
    rig.client(endpoint, ClientKeys.from_files(any_client[1], server[0]))
    await until(rig.gets_through, "it comes through")
    rig.close()


def test_a_context_has_one_authenticator(rig, server):
    rig.authenticator.start()
    second = ServerKeys.from_files(server[1]).authenticator(rig.context)
    with pytest.raises(ConfigError, match="without another authenticator"):
        second.start()
    second.stop()
    rig.authenticator.stop()
    rig.authenticator.stop()
    assert not rig.authenticator.is_alive


def test_an_authenticator_ends_with_its_context(rig):
    rig.authenticator.start()
    rig.context.destroy(linger=0)
    rig.authenticator.stop()
    assert not rig.authenticator.is_alive


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644])
def test_a_secret_that_others_can_use_is_refused(server, mode):
    os.chmod(server[1], mode)
    with pytest.raises(ConfigError, match=f"chmod o-rwx.*mode {mode:04o}"):
        ServerKeys.from_files(server[1])


def test_a_secret_may_be_readable_by_its_group(server):
    os.chmod(server[1], 0o440)
    ServerKeys.from_files(server[1])


def test_what_is_no_key_file_is_named(tmp_path, server):
    for path, seen in [
        (tmp_path / "missing", "No such file"),
        (tmp_path, "Is a directory"),
        (server[0], "a public one only"),
    ]:
        with pytest.raises(ConfigError, match=f"cannot use the key file .*{seen}"):
            ServerKeys.from_files(path)
    (tmp_path / "empty").write_text("")
    (tmp_path / "short").write_text('curve\n public-key = "abc"\n secret-key = "sesame"\n')
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00" * 100)
    for name in ("empty", "short", "binary"):
        with pytest.raises(ConfigError, match="cannot use the key file") as raised:
            ServerKeys.from_files(tmp_path / name)
        assert "sesame" not in str(raised.value)


@pytest.mark.parametrize(("name", "seen"), [("missing", "nothing there"), ("server.key", "a file")])
def test_a_folder_that_is_none_is_named(tmp_path, server, name, seen):
    with pytest.raises(ConfigError, match=f"expected a folder of .key files .*{seen}"):
        ServerKeys.from_files(server[1], tmp_path / name)


def test_secrets_are_not_shown(server, keys):
    with open(server[1], "rb") as file:
        secret = file.read().partition(b"secret-key = ")[2].strip()[1:-1].decode()
    client = keys("client")
    with open(client[1], "rb") as file:
        client_secret = file.read().partition(b"secret-key = ")[2].strip()[1:-1].decode()
    assert secret not in repr(ServerKeys.from_files(server[1]))
    assert client_secret not in repr(ClientKeys.from_files(client[1], server[0]))
