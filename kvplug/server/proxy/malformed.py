"""Requests that are no HTTP: counted, and not logged at length.

In:  what aiohttp's server logs.   Out: a count; one line each at debug level.

aiohttp answers them with 400 and logs each at ERROR, with a traceback and the bytes of the request:
anybody could fill a disk with it. (aiohttp 3.14)
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvplug.api_errors import ApiError, error_response
from kvplug.setting import shown

logger = logging.getLogger(__name__)

_OF_AIOHTTP: Final = logging.getLogger("aiohttp.server")


class Malformed(logging.Filter):
    """start, stop; `num` requests so far. `refusal` is for what is older than HTTP/1.0."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def start(self) -> None:
        """Look at what aiohttp logs."""
        _OF_AIOHTTP.addFilter(self)

    def stop(self) -> None:
        """No longer."""
        _OF_AIOHTTP.removeFilter(self)

    def refusal(self) -> web.Response:
        """The answer to a request line without a version; the connection is closed behind it."""
        self.num += 1
        status = HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
        error = ApiError(status, "expected HTTP/1.0 or HTTP/1.1", code="http_version")
        response = error_response(error)
        response.force_close()
        return response

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether aiohttp's own record is logged."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        self.num += 1
        logger.debug("a request is no HTTP: %s", shown(error.message))
        return False
