"""Journeys of the requests that an application serves.

In:  HTTP requests.   Out: a journey of each, begun and ended; headers on its answer.
"""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from kvplug.server.api.endpoints import ENDPOINTS
from kvplug.server.observability.journey import (
    CLIENT_LEFT,
    Journey,
    RequestTimes,
    request_id_of,
    set_current,
)
from kvplug.server.observability.tracing import Tracer

_PATHS = frozenset(each.path for each in ENDPOINTS)
_KEY = web.RequestKey("journey", Journey)


class Following:
    """follow an application; `times` of all its requests to endpoints of the engines."""

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
        request_id = request_id_of(request.headers)
        journey = Journey(self.times, request_id, span, explains=self._explains)
        journey.facts |= {"method": request.method, "path": request.path}
        request[_KEY] = journey
        set_current(journey)
        return journey

    @property
    def _middleware(self) -> Middleware:
        @web.middleware
        async def follow(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.method != "POST" or request.path not in _PATHS:
                return await handler(request)
            journey, status = self.begin(request), CLIENT_LEFT
            try:
                response = await handler(request)
                status = response.status
                return response
            finally:
                if not journey.is_handed_over:
                    journey.end(status)

        return follow

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        journey = request.get(_KEY)
        if journey is not None:
            response.headers.update(journey.answer_headers)
