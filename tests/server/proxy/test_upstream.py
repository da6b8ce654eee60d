"""What a worker's failures mean, on real sockets."""

import asyncio
import errno
import json
from contextlib import asynccontextmanager

from kvplug.server.diagnosis.finding import Code
from kvplug.server.proxy.upstream import LostError, _Address, connect_error
from tests.server.engine import Engine, served
from tests.server.test_service import COMPLETION, post_error, routing, serving

_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
_MODELS = json.dumps({"data": [{"id": "m", "root": ""}]}).encode()


@asynccontextmanager
async def forgetful_engine():
    """An engine that closes each connection when a second POST comes on it, unanswered: as one that
    found it idle for too long just then.
    """
    num_posts = 0

    async def serve(reader, writer):
        nonlocal num_posts
        num_before = 0
        while head := await read_head(reader):
            is_post = head.startswith(b"POST")
            if is_post and num_before:
                break
            num_before += is_post
            num_posts += is_post
            body = b'{"choices": []}' if is_post else _MODELS
            writer.write(_OK % (len(body), body))
        writer.close()

    async def read_head(reader):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return b""
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length or 0))
        return head

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", lambda: num_posts


async def test_a_connection_that_the_worker_closed_while_idle_is_no_loss():
    async with forgetful_engine() as (url, num_posts), serving([url]) as (service, client):
        for _ in range(5):
            async with client.post("/v1/completions", json=COMPLETION) as response:
                assert response.status == 200
        assert num_posts() == 5
        assert service.proxy.counts[url].num_lost == 0
        assert service.fleet.workers[url].is_up


async def test_a_request_that_kills_workers_reaches_two_of_them():
    engines = [Engine() for _ in range(4)]
    for engine in engines:
        engine.behaviour = "die"
    async with routing(*engines) as (service, client):
        status, code, message = await post_error(client, COMPLETION)
        assert (status, code) == (502, "worker_lost")
        assert message.endswith(" went away before the answer began")
        assert sum(engine.num_requests > 0 for engine in engines) == 2
        assert all(worker.is_up for worker in service.fleet.workers.values())
        assert len(service.router.load) == 0


async def test_an_answer_that_cannot_be_parsed_is_502_and_not_asked_for_again():
    engines = [Engine(), Engine()]
    for engine in engines:
        engine.behaviour = "odd"
    async with routing(*engines) as (service, client):
        assert (await post_error(client, COMPLETION))[:2] == (502, "invalid_answer")
        assert sum(engine.num_requests for engine in engines) == 1
        assert all(worker.is_up for worker in service.fleet.workers.values())


def test_a_name_as_long_as_names_may_be_is_one_of_a_worker():
    name = "a" * 63
    assert _Address.of(f"http://{name}:8000").named == f"{name}:8000".encode()


async def test_a_redirect_is_the_clients_to_follow():
    engine, other = Engine(), Engine(models=["n"])
    engine.behaviour = "redirect"
    async with served(other) as url, routing(engine) as (_, client):
        engine.says["redirect"] = url + "/v1/completions"
        async with client.post(
            "/v1/completions", json=COMPLETION, allow_redirects=False
        ) as response:
            assert response.status == 307
    assert other.num_requests == 0


async def test_the_query_and_repeated_headers_pass_those_of_one_connection_do_not():
    engine = Engine()
    headers = [("x-tag", "a"), ("x-tag", "b"), ("x-hop", "1"), ("Connection", "x-hop, keep-alive")]
    async with routing(engine) as (_, client):
        how = {"json": COMPLETION, "headers": headers}
        async with client.post("/v1/completions?api-version=1", **how) as response:
            assert response.status == 200
    assert engine.last_path == "/v1/completions?api-version=1"
    assert engine.last_headers.getall("x-tag") == ["a", "b"]
    assert "x-hop" not in engine.last_headers


def test_a_shortage_of_the_router_is_not_the_workers_fault():
    error = connect_error(OSError(errno.EMFILE, "says the system"))
    assert (error.status, error.code) == (503, "router_overloaded")
    for fault in (OSError(errno.ECONNREFUSED, "says the system"), TimeoutError()):
        error = connect_error(fault)
        assert isinstance(error, LostError)
        assert not error.was_reached
        assert str(error)


async def test_the_key_of_the_workers_is_for_what_the_router_asks_on_its_own(tmp_path):
    engine, key_file = Engine(), tmp_path / "key"
    engine.api_key = "secret"
    key_file.write_text("secret\n")
    async with routing(engine, worker_api_key_file=key_file) as (service, client):
        [worker] = service.fleet.workers.values()
        assert worker.is_up
        for headers, status in (({}, 401), ({"Authorization": "Bearer secret"}, 200)):
            how = {"json": COMPLETION, "headers": headers}
            async with client.post("/v1/completions", **how) as response:
                assert response.status == status


async def test_a_worker_that_demands_a_key_is_down_and_says_how_to_give_one():
    engine = Engine()
    engine.api_key = "secret"
    async with routing(engine) as (service, _):
        [finding] = service.diagnosis.look()
        assert finding.code is Code.WORKER_DOWN
        assert finding.fix.endswith("--worker-api-key-file")
