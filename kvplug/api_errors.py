"""Errors in the form of OpenAI's API, for the router and for a simulated engine.

In:  what went wrong.   Out: {"error": {"message", "type", "param", "code"}} with its status.
"""

from __future__ import annotations

import json

from aiohttp import web


class ApiError(Exception):
    """Answer the request with this status and message.

    kind: the `type` of the error; OpenAI's for the status if none is given.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | int,
        param: str | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")


def error_body(error: ApiError) -> dict[str, object]:
    """The JSON body of an error."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: ApiError) -> web.Response:
    """The whole answer."""
    return web.json_response(error_body(error), status=error.status)


def error_event(error: ApiError) -> bytes:
    """The same inside a stream whose status went out already."""
    return b"data: " + json.dumps(error_body(error)).encode() + b"\n\n"
