"""The router as nginx sees it, without an nginx: a Unix socket, and a port for datagrams."""

import asyncio
import grp
import json
import os
import pwd
import socket
import stat
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kvplug.errors import ConfigError, TransportError
from kvplug.router.config import RouterConfig
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.nginx.ends import End, read
from kvplug.server.nginx.front import _user_of_workers
from kvplug.server.service import RouterService
from tests.server.engine import Engine, served
from tests.waiting import until

COMPLETION = {"model": "m", "prompt": [1, 2, 3, 4, 5]}
WORKER = WorkerSpec(url="http://127.0.0.1:9")


@asynccontextmanager
async def asked_by_nginx(
    folder, *, host="127.0.0.1", dp_size=None, request_expiry_s=600.0, **settings
):
    """(service, client of its decisions) before one engine."""
    async with served(Engine()) as url:
        worker = WorkerSpec(url=url.replace("127.0.0.1", host), dp_size=dp_size)
        config = ServerConfig(
            workers=(worker,),
            router=RouterConfig(request_expiry_s=request_expiry_s),
            port=0,
            grace_s=0.2,
            nginx_config=folder / "nginx.conf",
            **settings,
        )
        connector = aiohttp.UnixConnector(str(folder / "decisions.sock"))
        async with (
            RouterService(config) as service,
            aiohttp.ClientSession("http://router", connector=connector) as client,
        ):
            yield service, client


def ask(client, request_id, **headers):
    headers = {"X-Kvplug-Request": request_id, **headers}
    return client.post("/v1/completions", json=COMPLETION, headers=headers)


def tell(service, datagram):
    """nginx's datagram, to where its configuration says."""
    port = int(service.url.rpartition(":")[2])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nginx:
        nginx.sendto(datagram, ("127.0.0.1", port))


def end_of(request_id):
    entry = {"id": request_id, "status": 200, "done": "OK", "bytes": 7, "total": 0.1}
    return b"<190>Nov 21 19:00:00 kvplug: " + json.dumps(entry).encode()


async def test_a_request_is_load_until_its_end_is_told(tmp_path):
    async with asked_by_nginx(tmp_path) as (service, client):
        [worker] = service.fleet.workers.values()
        async with ask(client, "a") as answer:
            assert answer.headers["X-Accel-Redirect"] == "@worker"
            assert answer.headers["X-Kvplug-Url"] == worker.url
            assert answer.headers["X-Kvplug-Host"] == worker.url.removeprefix("http://")
            assert "X-Kvplug-Rank" not in answer.headers
        assert (len(service.router.load), len(service.decisions)) == (1, 1)
        for garbage in (b"", b"{", b'{"id": 7}', b"\xff" * 9000, end_of("another")):
            tell(service, garbage)
        tell(service, end_of("a"))
        await until(lambda: not len(service.router.load), "its load ends")
        assert len(service.decisions) == 0


async def test_an_end_that_is_told_before_the_decision_counts(tmp_path):
    async with asked_by_nginx(tmp_path) as (service, client):
        tell(service, end_of("a"))
        await until(lambda: service.decisions._ended, "the router heard of it")
        async with ask(client, "a") as answer:
            assert "X-Accel-Redirect" not in answer.headers
        assert (len(service.router.load), len(service.decisions)) == (0, 0)


async def test_a_request_has_its_turn_until_its_end_is_told(tmp_path):
    async with asked_by_nginx(tmp_path, max_in_flight=1, queue_size=1) as (service, client):
        async with ask(client, "a") as answer:
            assert answer.status == 200
        second = asyncio.create_task(ask(client, "b").__aenter__())
        await until(lambda: service.api.admission.num_waiting, "the second one waits")
        async with ask(client, "c") as answer:
            assert answer.status == 429
        async with aiohttp.request("POST", f"{service.url}/v1/completions", json=COMPLETION) as own:
            assert own.status == 429
        tell(service, end_of("a"))
        assert (await second).status == 200
        tell(service, end_of("b"))
        await until(lambda: not service.api.admission.num_in_flight, "all turns are over")


async def test_a_request_that_asks_again_gives_its_turn_back_first(tmp_path):
    settings = {"max_in_flight": 1, "queue_timeout_s": 0.1}
    async with asked_by_nginx(tmp_path, **settings) as (service, client):
        async with ask(client, "a") as answer:
            assert answer.status == 200
        failed = {"X-Kvplug-Status": "200 : 502", "X-Kvplug-Connected": "0.000 : 0.000"}
        async with ask(client, "a", **failed) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (502, "worker_lost")
        assert service.api.admission.num_in_flight == 0
        assert (len(service.router.load), len(service.decisions)) == (0, 0)


async def test_a_request_whose_end_is_lost_expires(tmp_path):
    settings = {"max_in_flight": 1, "request_expiry_s": 0.1}
    async with asked_by_nginx(tmp_path, **settings) as (service, client):
        for request_id in ("a", "b"):
            async with ask(client, request_id) as answer:
                assert answer.status == 200
        await until(lambda: not service.api.admission.num_in_flight, "its turn is over")
        assert len(service.decisions) == 0


async def test_a_rank_is_named_and_a_host_looked_up(tmp_path):
    async with asked_by_nginx(tmp_path, host="localhost", dp_size=2) as (service, client):
        [worker] = service.fleet.workers.values()
        async with ask(client, "a") as answer:
            assert answer.headers["X-Kvplug-Rank"] in ("0", "1")
            assert answer.headers["X-Kvplug-Host"] == worker.url.removeprefix("http://")
            assert "localhost" not in answer.headers["X-Kvplug-Url"]


async def test_who_is_not_nginx_is_refused(tmp_path):
    async with asked_by_nginx(tmp_path) as (service, client):
        async with client.post("/v1/completions", json=COMPLETION) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (400, "not_nginx")
        assert len(service.router.load) == 0


async def test_of_ended_requests_few_are_kept(tmp_path):
    async with asked_by_nginx(tmp_path) as (service, _):
        for number in range(10_100):
            service.decisions.note_end(End(str(number), 200))
        assert len(service.decisions._ended) == 10_000


@pytest.mark.parametrize(
    "datagram", [b"", b"no json", b"<190>x: {", b'{"status": 200}', b"{" * 10_000, b"\xff{\xff}"]
)
def test_what_cannot_be_read_is_no_end(datagram):
    assert read(datagram) is None


def test_an_end_says_whether_the_client_left():
    entry = b'<190>t: {"id":"a","status":200,"done":"","bytes":0,"upstream":"200 : 200"}'
    assert read(entry).client_left
    assert not read(end_of("a")).client_left


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nginx_config": "no such/x"}, "expected a path"),
        ({"nginx_listen": "8080"}, "HOST:PORT"),
        ({"nginx_listen": "*:80; include /etc/passwd"}, "HOST:PORT"),
        ({"nginx_group": "no such group"}, "a group of this machine"),
    ],
)
def test_what_would_break_the_configuration_is_refused(tmp_path, settings, message):
    settings = {"nginx_config": tmp_path / "nginx.conf", **settings}
    if isinstance(settings["nginx_config"], str):
        settings["nginx_config"] = tmp_path / settings["nginx_config"]
    with pytest.raises(ConfigError, match=message.replace("*", r"\*")):
        ServerConfig(workers=(WORKER,), **settings)


def test_a_worker_with_tls_is_refused(tmp_path):
    worker = WorkerSpec(url="https://127.0.0.1:9")
    with pytest.raises(ConfigError, match="expected http://"):
        ServerConfig(workers=(worker,), nginx_config=tmp_path / "nginx.conf")


async def test_a_folder_that_is_not_there_is_named(tmp_path):
    file = tmp_path / "none" / "nginx.conf"
    config = ServerConfig(workers=(WORKER,), port=0, grace_s=0.2, nginx_config=file)
    with pytest.raises(ConfigError, match="expected a folder"):
        await RouterService(config).__aenter__()


async def test_a_file_of_somebody_else_is_left_alone(tmp_path):
    file = tmp_path / "nginx.conf"
    file.write_text("events {}\n")
    config = ServerConfig(workers=(WORKER,), port=0, grace_s=0.2, nginx_config=file)
    with pytest.raises(ConfigError, match="another one is there"):
        await RouterService(config).__aenter__()
    assert file.read_text() == "events {}\n"


async def test_a_port_that_is_taken_is_named(tmp_path):
    async with asked_by_nginx(tmp_path) as (service, _):
        port = int(service.url.rpartition(":")[2])
        other = tmp_path / "other"
        other.mkdir()
        config = ServerConfig(
            workers=(WORKER,),
            host="127.0.0.2",
            port=port,
            grace_s=0.2,
            nginx_config=other / "nginx.conf",
        )
        with pytest.raises(TransportError, match=f"by UDP:{port}"):
            await RouterService(config).__aenter__()


async def test_the_socket_of_a_group_is_the_groups(tmp_path):
    async with served(Engine()) as url:
        group = grp.getgrgid(os.getegid())
        config = ServerConfig(
            workers=(WorkerSpec(url=url),),
            port=0,
            grace_s=0.2,
            nginx_config=tmp_path / "nginx.conf",
            nginx_group=group.gr_name,
        )
        async with RouterService(config):
            state = (tmp_path / "decisions.sock").stat()
            assert (stat.S_IMODE(state.st_mode), state.st_gid) == (0o660, group.gr_gid)
            text = (tmp_path / "nginx.conf").read_text()
            assert f'\nuser "nobody" "{group.gr_name}";\n' in text


@pytest.mark.parametrize(
    ("uid", "expected"),
    [(0, None), (pwd.getpwnam("daemon").pw_uid, ("daemon", "daemon")), (2**31 - 9, None)],
)
def test_without_a_group_nginxs_workers_have_the_routers_user_unless_it_is_root(
    monkeypatch, uid, expected
):
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert _user_of_workers(None) == expected
