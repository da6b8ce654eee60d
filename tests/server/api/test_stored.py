"""Responses that one engine has: they are found there, and continued there."""

import asyncio

import pytest

from tests.server.engine import Engine
from tests.server.test_service import error_of, routing

RESPONSE = {"id": "resp_1", "status": "completed"}


async def test_a_response_is_fetched_from_the_worker_that_has_it():
    engines = [Engine(), Engine()]
    engines[1].responses["resp_1"] = RESPONSE
    async with routing(*engines) as (_, client):
        for _ in range(2):
            async with client.get("/v1/responses/resp_1?include=x") as response:
                assert (response.status, await response.json()) == (200, RESPONSE)
        async with client.post("/v1/responses/resp_1/cancel", json={}) as response:
            assert response.status == 200
        async with client.delete("/v1/responses/resp_1") as response:
            assert response.status == 200
        async with client.get("/v1/responses/resp_1") as response:
            assert (await error_of(response))[:2] == (404, "response_not_found")
    asked = engines[1].asked
    assert asked[0] == ("GET", "/v1/responses/resp_1?include=x")
    assert len(engines[0].asked) == 2  # before it was known where the response is, and when it went


async def test_what_continues_a_response_goes_to_its_worker():
    engines = [Engine(), Engine(), Engine()]
    engines[2].responses["resp_1"] = RESPONSE
    body = {"model": "m", "input": "and then?", "previous_response_id": "resp_1"}
    async with routing(*engines) as (service, client):
        for _ in range(6):
            async with client.post("/v1/responses", json=body) as response:
                assert response.status == 200
        assert [engine.num_requests for engine in engines] == [0, 0, 6]
        assert len(service.router.load) == 0
        # Nobody has it: the engine that gets the request says so itself.
        body["previous_response_id"] = "resp_unknown"
        async with client.post("/v1/responses", json=body) as response:
            assert response.status == 200
    assert sum(engine.num_requests for engine in engines) == 7


@pytest.mark.parametrize("previous", [5, "", None, "x" * 10_000, ["a"], "a/../b?c#d"])
async def test_what_names_no_response_is_forwarded_as_ever(previous):
    async with routing(Engine(), Engine()) as (_, client):
        body = {"model": "m", "input": "hi", "previous_response_id": previous}
        async with client.post("/v1/responses", json=body) as response:
            assert response.status == 200


async def test_a_worker_that_is_gone_is_passed_over():
    engines = [Engine(), Engine()]
    for engine in engines:
        engine.responses["resp_1"] = RESPONSE
    engines[0].behaviour = "die"
    async with routing(*engines) as (_, client):
        answers = await asyncio.gather(*(client.get("/v1/responses/resp_1") for _ in range(3)))
        for response in answers:
            assert response.status == 200
