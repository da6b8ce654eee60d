"""The HTTP routes of the standalone router.

In:  requests of OpenAI's API.   Out: the workers' answers, /health, /metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Final, Protocol

from aiohttp import web

from kvplug.api_errors import ApiError, error_response
from kvplug.server.api.admission import Admission
from kvplug.server.api.asked import Asked
from kvplug.server.api.endpoints import ENDPOINTS
from kvplug.server.api.prompts import Prompts
from kvplug.server.api.reading import BodyReader
from kvplug.server.config import ServerConfig
from kvplug.server.observability.health import Health
from kvplug.server.observability.journey import CLIENT_LEFT, Step, current
from kvplug.server.observability.metrics import Metrics
from kvplug.server.proxy.asked import Forward
from kvplug.server.workers.fleet import Fleet
from kvplug.setting import shown

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_ENDPOINTS: Final = {each.path: each for each in ENDPOINTS}


class Forwards(Protocol):
    """Who sends a request on: the proxy, or nginx, which is told where to."""

    async def forward(self, request: web.Request, forward: Forward) -> web.StreamResponse:
        """What the client gets."""


class Api:
    """The handlers; `application` has them on their routes, `admission` says which wait."""

    def __init__(
        self,
        config: ServerConfig,
        fleet: Fleet,
        proxy: Forwards,
        prompts: Prompts,
        metrics: Metrics,
        health: Health,
    ) -> None:
        self._fleet, self._proxy = fleet, proxy
        self._asked = Asked(config, fleet, prompts)
        self._reader, self.admission = BodyReader(config), Admission(config)
        self._metrics, self._health = metrics, health
        self.application = web.Application(middlewares=[_errors_in_form])
        self.application.add_routes(
            [
                *(web.post(path, self.forward) for path in _ENDPOINTS),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{name:.+}", self.model),
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
            ]
        )

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """What a worker answers: tokenize, route, forward."""
        raw, endpoint = await self._reader.read(request), _ENDPOINTS[request.path]
        current().mark(Step.READ)
        async with self.admission.turn() if endpoint.is_work else nullcontext():
            current().mark(Step.QUEUE)
            forward = await self._asked.forward_of(raw, endpoint, request.headers)
            return await self._proxy.forward(request, forward)

    async def models(self, request: web.Request) -> web.Response:
        """The models that can be asked for now, as their engines describe them."""
        return web.json_response({"object": "list", "data": list(self._fleet.cards().values())})

    async def model(self, request: web.Request) -> web.Response:
        """One of them."""
        name = request.match_info["name"]
        if (card := self._fleet.cards().get(name)) is None:
            raise ApiError(404, f"the model {shown(name)} does not exist", code="model_not_found")
        return web.json_response(card)

    async def health(self, request: web.Request) -> web.Response:
        """200 if any worker is up, 503 if none; the state of each and all findings either way."""
        body = self._health.body()
        return web.json_response(body, status=200 if body["status"] == "ok" else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text."""
        return web.Response(body=self._metrics.render(), headers=self._metrics.headers)


@web.middleware
async def _errors_in_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error, request.path)
    except web.HTTPException as error:
        message = f"{request.method} {request.path}: {error.reason}"
        refusal = ApiError(error.status, message, code="no_such_route")
        if "Allow" in error.headers:  # of 405
            refusal.headers["Allow"] = error.headers["Allow"]
        return error_response(refusal, request.path)
    except ConnectionResetError:
        return web.Response(status=CLIENT_LEFT)  # there is nobody who would get it
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        message = "the router failed to handle the request; its log says why"
        return error_response(ApiError(500, message, code="internal_error"), request.path)
