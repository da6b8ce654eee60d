"""One request to a worker and its answer back, streaming or not.

In:  an HTTP request, its body, a Router.   Out: the worker's answer as it is.

A worker that cannot be reached, or goes before it answered anything, is marked down and the
request goes to another one. Once part of an answer is out, the client is told that it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import aiohttp
import numpy as np
from aiohttp import web
from multidict import CIMultiDict

from kvplug.audit.router import AuditedRouter
from kvplug.errors import NoWorkerError, UnknownRequestError
from kvplug.events import Namespace
from kvplug.hashing import Tokens
from kvplug.router.decider import Decision
from kvplug.server.fleet import Fleet
from kvplug.server.replies import ApiError, error_event
from kvplug.server.usage import Stream, usage_of

logger = logging.getLogger(__name__)

# RFC 9110, 7.6.1: these concern one connection; length and host are set anew on each side.
_HOP_BY_HOP = frozenset(
    (
        *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
        *("proxy-authenticate", "proxy-authorization", "host", "content-length"),
        *("content-encoding", "accept-encoding"),
    )
)
_NO_TOKENS = np.empty(0, dtype=np.uint32)


class Forward(NamedTuple):
    """What to send on: the raw body, and what the router knows of it.

    max_tokens: how long the answer may get; streams: whether it comes token by token.
    unauditable: why the answer's usage would not tell about the prefix, or None.
    """

    path: str
    model: str
    body: bytes
    tokens: Tokens | None
    namespace: Namespace
    max_tokens: int | None
    streams: bool
    unauditable: str | None


class _WorkerLost(Exception):
    """The worker could not be reached, or went before it answered anything."""


@dataclass(slots=True)
class _Exchange:
    """One try of a request on one worker; num_tokens: of its answer, None if there is none."""

    decision: Decision
    num_tokens: int | None = None


@dataclass(slots=True)
class WorkerCounts:
    """What one worker was sent: requests and tokens, and what went wrong."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # as the router expected them
    num_lost: int = 0  # before an answer: sent elsewhere
    num_broken: int = 0  # in the middle of an answer


class Proxy:
    """forward a request; `counts` by worker URL."""

    def __init__(self, router: AuditedRouter, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self.counts = {url: WorkerCounts() for url in fleet.workers}
        self._router, self._fleet, self._session = router, fleet, session

    async def forward(self, request: web.Request, forward: Forward) -> web.StreamResponse:
        """Send the request to the best worker that answers."""
        tried: set[str] = set()
        while True:
            exchange = _Exchange(self._route(forward, tried))
            url = exchange.decision.rank.worker
            try:
                return await self._exchange(request, forward, exchange)
            except _WorkerLost as lost:
                self._fleet.mark_down(url, str(lost))
                self.counts[url].num_lost += 1
                tried.add(url)
            finally:
                self._finish(exchange)

    def _route(self, forward: Forward, tried: set[str]) -> Decision:
        workers = self._fleet.candidates(forward.model) - tried
        tokens = _NO_TOKENS if forward.tokens is None else forward.tokens
        try:
            with self._router.deciding():
                decision = self._router.route(
                    tokens,
                    namespace=forward.namespace,
                    workers=workers,
                    max_tokens=forward.max_tokens,
                    reports_first_token=forward.streams,
                )
                self._expect(decision, forward)
        except NoWorkerError as error:
            message = f"no worker that serves model {forward.model!r} can be reached now"
            raise ApiError(503, message, code="no_worker") from error
        counts = self.counts[decision.rank.worker]
        counts.num_requests += 1
        counts.num_prompt_tokens += len(tokens)
        counts.num_cached_tokens += decision.cached_tokens
        return decision

    def _expect(self, decision: Decision, forward: Forward) -> None:
        if forward.tokens is None:
            self._router.skip(decision.rank, "no_token_ids")
        elif forward.unauditable is not None:
            self._router.skip(decision.rank, forward.unauditable)
        else:
            self._router.expect(decision)

    async def _exchange(
        self, request: web.Request, forward: Forward, exchange: _Exchange
    ) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        decision = exchange.decision
        url = decision.rank.worker + forward.path
        with _translated():
            upstream = await self._session.post(url, data=forward.body, headers=headers)
        async with upstream:
            if upstream.content_type == "text/event-stream":
                return await self._stream(request, upstream, exchange)
            with _translated():
                body = await upstream.read()
            if upstream.ok:
                usage = usage_of(body)
                exchange.num_tokens = None if usage is None else usage.completion_tokens
                self._router.answered(decision.request_id, usage)
            return web.Response(body=body, status=upstream.status, headers=_kept(upstream))

    async def _stream(
        self, request: web.Request, upstream: aiohttp.ClientResponse, exchange: _Exchange
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=upstream.status, headers=_kept(upstream))
        stream, decision = Stream(), exchange.decision
        # The first part is awaited before anything goes out: until then another worker can take
        # the request over.
        with _translated():
            part = await upstream.content.readany()
        try:
            await response.prepare(request)
            if part:
                await response.write(part)
            self._router.first_token(decision.request_id)  # behind what the client waits for
            while part:
                stream.add(part)
                if part := await self._next_part(upstream, decision):
                    await response.write(part)
            await response.write_eof()
            if upstream.ok and upstream.content.exception() is None:
                exchange.num_tokens = stream.num_tokens
                self._router.answered(decision.request_id, stream.usage())
        except ConnectionResetError:
            logger.debug("the client of request %s left", decision.request_id)
        return response

    async def _next_part(self, upstream: aiohttp.ClientResponse, decision: Decision) -> bytes:
        """What the worker says next; an error event if it went away, and then nothing."""
        if upstream.content.exception() is not None:
            return b""
        try:
            with _translated():
                return await upstream.content.readany()
        except (_WorkerLost, ApiError) as lost:
            return self._broken(decision.rank.worker, str(lost))

    def _broken(self, url: str, reason: str) -> bytes:
        logger.warning("worker %s went away in the middle of an answer: %s", url, reason)
        self.counts[url].num_broken += 1
        message = "the worker went away in the middle of the answer"
        return error_event(ApiError(502, message, code="worker_lost"))

    def _finish(self, exchange: _Exchange) -> None:
        request_id = exchange.decision.request_id
        self._router.abandon(request_id, "no_whole_answer")
        try:
            self._router.finish(request_id, exchange.num_tokens)
        except UnknownRequestError:
            logger.debug("request %s had expired", request_id)


@contextmanager
def _translated() -> Iterator[None]:
    """Aiohttp's errors of the worker's side, as ours."""
    try:
        yield
    except aiohttp.SocketTimeoutError as error:
        # It took the request and is silent: sending it elsewhere would do the work twice.
        raise ApiError(504, "the worker did not answer in time", code="timeout") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _WorkerLost(str(error) or type(error).__name__) from error


def _kept(upstream: aiohttp.ClientResponse) -> CIMultiDict[str]:
    """The worker's headers that concern the client."""
    items = upstream.headers.items()
    return CIMultiDict((name, value) for name, value in items if name.lower() not in _HOP_BY_HOP)
