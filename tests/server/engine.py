"""A small OpenAI-compatible engine on a real socket: for what real engines do not do on request
(die before an answer, answer half, send odd bytes)."""

import asyncio
import json
from contextlib import asynccontextmanager

from aiohttp import web

from kvplug.server.api.endpoints import ENDPOINTS

MODEL = "m"


class Engine:
    """Counts requests and keeps the last one; `behaviour` says what it does with the next.

    ok, refuse, fail, redirect; die before the answer, half of it (in the middle of an event);
    odd (a header of 100 kB); silent, slow (for ever), gated (until `gate`). `is_healthy`:
    /health waits. `usage` ends its answers, streamed or not. `responses` are stored, `asked`
    are requests for them. `says` holds the bodies of further routes, `card` what /v1/models
    says besides.
    """

    def __init__(self, models=(MODEL,), adapters=(), owned_by="vllm"):
        self.models, self.behaviour, self.gate = models, "ok", asyncio.Event()
        self.adapters, self.owned_by = adapters, owned_by
        self.num_requests, self.last_body, self.last_headers = 0, b"", {}
        self.api_key, self.root, self.lora_path = None, "", "x"
        self.last_path, self.is_healthy = "", asyncio.Event()
        self.is_healthy.set()
        self.num_cancelled, self.usage, self.says = 0, None, {}
        self.card = {}
        self.responses, self.asked = {}, []

    async def health(self, request):
        await self.is_healthy.wait()
        return web.Response()

    async def list_models(self, request):
        self._require_key(request)
        common = {"object": "model", "owned_by": self.owned_by} | self.card
        cards = [{"id": name, "root": self.root, **common} for name in self.models]
        base = self.models[0] if self.models else None
        cards += [
            {"id": name, "root": self.lora_path, "parent": base, **common} for name in self.adapters
        ]
        return web.json_response({"object": "list", "data": cards})

    async def say(self, request):
        if request.path not in self.says:
            raise web.HTTPNotFound
        body = self.says[request.path]
        return web.Response(body=body if isinstance(body, bytes) else json.dumps(body).encode())

    async def stored(self, request):
        self.asked.append((request.method, request.path_qs))
        if self.behaviour == "die":
            request.transport.close()
            await self._wait_for_the_end()
        response_id = request.match_info["id"]
        if response_id not in self.responses:
            return web.json_response({"error": {"message": "not found"}}, status=404)
        if request.method == "DELETE":
            return web.json_response(self.responses.pop(response_id))
        return web.json_response(self.responses[response_id])

    async def generate(self, request):
        if request.path in self.says:
            return await self.say(request)
        self._require_key(request)
        self.num_requests += 1
        self.last_body, self.last_headers = await request.read(), request.headers
        self.last_path = request.path_qs
        if self.behaviour == "redirect":
            raise web.HTTPTemporaryRedirect(self.says["redirect"])
        if self.behaviour == "odd":
            return web.Response(headers={"x-odd": "x" * 100_000})
        if self.behaviour == "die":
            request.transport.close()
        if self.behaviour in ("die", "silent"):
            await self._wait_for_the_end()
        if json.loads(self.last_body).get("stream"):
            return await self._stream(request)
        if self.behaviour in ("refuse", "fail"):
            status = 400 if self.behaviour == "refuse" else 500
            return web.json_response({"error": {"message": "too long"}}, status=status)
        answer = {"choices": [{"text": "hi"}]} | self._usage()
        return web.json_response(answer, headers={"x-engine": "1"})

    def _require_key(self, request):
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            raise web.HTTPUnauthorized

    def _usage(self):
        return {"usage": self.usage} if self.usage else {}

    async def _stream(self, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": []}\n\n')
        if self.behaviour == "half":
            await response.write(b'data: {"choices": [{"te')
            request.transport.close()
        if self.behaviour == "gated":
            await self.gate.wait()
        if self.behaviour == "slow":
            await self._wait_for_the_end()
        if self.usage:
            chunk = json.dumps({"choices": []} | self._usage()).encode()
            await response.write(b"data: " + chunk + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _wait_for_the_end(self):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


@asynccontextmanager
async def served(engine, port=0, *, socket=None, **server):
    """The engine on a free port, or on a Unix socket; yields its URL. `server`: what aiohttp's
    server is told.
    """
    app = web.Application(client_max_size=2**26)
    app.add_routes(
        [
            web.get("/health", engine.health),
            web.get("/v1/models", engine.list_models),
            *(web.post(each.path, engine.generate) for each in ENDPOINTS),
            web.route("*", "/v1/responses/{id}", engine.stored),
            web.post("/v1/responses/{id}/cancel", engine.stored),
            web.route("*", "/{path}", engine.say),
        ]
    )
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, **server)
    await runner.setup()
    if socket is None:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    else:
        await web.UnixSite(runner, str(socket)).start()
        url = f"unix:{socket}"
    try:
        yield url
    finally:
        await runner.cleanup()
