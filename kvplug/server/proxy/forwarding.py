"""One request to a worker and its answer back, streaming or not.

In:  an HTTP request, its body, a Router.   Out: the worker's answer as it is.

A worker that cannot be reached is marked down and the request goes to another one. If a worker
took the request and went away before it answered, one other worker is asked, no third: the request
may be the reason. Once part of an answer is out, the client is told that it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

import numpy as np
from aiohttp import web

from kvplug.api_errors import ApiError, error_event
from kvplug.audit.audit import Audit
from kvplug.errors import NoWorkerError
from kvplug.router.core import Router
from kvplug.router.decider import Decision
from kvplug.server.config import ServerConfig
from kvplug.server.observability.journey import Journey, current
from kvplug.server.proxy.answers import is_event_stream
from kvplug.server.proxy.asked import Forward
from kvplug.server.proxy.client import ClientAnswer
from kvplug.server.proxy.connection import Connection, LostError
from kvplug.server.proxy.deciding import reason_of
from kvplug.server.proxy.migrating import Broken, Migrating
from kvplug.server.proxy.relay import Relay, Shape
from kvplug.server.proxy.upstream import Outgoing, Upstream, passed_on
from kvplug.server.proxy.usage import usage_of
from kvplug.server.workers.fleet import Fleet
from kvplug.server.workers.worker import Worker

logger = logging.getLogger(__name__)

_NO_TOKENS = np.empty(0, dtype=np.uint32)
_MAX_WORKERS_LOST: Final = 2
STOPPING: Final = ApiError(503, "the router is stopping", code="router_stopping")
_OK: Final = range(200, 300)
_LOST_STATUS: Final = 502
_SHORTAGE_STATUS: Final = 503  # of this machine, if the router says it of a request on its way
# What an engine answers that cannot serve; 501 says that it never does.
_FAULTS: Final = frozenset((500, 502, 503, 504))


_BROKEN: Final = ApiError(
    502, "the worker went away in the middle of the answer", code="worker_lost"
)


@dataclass(slots=True)
class _Exchange:
    """One try of a request on one worker; num_tokens: of its answer, None if there is none."""

    forward: Forward
    decision: Decision
    num_tokens: int | None = None
    renewal: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class WorkerCounts:
    """What one worker was sent: requests and tokens, and what went wrong."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # as the router expected them
    num_lost: int = 0  # before an answer: sent elsewhere
    num_broken: int = 0  # in the middle of an answer
    num_migrated: int = 0  # to it, in the middle of an answer
    num_ejections: int = 0


class Proxy:
    """forward a request; or book it, for who forwards it; `counts` by the name of the worker."""

    def __init__(
        self, config: ServerConfig, router: Router, audit: Audit, fleet: Fleet, upstream: Upstream
    ) -> None:
        self.counts = defaultdict(WorkerCounts, {name: WorkerCounts() for name in fleet.workers})
        self._router, self._audit, self._fleet, self._upstream = router, audit, fleet, upstream
        self._client_timeout_s = config.client_timeout_s
        self.is_stopping = False
        """Whether a request that is cancelled is so because the router stops."""
        self._migrating = Migrating(
            router, fleet, upstream, on_move=self._note_moved, on_loss=self._note_broken
        )
        fleet.on_removed.append(self._forget)
        self._renewal_period_s = router.config.request_expiry_s / 2

    async def forward(self, request: web.Request, forward: Forward) -> web.StreamResponse:
        """Send the request to the best worker that answers."""
        tried: set[str] = set()
        lost: set[str] = set()
        while len(lost) < _MAX_WORKERS_LOST:
            workers = self._fleet.candidates(forward.model)
            if tried:
                workers -= tried
            if lost and not workers:
                break
            exchange = _Exchange(forward, self.book(forward, workers))
            name = exchange.decision.rank.worker
            try:
                self._renew_in_time(exchange)
                return await self._exchange(request, exchange)
            except LostError as error:
                self.note_loss(name, error)
                tried.add(name)
                if error.was_reached:
                    lost.add(name)
            except ApiError as error:
                if error.status != _SHORTAGE_STATUS:
                    self.note_answer(name, error.status)
                raise
            finally:
                self._finish(exchange)
        message = f"{' and '.join(sorted(lost))} went away before the answer began"
        raise ApiError(502, message, code="worker_lost")

    def counts_of(self, name: str) -> WorkerCounts:
        """To count in; what is counted of a worker that was removed is not kept."""
        return self.counts[name] if name in self._fleet.workers else WorkerCounts()

    def _forget(self, worker: Worker) -> None:
        self.counts.pop(worker.name, None)
        if worker.url is not None:
            self._upstream.forget(worker.url)

    def _renew_in_time(self, exchange: _Exchange) -> None:
        """Its load counts until it is finished, not until it expires."""
        loop = asyncio.get_running_loop()
        exchange.renewal = loop.call_later(self._renewal_period_s, self._renew, exchange)

    def _renew(self, exchange: _Exchange) -> None:
        self._router.renew(exchange.decision.request_id)
        self._renew_in_time(exchange)

    def note_answer(self, name: str, status: int) -> None:
        """The worker answered a request, or failed to with this status."""
        if name not in self._fleet.workers:  # it was removed meanwhile
            return
        ejections = self._fleet.ejections
        if status not in _FAULTS:
            if ejections.note_success(name):
                logger.info("worker %s answers again", name)
        elif ejections.note_failure(name):
            self.counts_of(name).num_ejections += 1
            seconds = ejections.left_s(name)
            logger.warning("worker %s fails, it gets no requests for %g s", name, seconds)

    def note_loss(self, name: str, error: LostError) -> None:
        """The worker did not answer a request; one that was not reached is down."""
        self.counts_of(name).num_lost += 1
        self.note_answer(name, _LOST_STATUS)
        if error.was_reached:
            logger.warning("worker %s went away before it answered: %s", name, error)
        else:
            self._fleet.mark_down(name, str(error))

    def book(self, forward: Forward, workers: frozenset[str]) -> Decision:
        """Decide on one of these workers and count the request there; ApiError if none can."""
        tokens = _NO_TOKENS if forward.tokens is None else forward.tokens
        try:
            decision = self._router.route(
                tokens,
                namespace=forward.namespace,
                workers=workers,
                max_tokens=forward.max_tokens,
                reports_first_token=forward.streams,
                session=forward.session,
                worker=forward.worker,
            )
        except NoWorkerError as error:
            raise _api_error_of(error, forward) from error
        unauditable = "no_token_ids" if forward.tokens is None else forward.unauditable
        if unauditable is not None:
            self._audit.exclude(decision, unauditable)
        counts = self.counts_of(decision.rank.worker)
        counts.num_requests += 1
        self._fleet.ejections.note_sent(decision.rank.worker)
        counts.num_prompt_tokens += len(tokens)
        counts.num_cached_tokens += decision.cached_tokens
        reason = reason_of(
            decision,
            self._router.config,
            worker=forward.worker,
            session=forward.session,
            unknown_because=forward.unknown_because,
        )
        current().note_decision(decision, forward.model, len(tokens), reason)
        return decision

    async def _exchange(self, request: web.Request, exchange: _Exchange) -> web.StreamResponse:
        decision, forward = exchange.decision, exchange.forward
        name, dp_rank = decision.rank.worker, decision.rank.dp_rank
        named = dp_rank if self._fleet.has_ranks(name) else None
        body = forward.additions.in_body(forward.body)
        outgoing = Outgoing(self._fleet.url_of(name), named, request, body)
        client = ClientAnswer(request, self._client_timeout_s)
        async with self._upstream.post(outgoing) as answer:
            if is_event_stream(answer.headers):
                await self._stream(answer, client, exchange, outgoing)
                return client
            body = await answer.whole()
            if answer.status in _OK:
                usage = usage_of(body)
                exchange.num_tokens = None if usage is None else usage.completion_tokens
                self._audit.answered(decision.request_id, usage)
            headers = passed_on(answer.headers)
            status = answer.status
            self.note_answer(name, status)
        await client.send(status, headers, body)
        return client

    async def _stream(
        self, answer: Connection, client: ClientAnswer, exchange: _Exchange, outgoing: Outgoing
    ) -> None:
        decision, journey = exchange.decision, current()
        note_first = lambda: self._note_first_token(decision, journey)  # noqa: E731
        relay = Relay(answer, client, note_first, _shape_of(exchange.forward))
        await relay.begin()
        try:
            await self._to_its_end(relay, exchange, outgoing)
        except ConnectionResetError:
            journey.client_left = True
            return
        except asyncio.CancelledError:
            if not self.is_stopping:
                client.abort()
                raise
            client.end(error_event(STOPPING, outgoing.client.path))
            return
        except BaseException:
            client.abort()
            raise
        if exchange.num_tokens is not None:
            journey.note_tokens(exchange.num_tokens)

    async def _to_its_end(self, relay: Relay, exchange: _Exchange, outgoing: Outgoing) -> None:
        """Of a stream, wherever it goes on."""
        forward, decision = exchange.forward, exchange.decision
        try:
            status = await relay.finish()
        except (LostError, ApiError) as lost:
            self._note_broken(decision.rank.worker, str(lost))
            continuation = forward.continuation
            if continuation is None or not await self._migrating.go_on(
                Broken(forward, outgoing, decision, relay, continuation)
            ):
                relay.close(error_event(_BROKEN, outgoing.client.path))
                return
            exchange.num_tokens = continuation.num_tokens
            return
        self.note_answer(decision.rank.worker, status)
        if status in _OK:
            exchange.num_tokens = relay.stream.num_tokens
            self._audit.answered(decision.request_id, relay.stream.usage())

    def _note_first_token(self, decision: Decision, journey: Journey) -> None:
        """Not `current()`: who calls it is no task of the request's."""
        self._router.first_token(decision.request_id)
        journey.note_first_token()

    def _note_broken(self, name: str, reason: str) -> None:
        logger.warning("worker %s went away in the middle of an answer: %s", name, reason)
        self.counts_of(name).num_broken += 1
        self.note_answer(name, _LOST_STATUS)

    def _note_moved(self, name: str) -> None:
        counts = self.counts_of(name)
        counts.num_requests += 1
        counts.num_migrated += 1
        self._fleet.ejections.note_sent(name)

    def _finish(self, exchange: _Exchange) -> None:
        request_id = exchange.decision.request_id
        if exchange.renewal is not None:
            exchange.renewal.cancel()
        self._audit.abandon(request_id, "no_whole_answer")
        if not self._router.finish(request_id, exchange.num_tokens):
            logger.debug("request %s had expired", request_id)


def _shape_of(forward: Forward) -> Shape | None:
    """What is done to the events of an answer; nothing by default."""
    additions, continuation = forward.additions, forward.continuation
    if continuation is None:
        return additions.taken_out if any(additions) else None

    def shape(events: bytes) -> bytes:
        continuation.note(events)
        return additions.taken_out(events)

    return shape


def _api_error_of(error: NoWorkerError, forward: Forward) -> ApiError:
    """In the words of a client, who need not know all workers."""
    serves = f"serves model {forward.model!r}"
    match error.constraint:
        case "busy":
            return ApiError(503, f"every worker that {serves} is busy", code="busy")
        case "worker":
            message = f"worker {forward.worker!r} is none that {serves} and can be reached now"
            return ApiError(503, message, code="no_worker")
    return ApiError(503, f"no worker that {serves} can be reached now", code="no_worker")
