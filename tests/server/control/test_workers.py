"""/workers: engines that come and go while requests are served."""

import asyncio

import aiohttp

from kvplug.server.config import ServerConfig
from kvplug.server.service import RouterService
from tests.server.engine import Engine, served
from tests.server.test_service import COMPLETION, error_of, routing
from tests.waiting import until


def path_of(url):
    return f"/workers/{url.replace('/', '%2F').replace(':', '%3A')}"


async def complete(client, **more):
    async with client.post("/v1/completions", json=COMPLETION | more) as response:
        return response.status, await response.read()


async def test_a_worker_is_added_used_and_removed():
    first, second = Engine(), Engine(models=["other"])
    async with routing(first) as (service, client), served(second) as url:
        async with client.post("/workers", json={"worker": url, "taints": ["b"]}) as response:
            assert response.status == 201
            state = await response.json()
        assert (state["name"], state["state"], state["models"]) == (url, "up", ["other"])
        assert (state["taints"], state["dp_size"]) == (["b"], 1)
        assert (await complete(client, model="other"))[0] == 200
        async with client.post("/workers", json={"worker": url}) as response:
            assert response.status == 200  # it is there already
        async with client.post("/workers", json={"worker": f"{url},dp_size=2"}) as response:
            assert (await error_of(response))[:2] == (409, "worker_exists")
        async with client.get("/workers") as response:
            assert len((await response.json())["workers"]) == 2
        async with client.get("/metrics") as response:
            assert f'kvplug_worker_up{{worker="{url}"}} 1.0' in await response.text()
        async with client.delete(path_of(url)) as response:
            assert response.status == 204
        assert (await complete(client, model="other"))[0] == 404
        assert [rank.worker for rank in service.router.ranks] == list(service.fleet.workers)
        async with client.delete(path_of(url)) as response:
            assert (await error_of(response))[:2] == (404, "worker_not_found")
        async with client.post("/workers", json={"worker": url}) as response:
            assert response.status == 201
        assert (await complete(client, model="other"))[0] == 200
    assert (first.num_requests, second.num_requests) == (0, 2)


async def test_two_that_add_a_worker_at_once_are_both_told_that_it_is_there():
    async with routing(Engine()) as (service, client), served(Engine()) as url:

        async def add():
            async with client.post("/workers", json={"worker": url}) as response:
                return response.status, (await response.json())["name"]

        assert sorted(await asyncio.gather(add(), add())) == [(200, url), (201, url)]
        assert len(service.fleet.workers) == 2


async def test_nothing_is_kept_of_a_worker_that_was_removed_and_its_requests_end():
    first, second = Engine(), Engine(models=["other"])
    async with (
        routing(first, eject_after=1) as (service, client),
        served(second) as url,
    ):
        async with client.post("/workers", json={"worker": url}) as response:
            assert response.status == 201
        assert (await complete(client, model="other"))[0] == 200  # its connection is kept
        second.behaviour = "gated"
        streaming = asyncio.create_task(complete(client, model="other", stream=True))
        await until(lambda: second.num_requests == 2, "a stream has begun")
        service.proxy.note_answer(url, 500)
        assert service.fleet.ejections.left_s(url) is not None
        await service.diagnosis.ask()
        service.diagnosis.look()
        assert url in {worker for worker, _ in service.diagnosis.seen}
        async with client.delete(path_of(url)) as response:
            assert response.status == 204
        second.gate.set()
        status, answer = await streaming
        assert (status, answer.endswith(b"data: [DONE]\n\n")) == (200, True)
        service.proxy.note_answer(url, 500)
        assert service.fleet.ejections.left_s(url) is None
        upstream = service.proxy._upstream
        assert [*upstream._idle.keys(), *upstream._addresses.keys()] == []
        assert url not in service.proxy.counts
        async with client.get("/metrics") as response:
            assert url not in await response.text()


async def test_a_worker_that_is_not_up_yet_is_found_once_it_is():
    async with routing(Engine()) as (service, client):
        async with client.post("/workers", json={"worker": "http://127.0.0.1:9"}) as response:
            assert (response.status, (await response.json())["state"]) == (201, "down")
        async with served(Engine(models=["late"])) as url:
            async with client.post("/workers", json={"worker": url}) as response:
                assert response.status == 201
            await until(lambda: "late" in service.fleet.models, "the worker is up")


async def test_a_drained_worker_gets_nothing_new_and_ends_what_it_has():
    first, second = Engine(), Engine()
    async with routing(first, second) as (service, client):
        url, other = service.fleet.workers
        first.behaviour = second.behaviour = "gated"
        stream = {"stream": True, "max_tokens": 3}
        async with client.patch(path_of(other), json={"drain": True}) as response:
            assert (await response.json())["state"] == "draining"
        running = asyncio.create_task(complete(client, **stream))
        await until(lambda: first.num_requests == 1, "the request is there")
        async with client.get(path_of(url)) as response:
            assert (await response.json())["requests_in_flight"] == 1
        async with client.patch(path_of(url), json={"drain": True}) as response:
            assert response.status == 200
        assert (await complete(client))[0] == 503
        async with client.patch(path_of(other), json={"drain": False}) as response:
            assert (await response.json())["state"] == "up"
        second.behaviour = "ok"
        for _ in range(3):
            assert (await complete(client))[0] == 200
        first.gate.set()
        assert (await running)[1].endswith(b"data: [DONE]\n\n")
    assert (first.num_requests, second.num_requests) == (1, 3)


async def test_a_request_goes_on_while_its_worker_is_removed():
    engine = Engine()
    engine.behaviour = "gated"
    async with routing(engine, Engine(models=["n"])) as (service, client):
        url = next(iter(service.fleet.workers))
        running = asyncio.create_task(complete(client, stream=True))
        await until(lambda: engine.num_requests == 1, "the request is there")
        async with client.delete(path_of(url)) as response:
            assert response.status == 204
        engine.gate.set()
        assert (await running)[1].endswith(b"data: [DONE]\n\n")
        assert len(service.router.load) == 0


async def test_taints_are_replaced():
    async with routing(Engine()) as (service, client):
        url = next(iter(service.fleet.workers))
        async with client.patch(path_of(url), json={"taints": ["a", "b"]}) as response:
            assert (await response.json())["taints"] == ["a", "b"]
        asked = {"token_ids": [1], "required_taints": ["a"]}
        async with client.post("/select", json=asked) as response:
            assert (await response.json())["worker"] == url


async def test_a_worker_that_is_none_is_refused():
    async with routing(Engine()) as (service, client):
        url = next(iter(service.fleet.workers))
        nowhere = {"worker": "http://127.0.0.1:9,events=nowhere://127.0.0.1:5557"}
        odd = ({"worker": "ftp://a"}, {"worker": ""}, {}, {"worker": 5}, {"url": url})
        for asked in (*odd, nowhere):
            async with client.post("/workers", json=asked) as response:
                assert (await error_of(response))[:2] == (400, "invalid_field"), asked
        for asked in ({"drain": "yes"}, {"taints": "a"}, {"drain": None, "x": 1}):
            async with client.patch(path_of(url), json=asked) as response:
                assert (await error_of(response))[:2] == (400, "invalid_field"), asked
        assert len(service.fleet.workers) == len(service.router.ranks) == 1


async def test_many_changes_at_once_are_made_one_by_one():
    async with routing(Engine()) as (service, client), served(Engine()) as url:

        async def change():
            async with client.post("/workers", json={"worker": url}) as response:
                assert response.status in (200, 201, 400), await response.text()
            async with client.delete(path_of(url)) as response:
                assert response.status in (204, 404)

        await asyncio.gather(*(change() for _ in range(5)))
        assert len(service.fleet.workers) == len(service.router.ranks) == 1


async def test_a_router_may_start_with_no_worker(tmp_path):
    key = tmp_path / "key"
    key.write_text("secret")
    config = ServerConfig(port=0, admin_api_key_file=key, engine_wait_timeout_s=30.0)
    headers = {"Authorization": "Bearer secret"}
    async with (
        served(Engine()) as url,
        RouterService(config) as service,
        aiohttp.ClientSession(service.url) as client,
    ):
        async with client.get("/health") as response:
            assert (response.status, (await response.json())["status"]) == (503, "no_worker")
        waits = asyncio.create_task(complete(client))
        async with client.post("/workers", json={"worker": url}, headers=headers) as response:
            assert response.status == 201
        assert (await waits)[0] == 200
