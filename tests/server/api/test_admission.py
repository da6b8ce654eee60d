"""Requests that wait for their turn, or for an engine."""

import asyncio

import pytest

from kvplug.api_errors import ApiError
from kvplug.errors import ConfigError
from kvplug.server.api.admission import Admission
from kvplug.server.config import ServerConfig, WorkerSpec
from tests.server.engine import Engine, served
from tests.server.test_service import COMPLETION, error_of, routing
from tests.waiting import until


def admission(**settings):
    return Admission(ServerConfig(workers=(WorkerSpec(url="http://a"),), **settings))


class Served:
    """Tasks that begin in some order and end when they are told to."""

    def __init__(self, admission):
        self.admission, self.begun, self.ends = admission, [], {}

    def start(self, name):
        self.ends[name] = asyncio.Event()
        return asyncio.create_task(self._serve(name))

    async def _serve(self, name):
        async with self.admission.turn():
            self.begun.append(name)
            await self.ends[name].wait()


async def test_turns_are_taken_in_order():
    served = Served(admission(max_in_flight=2, queue_size=9))
    tasks = [served.start(number) for number in range(6)]
    await until(lambda: served.admission.num_waiting == 4, "the others wait")
    assert served.begun == [0, 1]
    for number in (1, 0, 2, 3, 4, 5):
        served.ends[number].set()
        await tasks[number]
    assert served.begun == list(range(6))
    assert (served.admission.num_in_flight, served.admission.num_waiting) == (0, 0)


async def test_nobody_overtakes_who_waits():
    served = Served(admission(max_in_flight=1, queue_size=9))
    tasks = [served.start(number) for number in range(2)]
    await until(lambda: served.admission.num_waiting == 1, "one waits")
    served.ends[0].set()
    tasks.append(served.start(2))
    served.ends[1].set(), served.ends[2].set()
    await asyncio.gather(*tasks)
    assert served.begun == [0, 1, 2]


async def test_who_leaves_frees_the_place():
    served = Served(admission(max_in_flight=1, queue_size=2))
    tasks = [served.start(number) for number in range(3)]
    await until(lambda: served.admission.num_waiting == 2, "two wait")
    tasks[1].cancel()
    await until(lambda: served.admission.num_waiting == 1, "one left")
    # The turn comes in the moment in which the next one leaves.
    served.ends[0].set()
    await tasks[0]
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (served.admission.num_in_flight, served.admission.num_waiting) == (0, 0)
    served.ends[3] = asyncio.Event()
    last = served.start(4)
    served.ends[4].set()
    await last


async def test_a_full_queue_and_a_long_wait_are_refused():
    served = Served(admission(max_in_flight=1, queue_size=1, queue_timeout_s=0.01))
    tasks = [served.start(0), served.start(1)]
    while not served.admission.num_waiting:  # noqa: ASYNC110 - for 10 ms only
        await asyncio.sleep(0)
    with pytest.raises(ApiError) as refused:
        async with served.admission.turn():
            pass
    assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "1"})
    with pytest.raises(ApiError, match=r"waited 0\.01 s in vain"):
        await tasks[1]
    assert served.admission.num_refused == {"queue_full": 1, "queue_timeout": 1}
    served.ends[0].set()
    await tasks[0]
    assert served.admission.num_in_flight == 0


async def test_without_a_limit_nothing_waits():
    served = Served(admission())
    tasks = [served.start(number) for number in range(50)]
    await until(lambda: len(served.begun) == 50, "all are served")
    for end in served.ends.values():
        end.set()
    await asyncio.gather(*tasks)


async def test_clients_are_told_when_to_come_back():
    engine = Engine()
    engine.behaviour = "gated"
    async with routing(engine, max_in_flight=1, queue_size=0) as (service, client):
        stream = {**COMPLETION, "stream": True}
        async with client.post("/v1/completions", json=stream) as running:
            await until(lambda: engine.num_requests == 1, "one is served")
            async with client.post("/v1/completions", json=COMPLETION) as response:
                assert response.headers["Retry-After"] == "1"
                assert (await error_of(response))[:2] == (429, "too_many_requests")
            async with client.post("/v1/messages", json={"model": "m"}) as response:
                assert (await response.json())["error"]["type"] == "rate_limit_error"
            async with client.post("/tokenize", json={"model": "m"}) as response:
                assert response.status == 200
            async with client.get("/metrics") as response:
                text = await response.text()
            assert 'kvplug_queue_refused_total{reason="queue_full"} 2.0' in text
            engine.gate.set()
            await running.read()
        async with client.post("/v1/completions", json=COMPLETION) as response:
            assert response.status == 200
        assert len(service.router.load) == 0


async def test_a_client_that_leaves_the_queue_is_not_served():
    engine = Engine()
    engine.behaviour = "gated"
    async with routing(engine, max_in_flight=1, queue_size=5) as (service, client):
        stream = {**COMPLETION, "stream": True}
        async with client.post("/v1/completions", json=stream) as running:
            waits = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
            admission = service.api.admission
            await until(lambda: admission.num_waiting == 1, "one waits")
            waits.cancel()
            await until(lambda: admission.num_waiting == 0, "it left")
            engine.gate.set()
            await running.read()
        await until(lambda: admission.num_in_flight == 0, "all is over")
    assert engine.num_requests == 1


@pytest.mark.parametrize("behaviour", ["die", "odd"])
async def test_what_fails_gives_its_turn_back(behaviour):
    engine = Engine()
    engine.behaviour = behaviour
    async with routing(engine, max_in_flight=1) as (service, client):
        for _ in range(3):
            async with client.post("/v1/completions", json=COMPLETION) as response:
                assert response.status >= 500
        assert service.api.admission.num_in_flight == 0


async def test_a_request_waits_for_an_engine_that_starts():
    engine = Engine()
    engine.is_healthy.clear()
    settings = {"engine_wait_timeout_s": 30.0, "connect_timeout_s": 0.05}
    async with routing(engine, **settings) as (service, client):
        waits = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
        nameless = asyncio.create_task(client.post("/v1/completions", json={"prompt": [1]}))
        await asyncio.sleep(0.05)
        assert not waits.done()
        engine.is_healthy.set()
        for task in (waits, nameless):
            async with await task as response:
                assert response.status == 200
        # All workers are up: nobody can come who serves it.
        async with client.post("/v1/completions", json={**COMPLETION, "model": "x"}) as response:
            assert (await error_of(response))[:2] == (404, "model_not_found")
        assert len(service.router.load) == 0


async def test_a_request_waits_only_as_long_as_it_may():
    async with served(Engine()) as url:
        pass  # nobody listens there any more
    engine = Engine(models=["other"])
    async with routing(engine, engine_wait_timeout_s=0.05) as (service, client):
        await service.fleet.add(WorkerSpec(url=url), frozenset())
        async with client.post("/v1/completions", json=COMPLETION) as response:
            assert response.status == 404
        async with client.post("/v1/completions", json={**COMPLETION, "model": "other"}) as r:
            assert r.status == 200


def test_a_queue_without_a_limit_is_refused():
    with pytest.raises(ConfigError, match="queue_size: expected max_in_flight"):
        admission(queue_size=3)
