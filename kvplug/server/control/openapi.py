"""/openapi.json: all routes of the router, as OpenAPI 3.1 has them.

In:  the table of the engines' endpoints, the messages of selections and workers.   Out: JSON.

What the engines answer is not described: it is theirs.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import msgspec
from aiohttp import web

from kvplug._version import __version__
from kvplug.server.api.endpoints import ENDPOINTS
from kvplug.server.control.messages import (
    AddWorker,
    ChangeWorker,
    Failed,
    Finish,
    Moved,
    Reservation,
    Select,
    Selection,
    WorkerList,
    WorkerState,
    schema_of,
)

_ANY: Final[dict[str, Any]] = {"type": "object"}
_JSON: Final = "application/json"
_ERROR: Final = {
    "description": "An error; under /v1/messages in Anthropic's form.",
    "content": {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}},
}


class ErrorDetails(msgspec.Struct, kw_only=True):
    """code: which error it is; param: what of the request is wrong, if it is one field."""

    message: str
    type: str
    param: str | None
    code: str | int


class Error(msgspec.Struct, kw_only=True):
    """An error in OpenAI's form."""

    error: ErrorDetails


class Operation(NamedTuple):
    """A route. asks, answers: what its bodies are; None for none. Statuses are those of success."""

    method: str
    path: str
    summary: str
    asks: Any = None
    answers: Any = None
    statuses: tuple[int, ...] = (200,)


_ONE_REQUEST, _ONE_WORKER = "/reservations/{id}", "/workers/{name}"
_CONTROL: Final = (
    Operation("POST", "/select", "select a worker, and reserve it if asked to", Select, Selection),
    Operation("GET", _ONE_REQUEST, "show a request in flight", answers=Reservation),
    Operation("POST", f"{_ONE_REQUEST}/first_token", "its prefill is done", statuses=(204,)),
    Operation("POST", f"{_ONE_REQUEST}/renew", "it is still served", statuses=(204,)),
    Operation("POST", f"{_ONE_REQUEST}/moved", "it went elsewhere", Moved, statuses=(204,)),
    Operation("POST", f"{_ONE_REQUEST}/finish", "it is over", Finish, statuses=(204,)),
    Operation("POST", f"{_ONE_REQUEST}/failed", "its worker failed", Failed, statuses=(204,)),
    Operation("DELETE", _ONE_REQUEST, "it is over, unanswered", statuses=(204,)),
    Operation("GET", "/workers", "list the workers", answers=WorkerList),
    Operation("POST", "/workers", "add a worker", AddWorker, WorkerState, (200, 201)),
    Operation("GET", _ONE_WORKER, "show a worker", answers=WorkerState),
    Operation("PATCH", _ONE_WORKER, "drain it, or change its taints", ChangeWorker, WorkerState),
    Operation("DELETE", _ONE_WORKER, "remove it", statuses=(204,)),
)
_ONE_RESPONSE: Final = "/v1/responses/{id}"
_OWN: Final = (
    Operation("GET", _ONE_RESPONSE, "a stored response, from the worker that has it", answers=dict),
    Operation("DELETE", _ONE_RESPONSE, "delete it", answers=dict),
    Operation("POST", f"{_ONE_RESPONSE}/cancel", "cancel it", answers=dict),
    Operation("GET", "/v1/models", "the models of all workers", answers=dict),
    Operation("GET", "/v1/models/{name}", "one of them", answers=dict),
    Operation("GET", "/health", "whether requests are served", answers=dict, statuses=(200, 503)),
    Operation("GET", "/metrics", "Prometheus text"),
    Operation("GET", "/openapi.json", "this description", answers=dict),
)
OPERATIONS: Final = (
    *(Operation("POST", each.path, each.summary, dict, dict) for each in ENDPOINTS),
    *_OWN,
    *_CONTROL,
)


def description() -> dict[str, Any]:
    """The whole document."""
    kinds = {each for op in _CONTROL for each in (op.asks, op.answers) if each is not None}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    _, components = schema_of(*ordered, Error)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvplug router", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"adminKey": {"type": "http", "scheme": "bearer"}},
        },
    }


def openapi_route() -> web.RouteDef:
    """It does not change while the router runs."""
    body = msgspec.json.encode(description())

    async def openapi(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=_JSON)

    return web.get("/openapi.json", openapi)


def _described(operation: Operation) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": operation.summary}
    if operation.answers is not None:
        answer["content"] = {_JSON: {"schema": _schema(operation.answers)}}
    found: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": _id_of(operation),
        "responses": {**{str(s): answer for s in operation.statuses}, "default": _ERROR},
    }
    if names := re.findall(r"{(\w+)}", operation.path):
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if operation.asks is not None:
        content = {_JSON: {"schema": _schema(operation.asks)}}
        is_required = operation.asks not in (Finish, Failed)
        found["requestBody"] = {"required": is_required, "content": content}
    if operation in _CONTROL:
        found["security"] = [{"adminKey": []}, {}]
    return found


def _schema(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - a type
    return _ANY if kind is dict else {"$ref": f"#/components/schemas/{kind.__name__}"}


def _id_of(operation: Operation) -> str:
    words = re.findall(r"\w+", operation.path)
    return "_".join([operation.method.lower(), *words])
