"""The HTTP routes of the standalone router.

In:  requests of OpenAI's API.   Out: the workers' answers, /health, /metrics.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

from kvplug.api_errors import ApiError, error_response
from kvplug.server.api.bodies import (
    Body,
    lora_path_of,
    max_tokens_of,
    namespace_of,
    read_body,
    unauditable,
)
from kvplug.server.api.prompts import Prompts
from kvplug.server.api.sessions import session_of
from kvplug.server.config import ServerConfig
from kvplug.server.observability.health import Health
from kvplug.server.observability.metrics import Metrics
from kvplug.server.proxy.forwarding import Forward, Proxy
from kvplug.server.workers.fleet import Fleet
from kvplug.server.workers.model_cards import Served
from kvplug.tokenization.prompt_kind import PromptKind

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_CHAT = "/v1/chat/completions"
_WORKER_HEADER = "x-kvplug-worker"  # of --router-mode direct: a worker, as --worker names it


class Api:
    """The handlers; `application` has them on their routes."""

    def __init__(
        self,
        config: ServerConfig,
        fleet: Fleet,
        proxy: Proxy,
        prompts: Prompts,
        metrics: Metrics,
        health: Health,
    ) -> None:
        self._fleet, self._proxy, self._prompts = fleet, proxy, prompts
        self._client_timeout_s = config.client_timeout_s
        self._max_body_bytes = config.max_body_bytes
        self._uses_sessions = config.router.mode == "rendezvous_hash"
        self._is_direct = config.router.mode == "direct"
        self._metrics, self._health = metrics, health
        self._started_s = int(time.time())
        self.application = web.Application(middlewares=[_errors_in_openai_form])
        self.application.add_routes(
            [
                web.post("/v1/completions", self.generate),
                web.post(_CHAT, self.generate),
                web.get("/v1/models", self.models),
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
            ]
        )

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """A completion or a chat: tokenize, route, forward."""
        raw = await self._read(request)
        body = await read_body(raw)
        (model, served), is_chat = self._model_of(body), request.path == _CHAT
        tokens = await self._prompts.tokens_of(
            {**body, "model": served.base},
            served.root,
            kind=PromptKind.CHAT if is_chat else PromptKind.COMPLETION,
            size=len(raw),
            digests=self._fleet.tokenizers_of(model),
            names_extra_keys=self._fleet.names_extra_keys(model),
        )
        forward = Forward(
            model=model,
            body=raw,
            tokens=tokens,
            namespace=namespace_of(body, served.lora_name),
            max_tokens=max_tokens_of(body, is_chat=is_chat),
            streams=body.get("stream") is True,
            unauditable=unauditable(body),
            session=session_of(request.headers, body, raw) if self._uses_sessions else "",
            worker=request.headers.get(_WORKER_HEADER, "") if self._is_direct else "",
        )
        return await self._proxy.forward(request, forward)

    async def models(self, request: web.Request) -> web.Response:
        """The models that can be asked for now."""
        cards = [
            {
                "id": name,
                "object": "model",
                "created": self._started_s,
                "owned_by": "kvplug",
                "root": served.root,
                "parent": served.base if served.lora_name else None,
            }
            for name, served in self._fleet.models.items()
        ]
        return web.json_response({"object": "list", "data": cards})

    async def health(self, request: web.Request) -> web.Response:
        """200 if any worker is up, 503 if none; the state of each and all findings either way."""
        body = self._health.body()
        return web.json_response(body, status=200 if body["status"] == "ok" else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text."""
        return web.Response(body=self._metrics.render(), headers=self._metrics.headers)

    async def _read(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._client_timeout_s):
                return await _limited(request.content, self._max_body_bytes)
        except TimeoutError as error:
            message = f"the body did not arrive within {self._client_timeout_s:g} s"
            raise ApiError(408, message, code="request_timeout") from error

    def _model_of(self, body: Body) -> tuple[str, Served]:
        model, models = body.get("model"), self._fleet.models
        if model is None and len(models) == 1:
            [model] = models  # vLLM too takes a body without a model
        adapter = f"{model}:{lora_path_of(body)}"
        if adapter in models:
            model = adapter  # as SGLang names it
        if not isinstance(model, str):
            raise ApiError(400, "the body must name a model", code="model_required", param="model")
        if (served := self._fleet.served_as(model)) is not None:
            return model, served
        if models:
            message = f"the model {model!r} does not exist; served are: {', '.join(models)}"
            raise ApiError(404, message, code="model_not_found", param="model")
        message = f"no worker that serves model {model!r} can be reached now"
        raise ApiError(503, message, code="no_worker")


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


@web.middleware
async def _errors_in_openai_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPException as error:
        message = f"{request.method} {request.path}: {error.reason}"
        return error_response(ApiError(error.status, message, code="no_such_route"))
    except ConnectionResetError:
        raise  # the client left: there is nobody to answer
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        message = "the router failed to handle the request; its log says why"
        return error_response(ApiError(500, message, code="internal_error"))
