"""An engine that counts: each token is one more than the one before it, as vLLM would stream it.

In:  completions and chats.   Out: streams with token ids if they are asked for; cut where a test
wants it.
"""

import json
from contextlib import asynccontextmanager

from aiohttp import web

CHAT_PROMPT = [7, 8, 9]


def compact(body):
    return json.dumps(body, separators=(",", ":")).encode()


class CountingEngine:
    """`dies_after`: so many tokens of each answer the connection ends, in the middle of an event;
    or at its "end", before the usage, or behind that ("usage"); None: never. `silent`: tokens
    whose text comes with the next one, as of half a character.
    """

    def __init__(self, name, *, dies_after=None, silent=()):
        self.name, self.dies_after, self.silent, self.bodies = name, dies_after, silent, []

    async def health(self, request):
        return web.Response()

    async def models(self, request):
        card = {"id": "m", "root": "", "max_model_len": 1000}
        return web.json_response({"data": [card]})

    async def generate(self, request):
        body = await request.json()
        self.bodies.append((request.path, body))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_chat = request.path == "/v1/chat/completions"
        prompt = CHAT_PROMPT if is_chat else body["prompt"]
        number = 0
        for number, chunk in self._chunks(body, prompt, is_chat):
            if type(self.dies_after) is int and number > self.dies_after:
                await response.write(b"data: " + compact(chunk)[:40])
                request.transport.close()
                return response
            await response.write(b"data: " + compact(chunk) + b"\n\n")
        if self.dies_after == "end":
            request.transport.close()
            return response
        if body.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": len(prompt), "completion_tokens": number}
            usage["total_tokens"] = len(prompt) + number
            await response.write(b"data: " + compact(self._chunk(is_chat, []) | {"usage": usage}))
            await response.write(b"\n\n")
        if self.dies_after == "usage":
            request.transport.close()
            return response
        await response.write(b"data: [DONE]\n\n")
        return response

    def _chunks(self, body, prompt, is_chat):
        with_ids, num, held = body.get("return_token_ids"), body.get("max_tokens") or 5, ""
        if is_chat:
            delta = {"role": "assistant", "content": ""}
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            yield (
                0,
                self._chunk(True, [choice]) | {"prompt_token_ids": prompt if with_ids else None},
            )
        for number in range(1, num + 1):
            token = prompt[-1] + number
            text, held = ("", f" {token}") if token in self.silent else (f"{held} {token}", "")
            shape = {"delta": {"content": text}} if is_chat else {"text": text}
            choice = {"index": 0, **shape, "logprobs": None}
            choice["finish_reason"] = "length" if number == num else None
            choice["token_ids"] = [token] if with_ids else None
            if not is_chat:
                choice["prompt_token_ids"] = prompt if with_ids and number == 1 else None
            yield number, self._chunk(is_chat, [choice])

    def _chunk(self, is_chat, choices):
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        head = {"id": f"id-{self.name}", "object": kind, "created": 1, "model": "m"}
        return {**head, "choices": choices}


@asynccontextmanager
async def counting(engine):
    """Its URL."""
    app = web.Application()
    app.add_routes(
        [
            web.get("/health", engine.health),
            web.get("/v1/models", engine.models),
            web.post("/v1/completions", engine.generate),
            web.post("/v1/chat/completions", engine.generate),
        ]
    )
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
