"""How requests end when the router stops: by themselves within the grace, else with an error.

In:  requests in flight, the word that the router stops.   Out: answers on connections that close.

No connection is accepted by then. One that is open may bring a request still, whose answer says
that the connection closes.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from kvplug.api_errors import error_response
from kvplug.server.proxy.client import CLOSES
from kvplug.server.proxy.forwarding import STOPPING, Proxy

# For what is said to clients at the end of the grace to go out.
_LAST_WORDS_S: Final = 1.0


class Draining:
    """drain. The application gets its `middleware`; `has_begun` says whether the router stops."""

    def __init__(self, proxy: Proxy) -> None:
        self.has_begun = False
        self._proxy = proxy
        self._running: set[asyncio.Task[Any]] = set()
        self._interrupted: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()

    @property
    def middleware(self) -> Middleware:
        """Knows of each request, from its head to the end of its answer."""

        @web.middleware
        async def follow(request: web.Request, handler: Handler) -> web.StreamResponse:
            task = asyncio.current_task()
            assert task is not None, "a handler runs in a task"
            if self.has_begun:
                request[CLOSES] = True
            self._running.add(task)
            try:
                response = await self._answer(request, handler, task)
            finally:
                self._running.discard(task)
                if not self._running:
                    self._idle.set()
            if self.has_begun and not response.prepared:
                response.force_close()
            return response

        return follow

    async def drain(self, grace_s: float) -> None:
        """Until no request is in flight; those that are after the grace are told that it is over:
        an error, or within a stream an error event.
        """
        self.has_begun = True
        if await self._is_idle_within(grace_s):
            return
        self._proxy.is_stopping = True
        self._interrupted = set(self._running)
        for task in self._interrupted:
            task.cancel()
        await self._is_idle_within(_LAST_WORDS_S)

    async def _answer(
        self, request: web.Request, handler: Handler, task: asyncio.Task[Any]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except asyncio.CancelledError:
            if task not in self._interrupted or request.transport is None:
                raise  # the client left
            task.uncancel()
            return error_response(STOPPING, request.path)

    async def _is_idle_within(self, seconds: float) -> bool:
        if self._running:
            self._idle.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._idle.wait()
            except TimeoutError:
                return False
        return True
