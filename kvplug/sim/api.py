"""The HTTP routes of a simulated engine.

In:  requests of OpenAI's API, and of vLLM's own.   Out: answers, streamed or whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from aiohttp import web

from kvplug.api_errors import ApiError, error_response
from kvplug.errors import ConfigError
from kvplug.sim.completions import Ask, AskReader, Reply, json_object, vllm_error
from kvplug.sim.engine_config import SimConfig
from kvplug.sim.ranks import Ranks
from kvplug.sim.request import Request
from kvplug.sim.runner import EngineRunner
from kvplug.sim.scheduler import Emitted
from kvplug.sim.tokenizer import Tokenizer
from kvplug.sim.vllm_metrics import HEADERS, Metrics

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_CHAT = "/v1/chat/completions"
_MAX_BODY_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class _Work:
    """What one HTTP request asks of one rank: a request per prompt."""

    runner: EngineRunner
    requests: list[Request] = field(default_factory=list)

    def submit(self, ask: Ask) -> None:
        for prompt, max_tokens in zip(ask.prompts, ask.max_tokens, strict=True):
            request = self.runner.submit(prompt, max_tokens, lora=ask.lora, salt=ask.salt)
            self.requests.append(request)

    def cancel(self) -> None:
        for each in self.requests:
            self.runner.cancel(each)


class Api:
    """The handlers; `application` has them on their routes."""

    def __init__(
        self,
        config: SimConfig,
        ranks: Ranks,
        tokenizer: Tokenizer,
        event_sources: Mapping[str, Mapping[str, object]],
    ) -> None:
        """`event_sources`: what /kv_event_sources answers: by rank, where its events are."""
        self._config, self._ranks, self._tokenizer = config, ranks, tokenizer
        self._event_sources = event_sources
        self._reader = AskReader(tokenizer, config.loras, config.scheduler.max_model_len)
        self._metrics = Metrics([each.engine for each in ranks], config.served_model_name)
        self.application = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors])
        self.application.add_routes(
            [
                web.post("/v1/completions", self.generate),
                web.post(_CHAT, self.generate),
                web.get("/v1/models", self.models),
                web.get("/health", self.health),
                web.post("/tokenize", self.tokenize),
                web.post("/reset_prefix_cache", self.reset_prefix_cache),
                web.get("/kv_event_sources", self.kv_event_sources),
                web.get("/metrics", self.metrics),
            ]
        )

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """A completion or a chat."""
        ask = self._reader.read(await request.read(), is_chat=request.path == _CHAT)
        work = _Work(self._ranks.for_request(request.headers))
        try:
            work.submit(ask)
            answer = self._stream if ask.is_stream else self._whole
            return await answer(request, ask, work)
        finally:  # a client that leaves cancels its work
            work.cancel()

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
        """Forget the cache of each rank; `success` is false while a request has blocks."""
        done = [each.engine.reset_prefix_cache() for each in self._ranks]
        return web.json_response({"success": all(done)})

    async def kv_event_sources(self, request: web.Request) -> web.Response:
        """By rank, the settings of its publisher, as vLLM 0.32 says them."""
        return web.json_response(self._event_sources)

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text."""
        return web.Response(body=self._metrics.render(), headers=HEADERS)

    async def _whole(self, request: web.Request, ask: Ask, work: _Work) -> web.Response:
        texts = [await self._text_of(work.runner, each) for each in work.requests]
        return web.json_response(Reply(ask).whole(texts, work.requests))

    async def _text_of(self, runner: EngineRunner, submitted: Request) -> str:
        token_ids = [token.token_id async for token in runner.tokens(submitted)]
        return self._tokenizer.decode(token_ids)

    async def _stream(self, request: web.Request, ask: Ask, work: _Work) -> web.StreamResponse:
        reply = Reply(ask)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async with asyncio.TaskGroup() as tasks:
            for index, each in enumerate(work.requests):
                tokens = work.runner.tokens(each)
                tasks.create_task(self._write_tokens(response, reply, index, tokens))
        await response.write(reply.closing(work.requests))
        await response.write_eof()
        return response

    async def _write_tokens(
        self,
        response: web.StreamResponse,
        reply: Reply,
        index: int,
        tokens: AsyncIterator[Emitted],
    ) -> None:
        async for token in tokens:
            text = self._tokenizer.decode([token.token_id])
            await response.write(reply.chunk(index, text, token.finish_reason, token.token_id))


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
