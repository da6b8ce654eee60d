"""Journeys of the requests that an application serves.

In:  HTTP requests.   Out: a journey of each, begun and ended; headers on its answer.
"""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.typedefs import Handler

from kvplug.server.observability.journey import (
    CLIENT_LEFT,
    REQUEST_ID,
    Journey,
    RequestTimes,
    request_id_of,
    set_current,
)
from kvplug.server.observability.tracing import Tracer

_KEY = "kvplug.journey"


class Following:
    """follow an application; `times` of all its requests with a body."""

    def __init__(self, tracer: Tracer, *, explains: bool) -> None:
        self.times = RequestTimes()
        self._tracer, self._explains = tracer, explains

    def follow(self, application: web.Application) -> None:
        """To be called before it is served."""
        application.middlewares.insert(0, self._middleware)
        application.on_response_prepare.append(self._add_headers)

    def begin(self, request: web.Request) -> Journey:
        """It is the current one of this task now."""
        span = self._tracer.begin(f"{request.method} {request.path}", request.headers)
        journey = Journey(self.times, request_id_of(request.headers), span)
        journey.facts |= {"method": request.method, "path": request.path}
        request[_KEY] = journey
        set_current(journey)
        return journey

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "POST":
            return await handler(request)
        journey, status = self.begin(request), CLIENT_LEFT
        try:
            response = await handler(request)
            status = response.status
        except asyncio.CancelledError:
            raise
        except ConnectionResetError:
            raise
        else:
            return response
        finally:
            if not journey.is_handed_over:
                journey.end(status)

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        journey: Journey | None = request.get(_KEY)
        if journey is None:
            return
        response.headers[REQUEST_ID] = journey.request_id
        if self._explains:
            response.headers.update(journey.explanation())
