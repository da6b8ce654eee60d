"""The body of a request, as long as it may be and no longer.

In:  a request.   Out: its bytes, or ApiError.
"""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp
from aiohttp import web

from kvplug.api_errors import ApiError
from kvplug.server.config import ServerConfig
from kvplug.setting import shown

_ENCODINGS: Final = frozenset(("identity", "gzip", "deflate"))


class BodyReader:
    """read a request."""

    def __init__(self, config: ServerConfig) -> None:
        self._timeout_s, self._max_bytes = config.client_timeout_s, config.max_body_bytes

    async def read(self, request: web.Request) -> bytes:
        """All of it; ApiError if it is too large, or takes too long."""
        _require_known_encoding(request)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await _limited(request.content, self._max_bytes)
        except TimeoutError as error:
            message = f"the body did not arrive within {self._timeout_s:g} s"
            raise ApiError(408, message, code="request_timeout") from error
        except web.RequestPayloadError as error:
            message = f"the body cannot be read: {error.__cause__ or error}"
            raise ApiError(400, message, code="invalid_body") from error


def _require_known_encoding(request: web.Request) -> None:
    """What aiohttp decompresses, piece by piece, so that the limit holds for what comes out."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() not in _ENCODINGS:
        message = f"Content-Encoding {shown(encoding)}: expected {', '.join(sorted(_ENCODINGS))}"
        raise ApiError(415, message, code="unsupported_encoding")


async def _limited(content: aiohttp.StreamReader, max_bytes: int) -> bytes:
    """A whole body. `Request.read` of aiohttp 3.14 takes all that has arrived before anybody else
    gets a turn: beside bodies of 26 MB, others waited twice as long.
    """
    chunks, num_bytes = [], 0
    async for chunk in content.iter_any():
        chunks.append(chunk)
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            message = f"the body is too large: expected at most {max_bytes} bytes"
            raise ApiError(413, message, code="body_too_large")
    return b"".join(chunks)
