"""The HTTP routes of a simulated engine.

In:  requests of OpenAI's API, and of vLLM's own.   Out: answers, streamed or whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from kvplug.api_errors import ApiError, error_response
from kvplug.errors import ConfigError
from kvplug.sim.completions import Ask, AskReader, Reply, json_object, vllm_error
from kvplug.sim.engine_config import SimConfig
from kvplug.sim.request import Request
from kvplug.sim.runner import EngineRunner
from kvplug.sim.tokenizer import Tokenizer
from kvplug.sim.vllm_metrics import HEADERS, Metrics

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_CHAT = "/v1/chat/completions"
_MAX_BODY_BYTES = 32 * 2**20


class Api:
    """The handlers; `application` has them on their routes."""

    def __init__(self, config: SimConfig, runner: EngineRunner, tokenizer: Tokenizer) -> None:
        self._config, self._runner, self._tokenizer = config, runner, tokenizer
        self._reader = AskReader(tokenizer, config.loras, config.scheduler.max_model_len)
        self._metrics = Metrics(runner.engine, config.served_model_name)
        self.application = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors])
        self.application.add_routes(
            [
                web.post("/v1/completions", self.generate),
                web.post(_CHAT, self.generate),
                web.get("/v1/models", self.models),
                web.get("/health", self.health),
                web.post("/tokenize", self.tokenize),
                web.post("/reset_prefix_cache", self.reset_prefix_cache),
                web.get("/metrics", self.metrics),
            ]
        )

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """A completion or a chat."""
        ask = self._reader.read(await request.read(), is_chat=request.path == _CHAT)
        submitted: list[Request] = []
        try:
            for prompt, max_tokens in zip(ask.prompts, ask.max_tokens, strict=True):
                submitted.append(
                    self._runner.submit(prompt, max_tokens, lora=ask.lora, salt=ask.salt)
                )
            answer = self._stream if ask.is_stream else self._whole
            return await answer(request, ask, submitted)
        finally:  # a client that leaves cancels its work
            for each in submitted:
                self._runner.cancel(each)

    async def models(self, request: web.Request) -> web.Response:
        """The model and its adapters."""
        cards = [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "kvplug",
                "root": lora.path if lora else self._config.root,
                "parent": self._config.served_model_name if lora else None,
                "max_model_len": self._config.scheduler.max_model_len,
            }
            for name, lora in self._config.loras.items()
        ]
        return web.json_response({"object": "list", "data": cards})

    async def health(self, request: web.Request) -> web.Response:
        """200 with an empty body, as vLLM's."""
        return web.Response()

    async def tokenize(self, request: web.Request) -> web.Response:
        """The token ids of a prompt, or of messages."""
        body = json_object(await request.read())
        [tokens, *_] = self._reader.prompts(body, is_chat="messages" in body)
        max_model_len = self._config.scheduler.max_model_len
        answer = {"count": len(tokens), "max_model_len": max_model_len, "tokens": list(tokens)}
        return web.json_response({**answer, "token_strs": None})

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Forget the cache; `success` is false while a request has blocks."""
        return web.json_response({"success": self._runner.engine.reset_prefix_cache()})

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text."""
        return web.Response(body=self._metrics.render(), headers=HEADERS)

    async def _whole(
        self, request: web.Request, ask: Ask, submitted: list[Request]
    ) -> web.Response:
        texts = [await self._text_of(each) for each in submitted]
        return web.json_response(Reply(ask).whole(texts, submitted))

    async def _text_of(self, submitted: Request) -> str:
        token_ids = [token.token_id async for token in self._runner.tokens(submitted)]
        return self._tokenizer.decode(token_ids)

    async def _stream(
        self, request: web.Request, ask: Ask, submitted: list[Request]
    ) -> web.StreamResponse:
        reply = Reply(ask)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async with asyncio.TaskGroup() as tasks:
            for index, each in enumerate(submitted):
                tasks.create_task(self._write_tokens(response, reply, index, each))
        await response.write(reply.closing(submitted))
        await response.write_eof()
        return response

    async def _write_tokens(
        self, response: web.StreamResponse, reply: Reply, index: int, submitted: Request
    ) -> None:
        async for token in self._runner.tokens(submitted):
            text = self._tokenizer.decode([token.token_id])
            await response.write(reply.chunk(index, text, token.finish_reason))


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except ConfigError as error:  # a request that the engine refused
        return error_response(vllm_error(400, str(error)))
    except web.HTTPException as error:
        message = f"{request.method} {request.path}: {error.reason}"
        return error_response(vllm_error(error.status, message))
