"""Errors in the form of OpenAI's API.

In:  what went wrong.   Out: {"error": {"message", "type", "param", "code"}} with its status.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from aiohttp import web


class ApiError(Exception):
    """Answer the request with this status and message."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


class _Kind(NamedTuple):
    below: int
    name: str


_KINDS = (_Kind(500, "invalid_request_error"), _Kind(600, "server_error"))


def error_body(error: ApiError) -> dict[str, object]:
    """The JSON body of an error."""
    kind = next(kind.name for kind in _KINDS if error.status < kind.below)
    return {
        "error": {
            "message": error.message,
            "type": kind,
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
