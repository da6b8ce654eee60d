"""The endpoints that are forwarded, and the models of all workers as one list."""

import pytest

from kvplug.server.api.endpoints import ENDPOINTS
from tests.server.engine import Engine
from tests.server.test_service import error_of, routing

PATHS = [each.path for each in ENDPOINTS]


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_arrives_as_it_was_sent(path):
    engine = Engine()
    raw = b'{ "model":"m",  "input": [1.0, "\\u00e9"], "max_tokens": 3,"odd":null}'
    async with routing(engine) as (service, client):
        headers = {"anthropic-version": "2023-06-01", "x-api-key": "k"}
        async with client.post(f"{path}?a=b%20c", data=raw, headers=headers) as response:
            assert response.status == 200
            assert (await response.json())["choices"]
            assert response.headers["x-engine"] == "1"
        assert len(service.router.load) == 0
    assert (engine.last_body, engine.last_path) == (raw, f"{path}?a=b%20c")
    assert engine.last_headers["anthropic-version"] == "2023-06-01"
    assert engine.last_headers["x-api-key"] == "k"


@pytest.mark.parametrize("path", [each.path for each in ENDPOINTS if each.generates])
async def test_an_answer_is_streamed(path):
    async with (
        routing(Engine()) as (_, client),
        client.post(path, json={"model": "m", "stream": True, "max_tokens": 3}) as response,
    ):
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_what_has_no_prefix_is_counted():
    async with routing(Engine()) as (_, client):
        for path in ("/v1/embeddings", "/rerank"):
            async with client.post(path, json={"model": "m"}) as response:
                assert response.status == 200
        async with client.get("/metrics") as response:
            text = await response.text()
    assert 'kvplug_requests_without_prefix_total{reason="no_prefix"} 2.0' in text


async def test_errors_of_messages_have_anthropics_form():
    async with routing(Engine()) as (_, client):
        async with client.post("/v1/messages", json={"model": "x"}) as response:
            message = "the model 'x' does not exist; served are: m"
            error = {"type": "not_found_error", "message": message}
            assert (response.status, await response.json()) == (
                404,
                {"type": "error", "error": error},
            )
        async with client.get("/v1/messages") as response:
            assert response.status == 405
            assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_an_unknown_path_is_refused_by_name():
    async with routing(Engine()) as (_, client), client.post("/v1/files", json={}) as response:
        assert (await error_of(response))[:2] == (404, "no_such_route")


async def test_models_are_the_union_as_the_engines_describe_them():
    engines = [Engine(models=["m", "org/a"]), Engine(models=["m", "b"])]
    engines[0].card = {"max_model_len": 4096, "permission": [1]}
    engines[1].card = {"max_model_len": 1024, "created": 5}
    async with routing(*engines) as (_, client):
        async with client.get("/v1/models") as response:
            cards = {card["id"]: card for card in (await response.json())["data"]}
        assert list(cards) == ["b", "m", "org/a"]
        assert cards["m"]["max_model_len"] == 1024
        assert (cards["m"]["permission"], cards["b"]["created"]) == ([1], 5)
        async with client.get("/v1/models/org/a") as response:
            assert await response.json() == cards["org/a"]
        async with client.get("/v1/models/nope") as response:
            assert (await error_of(response))[:2] == (404, "model_not_found")


@pytest.mark.parametrize("model", [5, None, ["m"], {}, True])
async def test_a_model_of_another_type_is_refused(model):
    async with (
        routing(Engine(models=["m", "n"])) as (_, client),
        client.post("/v1/embeddings", json={"model": model}) as response,
    ):
        assert (await error_of(response))[:2] == (400, "model_required")
