"""The real nginx asks a router on real sockets, in front of engines that misbehave on request."""

import asyncio
import grp
import json
import os
import stat
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import pytest

from kvplug.router.config import RouterConfig
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.service import RouterService
from tests.server.engine import Engine, served
from tests.server.nginx.real_nginx import checked, free_port, needs_nginx, running
from tests.waiting import until

pytestmark = needs_nginx

COMPLETION = {"model": "m", "prompt": [1, 2, 3, 4, 5]}
STREAM = {**COMPLETION, "stream": True}


def configured(folder, urls, nginx_port, *, mode="kv", **settings):
    """A router before these engines, for an nginx at this port."""
    return ServerConfig(
        workers=tuple(WorkerSpec(url=url) for url in urls),
        router=RouterConfig(block_size=4, mode=mode),
        grace_s=0.2,
        nginx_config=folder / "nginx.conf",
        nginx_listen=f"127.0.0.1:{nginx_port}",
        **{"port": 0, "health_interval_s": 0.05, **settings},
    )


@asynccontextmanager
async def fronted(folder, urls, **settings):
    """nginx before a router before these engines: (service, client of nginx)."""
    port = free_port()
    config = configured(folder, urls, port, **settings)
    async with (
        RouterService(config) as service,
        running(folder / "nginx.conf", port),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
    ):
        yield service, client


@asynccontextmanager
async def fronting(folder, *engines, **settings):
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(served(engine)) for engine in engines]
        yield await stack.enter_async_context(fronted(folder, urls, **settings))


async def error_of(response):
    assert response.content_type == "application/json"
    return response.status, (await response.json())["error"]["code"]


async def is_idle(service):
    await until(lambda: not len(service.router.load), "no load is left")
    assert len(service.decisions) == 0


async def test_an_answer_passes_unchanged_and_its_load_ends(tmp_path):
    engine = Engine()
    raw = b'{ "model": "m",  "prompt": [1, 2],"odd": 1.0}'
    async with fronting(tmp_path, engine) as (service, client):
        headers = {"Authorization": "Bearer k", "Content-Type": "application/json"}
        async with client.post("/v1/completions?a=%20b", data=raw, headers=headers) as response:
            assert await response.json() == {"choices": [{"text": "hi"}]}
            assert response.headers["x-engine"] == "1"
            assert not [name for name in response.headers if "kvplug" in name.lower()]
        await is_idle(service)
    assert (engine.last_body, engine.last_path) == (raw, "/v1/completions?a=%20b")
    assert engine.last_headers["Authorization"] == "Bearer k"
    assert not [name for name in engine.last_headers if "kvplug" in name.lower()]


async def test_nginx_takes_the_file_and_others_cannot_use_its_socket(tmp_path):
    async with fronting(tmp_path, Engine()):
        is_taken, said = await checked(tmp_path / "nginx.conf")
        assert is_taken, said
        assert stat.S_IMODE((tmp_path / "decisions.sock").stat().st_mode) == 0o600
    assert not (tmp_path / "decisions.sock").exists()


@contextmanager
def folder_of(group):
    """Open to the group; that of pytest is for its user alone."""
    with TemporaryDirectory() as name:
        os.chown(name, -1, grp.getgrnam(group).gr_gid)
        os.chmod(name, 0o750)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="nginx changes its user only if root starts it")
async def test_with_a_group_an_nginx_of_root_reaches_the_socket():
    with folder_of("daemon") as folder:
        async with fronting(folder, Engine(), nginx_group="daemon") as (service, client):
            async with client.post("/v1/completions", json=COMPLETION) as response:
                assert response.status == 200
            is_taken, said = await checked(folder / "nginx.conf")
            assert is_taken, said
            await is_idle(service)


async def test_directives_of_the_operator_are_taken(tmp_path):
    more, port = tmp_path / "nginx.d", free_port()
    more.mkdir()
    (more / "port.conf").write_text(f"listen 127.0.0.1:{port};\n")
    async with fronting(tmp_path, Engine()) as (service, _):
        url = f"http://127.0.0.1:{port}/v1/completions"
        async with aiohttp.request("POST", url, json=COMPLETION) as response:
            assert response.status == 200
        await is_idle(service)


async def test_a_prefix_goes_where_it_went_before(tmp_path):
    engines = [Engine() for _ in range(3)]
    async with fronting(tmp_path, *engines) as (service, client):
        for _ in range(4):
            for first in (1, 2, 3):
                body = {"model": "m", "prompt": [first] * 400}
                async with client.post("/v1/completions", json=body) as response:
                    assert response.status == 200
                await is_idle(service)
        counts = service.proxy.counts.values()
    assert sum(each.num_cached_tokens for each in counts) == 3 * 3 * 400


async def test_a_stream_comes_chunk_by_chunk(tmp_path):
    engine = Engine()
    engine.behaviour = "gated"
    async with fronting(tmp_path, engine) as (service, client):
        async with client.post("/v1/completions", json=STREAM) as response:
            assert await response.content.readline() == b'data: {"choices": []}\n'
            assert len(service.router.load) == 1
            engine.gate.set()
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await is_idle(service)


async def test_clients_that_leave_end_their_load_at_once(tmp_path):
    engine, num = Engine(), 100
    engine.behaviour = "slow"
    async with fronting(tmp_path, engine) as (service, client):
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=STREAM) for _ in range(num))
        )
        assert len(service.router.load) == num
        for answer in answers:
            answer.close()
        await until(lambda: engine.num_cancelled == num, "the engine's requests are cancelled")
        await is_idle(service)


@pytest.mark.parametrize("behaviour", ["die", "gone"])
async def test_a_worker_that_fails_before_its_answer_is_replaced(tmp_path, behaviour):
    dying, sound = Engine(), Engine()
    dying.behaviour = "die"
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(served(sound))
        async with AsyncExitStack() as of_dying:
            urls = [await of_dying.enter_async_context(served(dying)), url]
            service, client = await stack.enter_async_context(
                fronted(tmp_path, urls, mode="round_robin", health_interval_s=60)
            )
            if behaviour == "gone":
                await of_dying.aclose()
            for _ in range(3):
                async with client.post("/v1/completions", json=STREAM) as response:
                    assert response.status == 200
                    await response.read()
            lost = service.proxy.counts[urls[0]].num_lost
            assert (lost, sound.num_requests) == (1 if behaviour == "gone" else 3, 3)
            assert service.fleet.workers[urls[0]].is_up == (behaviour == "die")
            await is_idle(service)


async def test_where_all_workers_fail_the_client_is_told(tmp_path):
    engines = [Engine(), Engine(), Engine()]
    for engine in engines:
        engine.behaviour = "die"
    async with fronting(tmp_path, *engines) as (service, client):
        async with client.post("/v1/completions", json=COMPLETION) as response:
            assert await error_of(response) == (502, "worker_lost")
        assert sum(engine.num_requests for engine in engines) == 2
        await is_idle(service)


async def test_a_silent_worker_is_504_and_not_asked_twice(tmp_path):
    engine, other = Engine(), Engine()
    engine.behaviour = other.behaviour = "silent"
    async with fronting(tmp_path, engine, other, request_timeout_s=0.2) as (service, client):
        async with client.post("/v1/completions", json=COMPLETION) as response:
            assert await error_of(response) == (504, "timeout")
        assert engine.num_requests + other.num_requests == 1
        await is_idle(service)


async def test_an_answer_that_breaks_off_ends_there(tmp_path):
    engine = Engine()
    engine.behaviour = "half"
    async with fronting(tmp_path, engine) as (service, client):
        async with client.post("/v1/completions", json=STREAM) as response:
            assert await response.content.readline() == b'data: {"choices": []}\n'
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        await is_idle(service)


async def test_an_engines_own_error_passes(tmp_path):
    engine = Engine()
    engine.behaviour = "refuse"
    async with fronting(tmp_path, engine) as (service, client):
        async with client.post("/v1/completions", json=COMPLETION) as response:
            assert (response.status, await response.json()) == (
                400,
                {"error": {"message": "too long"}},
            )
        await is_idle(service)


async def test_a_large_body_passes_and_a_larger_one_is_413(tmp_path):
    engine = Engine()
    async with fronting(tmp_path, engine, max_body_bytes=2**22) as (service, client):
        raw = json.dumps({"model": "m", "prompt": [123_456] * 250_000}).encode()
        assert 2**20 < len(raw) < 2**22
        async with client.post("/v1/completions", data=BytesIO(raw)) as response:
            assert response.status == 200
        assert engine.last_body == raw
        async with client.post("/v1/completions", data=BytesIO(bytes(2**22 + 1))) as response:
            assert await error_of(response) == (413, "body_too_large")
        await is_idle(service)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", b"no json", (400, "invalid_json")),
        (
            "/v1/completions",
            b'{"model": "x\\r\\nX-Accel-Redirect: @x"}',
            (404, "model_not_found"),
        ),
        ("/health", b"", (404, "no_such_route")),
        ("/metrics", b"", (404, "no_such_route")),
        ("/@worker", b"", (404, "no_such_route")),
    ],
)
async def test_what_the_router_refuses_reaches_the_client(tmp_path, path, body, expected):
    async with fronting(tmp_path, Engine()) as (service, client):
        async with client.post(path, data=body) as response:
            assert await error_of(response) == expected
            assert not [name for name in response.headers if "accel" in name.lower()]
        await is_idle(service)


async def test_a_client_cannot_speak_for_nginx(tmp_path):
    engine = Engine()
    async with fronting(tmp_path, engine) as (service, client):
        forged = {
            "X-Accel-Redirect": "/metrics",
            "X-Kvplug-Request": "mine",
            "X-Kvplug-Url": "http://127.0.0.1:9",
            "X-Kvplug-Status": "502",
            "X-Kvplug-Connected": "-",
            "X-data-parallel-rank": "7",
        }
        async with client.post("/v1/completions", json=COMPLETION, headers=forged) as response:
            assert response.status == 200
        assert "X-data-parallel-rank" not in engine.last_headers
        assert all(worker.is_up for worker in service.fleet.workers.values())
        await is_idle(service)


async def test_models_are_listed(tmp_path):
    async with fronting(tmp_path, Engine()) as (_, client), client.get("/v1/models") as response:
        assert [card["id"] for card in (await response.json())["data"]] == ["m"]


async def test_a_restart_of_the_router_breaks_no_stream(tmp_path):
    engine, port = Engine(), free_port()
    engine.behaviour = "gated"
    async with served(engine) as url:
        config = configured(tmp_path, [url], port, port=free_port())
        first = await RouterService(config).__aenter__()
        async with (
            running(tmp_path / "nginx.conf", port),
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
            client.post("/v1/completions", json=STREAM) as streamed,
        ):
            await streamed.content.readline()
            await first.__aexit__(None, None, None)
            async with RouterService(config) as second:
                engine.gate.set()
                assert (await streamed.read()).endswith(b"data: [DONE]\n\n")
                async with client.post("/v1/completions", json=STREAM) as response:
                    await response.read()
                    assert response.status == 200
                await is_idle(second)


async def test_without_the_router_nginx_says_so(tmp_path):
    async with fronting(tmp_path, Engine()) as (service, client):
        await service.__aexit__(None, None, None)
        async with client.post("/v1/completions", json=COMPLETION) as response:
            assert await error_of(response) == (503, "router_down")


async def test_ids_traces_and_explanations_pass_through_nginx(tmp_path):
    engine, traceparent = Engine(), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with fronting(tmp_path, engine, explain_headers=True) as (service, client):
        for request_id in ("mine", "not a sane one"):
            sent = {"X-Request-Id": request_id, "traceparent": traceparent}
            async with client.post("/v1/completions", json=COMPLETION, headers=sent) as response:
                [said] = response.headers.getall("X-Request-Id")
                assert response.headers["x-kvplug-worker"] in service.fleet.workers
                assert {"x-kvplug-overlap", "x-kvplug-cost"} <= set(response.headers)
            assert said == request_id if request_id == "mine" else len(said) == 32
            assert engine.last_headers.getall("X-Request-Id") == [said]
            assert engine.last_headers.getall("traceparent") == [traceparent]
        await is_idle(service)
        times = service.following.times
        assert dict(times.num_by_status) == {200: 2}


async def test_what_nginx_says_of_an_end_is_counted(tmp_path):
    engine = Engine()
    engine.behaviour = "slow"
    async with fronting(tmp_path, engine) as (service, client):
        async with client.post("/v1/completions", json=STREAM) as response:
            await response.content.readline()
            response.close()
        await is_idle(service)
        assert dict(service.following.times.num_by_status) == {499: 1}


async def test_a_worker_behind_a_unix_socket_is_reached(tmp_path):
    engine = Engine()
    async with (
        served(engine, socket=tmp_path / "engine.sock") as url,
        fronted(tmp_path, [url]) as (service, client),
    ):
        async with client.post("/v1/completions?a=b", json=STREAM) as response:
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert (engine.last_path, engine.last_headers["Host"]) == (
            "/v1/completions?a=b",
            "localhost",
        )
        await is_idle(service)
