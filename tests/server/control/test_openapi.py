"""/openapi.json has every route, and answers are what it says."""

import re

import jsonschema
import pytest

from kvplug.server.control.openapi import OPERATIONS, description
from tests.server.engine import Engine
from tests.server.test_service import routing

PAGE = description()


def validator_of(name):
    schema = {"$ref": f"#/components/schemas/{name}", "components": PAGE["components"]}
    return jsonschema.Draft202012Validator(schema)


async def test_every_route_is_described_and_no_other():
    async with routing(Engine()) as (service, client):
        async with client.get("/openapi.json") as response:
            page = await response.json()
        served = {
            (route.method, re.sub(r"{(\w+):.*?}(?=/|$)", r"{\1}", route.resource.canonical))
            for route in service._runner.app.router.routes()
            if route.method != "HEAD"
        }
    assert page["openapi"] == "3.1.0"
    described = {(m.upper(), path) for path, each in page["paths"].items() for m in each}
    assert described == served == {(each.method, each.path) for each in OPERATIONS}
    ids = [each["operationId"] for path in page["paths"].values() for each in path.values()]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", list(PAGE["components"]["schemas"]))
def test_schemas_are_schemas(name):
    jsonschema.Draft202012Validator.check_schema(PAGE["components"]["schemas"][name])


def references(node):
    if isinstance(node, dict):
        yield from ([node["$ref"]] if "$ref" in node else [])
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from references(each)


def test_references_lead_somewhere():
    for reference in references(PAGE):
        assert reference.removeprefix("#/components/schemas/") in PAGE["components"]["schemas"]


async def test_answers_are_as_described():
    async with routing(Engine(), Engine()) as (service, client):
        url = next(iter(service.fleet.workers))
        asked = {"token_ids": [1, 2, 3, 4, 5], "reserve": True, "explain": True}
        validator_of("Select").validate(asked)
        async with client.post("/select", json=asked) as response:
            selection = await response.json()
        validator_of("Selection").validate(selection)
        async with client.get(f"/reservations/{selection['request_id']}") as response:
            validator_of("Reservation").validate(await response.json())
        async with client.get("/workers") as response:
            validator_of("WorkerList").validate(await response.json())
        path = f"/workers/{url.replace('/', '%2F')}"
        async with client.get(path) as response:
            validator_of("WorkerState").validate(await response.json())
        for method, path in (("POST", "/select"), ("GET", "/reservations/x"), ("GET", "/x")):
            async with client.request(method, path, json={"x": 1}) as response:
                assert response.status >= 400
                validator_of("Error").validate(await response.json())


@pytest.mark.parametrize("wrong", [{"token_ids": "a"}, {"tokens": [1]}, {"dp_rank": -1}])
def test_what_is_refused_is_wrong_by_the_schema(wrong):
    assert not validator_of("Select").is_valid(wrong)
