"""Errors in the form of the API that was asked, for the router and for a simulated engine.

In:  what went wrong, the path of the request.
Out: {"error": {"message", "type", "param", "code"}} with its status; of Anthropic's API
{"type": "error", "error": {"type", "message"}}.
"""

from __future__ import annotations

import json
from typing import Final

from aiohttp import web

_ANTHROPIC: Final = "/v1/messages"
_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """Answer the request with this status and message.

    kind: the `type` of the error; OpenAI's for the status if none is given. retry_after_s: when to
    try again, if that is known.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | int,
        param: str | None = None,
        kind: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}


def error_body(error: ApiError, path: str = "") -> dict[str, object]:
    """The JSON body of an error, in the form of the API at this path."""
    if path.startswith(_ANTHROPIC):
        usual = "invalid_request_error" if error.status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(error.status, usual)
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: ApiError, path: str = "") -> web.Response:
    """The whole answer."""
    return web.json_response(error_body(error, path), status=error.status, headers=error.headers)


def error_event(error: ApiError, path: str = "") -> bytes:
    """The same inside a stream whose status went out already."""
    name = b"event: error\n" if path.startswith(_ANTHROPIC) else b""
    return name + b"data: " + json.dumps(error_body(error, path)).encode() + b"\n\n"
