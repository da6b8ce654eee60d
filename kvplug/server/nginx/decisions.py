"""Where nginx sends a request, and what becomes of it.

In:  a request as the API has read it; nginx's word that it failed on a worker, or that it is over.
Out: an answer without a body, whose headers send nginx to a worker; load that ends in time.

nginx tells nothing of first tokens: the end of a prefill is seen in the engine's events, or else
presumed (kvplug/router/first_tokens.py). Neither does the router see answers, so nothing is audited
and no lengths of answers are learned. A request counts as load until its end is told, at most for
`request_expiry_s`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from kvplug.api_errors import ApiError
from kvplug.router.core import Router
from kvplug.router.decider import Decision
from kvplug.server.nginx.configuration import (
    CONNECTED,
    REQUEST_ID,
    STATUS,
    TRACE,
    WORKER_HOST,
    WORKER_RANK,
    WORKER_URL,
)
from kvplug.server.nginx.ends import End
from kvplug.server.observability.journey import Journey, current
from kvplug.server.proxy.asked import Forward
from kvplug.server.proxy.connection import LostError
from kvplug.server.proxy.forwarding import Proxy
from kvplug.server.worker_spec import socket_of
from kvplug.server.workers.fleet import Fleet

_UNSEEN: Final = "answer_unseen"
_MAX_WORKERS_LOST: Final = 2
# nginx gives up, with 500, after ten redirects; a worker and the question after it are two.
_MAX_TRIES: Final = 4
_MAX_ENDED: Final = 10_000
_NAME_TTL_S: Final = 10.0


@dataclass(slots=True)
class _Placed:
    """A request that nginx has: on which worker, and where it failed before."""

    decision: Decision | None = None
    journey: Journey | None = None
    expiry: asyncio.TimerHandle | None = None
    tried: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)


class Decisions:
    """forward, as the Proxy has it: the answer is for nginx. note_end. The application gets its
    `middleware`.
    """

    def __init__(self, router: Router, fleet: Fleet, proxy: Proxy) -> None:
        self._router, self._fleet, self._proxy = router, fleet, proxy
        self._placed: dict[str, _Placed] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._addresses: dict[str, tuple[str, float]] = {}
        self._expiry_s = router.config.request_expiry_s

        @web.middleware
        async def note_question(request: web.Request, handler: Handler) -> web.StreamResponse:
            # A request that failed on a worker gives its turn back, before it asks for another.
            placed = self._placed.get(request.headers.get(REQUEST_ID, ""))
            if placed is not None and placed.journey is not None:
                placed.journey.release()
            return await handler(request)

        self.middleware: Middleware = note_question

    def __len__(self) -> int:
        """Number of requests whose end is awaited."""
        return len(self._placed)

    async def forward(self, request: web.Request, forward: Forward) -> web.StreamResponse:
        """The worker, in headers; ApiError if there is none."""
        request_id = _id_of(request.headers)
        placed = self._placed.pop(request_id, None) or _Placed()
        if placed.expiry is not None:
            placed.expiry.cancel()
        if placed.decision is not None:
            self._note_failure(placed.decision, placed, request.headers)
        workers = self._fleet.candidates(forward.model) - placed.tried
        if placed.tried and (not workers or len(placed.tried) >= _MAX_TRIES):
            raise _lost(placed.tried)
        unseen = forward._replace(streams=False, unauditable=forward.unauditable or _UNSEEN)
        placed.decision = decision = self._proxy.book(unseen, workers)
        self._keep(request_id, placed)
        try:
            headers = await self._headers_to(decision)
        except BaseException:
            self._finish(self._placed.pop(request_id, None))
            raise
        placed.journey = current()
        placed.journey.hand_over()
        return web.Response(headers=headers | _trace_of(request.headers, placed.journey))

    def note_end(self, end: End) -> None:
        """A request is over, for whatever reason."""
        placed = self._placed.pop(end.id, None)
        if placed is None:
            self._note_unknown(end.id)
            return
        if placed.decision is not None and end.done:
            self._proxy.note_answer(placed.decision.rank.worker, end.status)
        self._finish(placed)
        if placed.journey is not None:
            placed.journey.client_left = end.client_left
            placed.journey.facts["bytes"] = end.bytes
            placed.journey.end(end.status, end.total)

    def _keep(self, request_id: str, placed: _Placed) -> None:
        if request_id in self._ended:  # its client left while it was tokenized
            self._finish(placed)
            raise ApiError(499, "the client left", code="client_left")
        self._placed[request_id] = placed
        loop = asyncio.get_running_loop()
        placed.expiry = loop.call_later(self._expiry_s, self._expire, request_id)

    def _expire(self, request_id: str) -> None:
        """Nobody told its end: it is load no more, and its turn is another's."""
        placed = self._placed.pop(request_id)
        if placed.journey is not None:
            placed.journey.release()

    def _note_unknown(self, request_id: str) -> None:
        self._ended[request_id] = None
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def _finish(self, placed: _Placed | None) -> None:
        if placed is None:
            return
        if placed.expiry is not None:
            placed.expiry.cancel()
        if placed.decision is not None:
            self._router.finish(placed.decision.request_id)

    def _note_failure(
        self, decision: Decision, placed: _Placed, headers: Mapping[str, str]
    ) -> None:
        """Nginx asks again. ApiError where no other worker is to have the request."""
        name, was_reached = decision.rank.worker, _last(headers.get(CONNECTED, "")) != "-"
        self._router.finish(decision.request_id)
        placed.decision = None
        if was_reached and _last(headers.get(STATUS, "")) == "504":
            # It took the request and is silent: sending it elsewhere would do the work twice.
            self._proxy.note_answer(name, 504)
            raise ApiError(504, "the worker did not answer in time", code="timeout")
        reason = "it went away before it answered" if was_reached else "nginx cannot connect to it"
        self._proxy.note_loss(name, LostError(reason, was_reached=was_reached))
        placed.tried.add(name)
        if was_reached:
            placed.lost.add(name)
        if len(placed.lost) >= _MAX_WORKERS_LOST:
            raise _lost(placed.lost)

    async def _headers_to(self, decision: Decision) -> dict[str, str]:
        name = decision.rank.worker
        known = self._fleet.url_of(name)
        url, path = urlsplit(known), socket_of(known)
        if path is not None:
            return self._headers_of(decision, f"http://unix:{path}:", "localhost")
        if url.scheme != "http":
            message = "the worker is not at an http:// address, and nginx knows no other"
            raise ApiError(503, message, code="no_worker")
        address = await self._address_of(url.hostname or "", url.port or 80)
        base = f"http://{address}{url.path.rstrip('/')}"
        return self._headers_of(decision, base, url.netloc.rpartition("@")[2])

    def _headers_of(self, decision: Decision, base: str, host: str) -> dict[str, str]:
        headers = {"X-Accel-Redirect": "@worker", WORKER_URL: base, WORKER_HOST: host}
        if self._fleet.has_ranks(decision.rank.worker):
            headers[WORKER_RANK] = str(decision.rank.dp_rank)
        return headers

    async def _address_of(self, host: str, port: int) -> str:
        """Nginx looks no names up, for want of the name of a resolver."""
        if _is_address(host):
            return _joined(host, port)
        address, until_s = self._addresses.get(host, ("", 0.0))
        if until_s < time.monotonic():
            try:
                found = await asyncio.get_running_loop().getaddrinfo(host, port)
            except socket.gaierror as error:
                message = f"the address of a worker cannot be found: {error.strerror}"
                raise ApiError(503, message, code="no_worker") from error
            address = str(found[0][4][0])
            self._addresses[host] = address, time.monotonic() + _NAME_TTL_S
        return _joined(address, port)


def _id_of(headers: Mapping[str, str]) -> str:
    if not (request_id := headers.get(REQUEST_ID, "")):
        message = f"expected the header {REQUEST_ID}, which nginx sets: this socket is for nginx"
        raise ApiError(400, message, code="not_nginx")
    return request_id


def _trace_of(headers: Mapping[str, str], journey: Journey) -> dict[str, str]:
    """For nginx, which passes it on: the router's span, or the client's."""
    traceparent = journey.headers.get("traceparent", headers.get("traceparent"))
    return {} if traceparent is None else {TRACE: traceparent}


def _last(values: str) -> str:
    """Of nginx's list, one for each upstream."""
    return values.rpartition(" : ")[2].rpartition(", ")[2]


def _lost(names: set[str]) -> ApiError:
    message = f"{' and '.join(sorted(names))} could not be reached, or went away before the answer"
    return ApiError(502, message, code="worker_lost")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
