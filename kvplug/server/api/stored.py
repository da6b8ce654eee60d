"""Responses that an engine has stored, which no other engine knows: /v1/responses/{id}.

In:  the id of a response.   Out: the answer of the worker that has it; requests that continue it
(`previous_response_id`) go there, too.

All workers are asked with the client's own headers, the one first that had the response before.
Nothing is noted when a response is made, so a restarted router, or one of several, finds it too.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from contextlib import suppress
from typing import Final

import msgspec
from aiohttp import web

from kvplug.api_errors import ApiError
from kvplug.server.api.app import Forwards
from kvplug.server.config import ServerConfig
from kvplug.server.proxy.answers import is_event_stream
from kvplug.server.proxy.asked import Forward
from kvplug.server.proxy.client import ClientAnswer
from kvplug.server.proxy.connection import LostError
from kvplug.server.proxy.relay import Relay
from kvplug.server.proxy.upstream import Outgoing, Upstream, passed_on
from kvplug.server.workers.fleet import Fleet

_PATH: Final = "/v1/responses"
_NOT_FOUND: Final = 404
_MAX_KNOWN: Final = 10_000
# What engines call them, and nothing that could be part of another path.
_ID: Final = "[A-Za-z0-9_-]{1,256}"


class _Continued(msgspec.Struct):
    previous_response_id: str | None = None


_decoder: Final = msgspec.json.Decoder(_Continued)


class StoredResponses:
    """`routes` for an application; worker_of a body that continues a response, or `continuing`
    who forwards it.
    """

    def __init__(self, config: ServerConfig, fleet: Fleet, upstream: Upstream) -> None:
        self._timeout_s = config.client_timeout_s
        self._fleet, self._upstream = fleet, upstream
        self._known: OrderedDict[str, str] = OrderedDict()
        one = f"{_PATH}/{{id:{_ID}}}"
        self.routes = [
            web.get(one, self.forward),
            web.delete(one, self.forward),
            web.post(f"{one}/cancel", self.forward),
        ]

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """What the worker answers that has the response; 404 if none has it."""
        response_id = request.match_info["id"]
        body = await request.read() if request.can_read_body else b""
        for name in self._in_order(response_id):
            with suppress(LostError):
                answer = await self._ask(name, request, body)
                if answer is not None:
                    self._note(response_id, name)
                    return answer
        message = f"no worker has the response {response_id!r}"
        raise ApiError(_NOT_FOUND, message, code="response_not_found")

    def continuing(self, forwards: Forwards) -> Forwards:
        """The same, but what continues a response goes to the worker that has it."""
        return _Continuing(self, forwards)

    async def worker_of(self, request: web.Request, raw: bytes, model: str) -> str:
        """Of the workers of the model, the one that has the response which a body continues; ""
        if there is no choice, or none says that it has it.
        """
        candidates = self._fleet.candidates(model)
        if len(candidates) < 2 or (response_id := _continued_by(raw)) is None:
            return ""
        known = self._known.get(response_id)
        if known in candidates:
            return known
        names = sorted(candidates)
        has = await asyncio.gather(*(self._has(name, request, response_id) for name in names))
        for name, is_there in zip(names, has, strict=True):
            if is_there:
                self._note(response_id, name)
                return name
        return ""

    async def _has(self, name: str, request: web.Request, response_id: str) -> bool:
        question = request.clone(method="GET", rel_url=f"{_PATH}/{response_id}")
        outgoing = Outgoing(self._fleet.url_of(name), None, question, b"")
        try:
            async with self._upstream.post(outgoing) as answer:
                await answer.whole()
                return answer.status == web.HTTPOk.status_code
        except (LostError, ApiError):
            return False

    async def _ask(self, name: str, request: web.Request, body: bytes) -> web.StreamResponse | None:
        """None if the worker does not have it."""
        outgoing = Outgoing(self._fleet.url_of(name), None, request, body)
        async with self._upstream.post(outgoing) as answer:
            if answer.status == _NOT_FOUND:
                await answer.whole()
                return None
            client = ClientAnswer(request, self._timeout_s)
            if is_event_stream(answer.headers):
                relay = Relay(answer, client, lambda: None)
                await relay.begin()
                await relay.finish()
            else:
                whole = await answer.whole()
                await client.send(answer.status, passed_on(answer.headers), whole)
            return client

    def _in_order(self, response_id: str) -> list[str]:
        """Workers that are up, the likely one first."""
        up = [worker.name for worker in self._fleet.workers.values() if worker.is_up]
        return sorted(up, key=lambda name: name != self._known.get(response_id))

    def _note(self, response_id: str, name: str) -> None:
        self._known[response_id] = name
        self._known.move_to_end(response_id)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)


class _Continuing:
    def __init__(self, stored: StoredResponses, forwards: Forwards) -> None:
        self._stored, self._forwards = stored, forwards

    async def forward(self, request: web.Request, forward: Forward) -> web.StreamResponse:
        if request.path == _PATH and not forward.worker:
            worker = await self._stored.worker_of(request, forward.body, forward.model)
            forward = forward._replace(worker=worker)
        return await self._forwards.forward(request, forward)


def _continued_by(raw: bytes) -> str | None:
    try:
        response_id = _decoder.decode(raw).previous_response_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # the engine will say what is wrong
    return response_id if response_id and re.fullmatch(_ID, response_id) else None
