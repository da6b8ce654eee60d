"""RouterService: start, serve, stop.

In:  a ServerConfig.   Out: a listening router, until it is told to stop.

Stopping has an order: accept no more, let requests in flight end within `grace_s`, tell the others
that it is over, stop looking at workers, close the event sockets and the connections to workers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from aiohttp import web

from kvplug.audit.audit import Audit
from kvplug.http_service import stopped_by_signals, url_of
from kvplug.router.core import Router
from kvplug.server.api.app import Api, Forwards
from kvplug.server.api.asked import Asked
from kvplug.server.api.draining import Draining
from kvplug.server.api.prompts import Prompts
from kvplug.server.api.reading import BodyReader
from kvplug.server.api.stored import StoredResponses
from kvplug.server.config import ServerConfig
from kvplug.server.control.guard import Guard
from kvplug.server.control.openapi import openapi_route
from kvplug.server.control.selection import SelectionRoutes
from kvplug.server.control.workers import WorkerRoutes
from kvplug.server.diagnosis.board import Diagnosis
from kvplug.server.nginx.decisions import Decisions
from kvplug.server.nginx.front import NginxFront
from kvplug.server.observability.following import Following
from kvplug.server.observability.health import Health
from kvplug.server.observability.metrics import Metrics
from kvplug.server.observability.tracing import tracer_of
from kvplug.server.proxy.forwarding import Proxy
from kvplug.server.proxy.listening import Listener, max_connections, raise_descriptor_limit
from kvplug.server.proxy.upstream import Upstream
from kvplug.server.workers.asking import WorkerSession
from kvplug.server.workers.fleet import Fleet
from kvplug.tokenization.piece_encoder import StoreOptions

if TYPE_CHECKING:
    from kvplug.cluster.replica import Replica
    from kvplug.server.clustering import Cluster

logger = logging.getLogger(__name__)

# How long a thread that tokenizes may keep the event loop from Python's interpreter: by default 5
# ms. With a tenth of it, a chat of 0.8 MB holds the loop for half as long (make bench-tokenize).
SWITCH_S: Final = 0.0005

_LINGER_S: Final = 1.0


class RouterService:
    """An async context manager; inside, `url` is where it listens."""

    def __init__(self, config: ServerConfig, router: Router | None = None) -> None:
        """`router`: one that shares its index with others (kvplug/server/processes)."""
        self.config = config
        self.router = Router(config.router) if router is None else router
        self.audit = Audit(self.router, sample=config.audit_sample)
        self.cluster: Cluster | None = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as started:
            upstream = await started.enter_async_context(Upstream(self.config))
            session = upstream.session
            await self._join_cluster(started)
            self.fleet = self._make_fleet(session)
            # OpenTelemetry reads its variables itself.
            tracer = tracer_of(self.config.otel_endpoint, os.environ)
            started.push_async_callback(asyncio.to_thread, tracer.stop)
            self.following = Following(tracer, explains=self.config.explain_headers)
            self.proxy = Proxy(self.config, self.router, self.audit, self.fleet, upstream)
            self._stored = StoredResponses(self.config, self.fleet, upstream)
            self.draining = Draining(self.proxy)
            await self._start_fleet(started)
            prompts = _prompts(self.config)
            started.callback(prompts.close)
            self.diagnosis = self._make_diagnosis(prompts, session)
            started.push_async_callback(self.diagnosis.stop)
            self.diagnosis.start()
            config = self.config
            self._listener = Listener(
                max_connections=config.max_connections or max_connections(len(config.workers)),
                first_request_timeout_s=config.client_timeout_s,
            )
            self._runner = self._make_runner(prompts)
            started.push_async_callback(self._runner.cleanup)
            await self._runner.setup()
            await self._listen()
            started.push_async_callback(self.draining.drain, self.config.grace_s)
            started.callback(self._stop_listening)
            if self.config.nginx_config is not None:
                nginx = self._make_nginx(self.config.nginx_config.absolute(), prompts)
                await nginx.start(self._listener.address[1])
                started.push_async_callback(nginx.stop)
            self._started = started.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._started.aclose()

    @property
    def url(self) -> str:
        """Where it listens, with the port that was taken."""
        return url_of(*self._listener.address)

    async def _start_fleet(self, started: AsyncExitStack) -> None:
        started.push_async_callback(self.fleet.stop)
        await self.fleet.start()
        if self.cluster is not None:
            await self.cluster.begin_sync()

    async def _join_cluster(self, started: AsyncExitStack) -> None:
        if self.config.cluster.nats is None:
            return
        from kvplug.server.clustering import Cluster  # needs the extra kvplug[nats]

        self.cluster = await started.enter_async_context(Cluster(self.config, self.router))

    @property
    def _replica(self) -> Replica | None:
        return None if self.cluster is None else self.cluster.replica

    def _make_fleet(self, session: WorkerSession) -> Fleet:
        return Fleet(self.config, self.router, self.audit, session, self._replica)

    def _make_diagnosis(self, prompts: Prompts, session: WorkerSession) -> Diagnosis:
        diagnosis = Diagnosis(self.config, self.fleet, self.audit, prompts, session)
        diagnosis.replica = self._replica
        return diagnosis

    async def _listen(self) -> None:
        await self._listener.start(self._runner, self.config.host, self.config.port)

    def _stop_listening(self) -> None:
        self._listener.stop()

    def _make_api(self, prompts: Prompts, forwards: Forwards) -> Api:
        listener = self._listener
        metrics = Metrics(self.audit, self.fleet, self.proxy, prompts, self.diagnosis, listener)
        metrics.add_times(self.following.times)
        health = Health(self.fleet, self.router, self.audit, self.diagnosis, self._is_draining)
        if self.cluster is not None:
            metrics.add_replica(self.cluster)
            health.cluster = self.cluster
        continuing = self._stored.continuing(forwards)
        api = Api(self.config, self.fleet, continuing, prompts, metrics, health)
        api.application.add_routes(self._stored.routes)
        if forwards is self.proxy:
            metrics.add_queue(api.admission)
        self.following.follow(api.application)
        return api

    def _is_draining(self) -> bool:
        return self.draining.has_begun

    def _control_routes(self, prompts: Prompts) -> list[web.RouteDef]:
        guard, reader = Guard(self.config), BodyReader(self.config)
        asked = Asked(self.config, self.fleet, prompts)
        selection = SelectionRoutes(guard, reader, asked, self.audit, self.fleet, self.proxy)
        workers = WorkerRoutes(guard, reader, self.fleet)
        return [*selection.routes, *workers.routes, openapi_route()]

    def _make_nginx(self, file: Path, prompts: Prompts) -> NginxFront:
        self.decisions = Decisions(self.router, self.fleet, self.proxy)
        api = self._make_api(prompts, self.decisions)
        api.application.middlewares.append(self.decisions.middleware)
        api.admission = self.api.admission  # one limit for both
        return NginxFront(self.config, file, self.decisions, api.application)

    def _make_runner(self, prompts: Prompts) -> web.AppRunner:
        self.api = api = self._make_api(prompts, self.proxy)
        api.application.add_routes(self._control_routes(prompts))
        api.application.middlewares.insert(0, self._listener.middleware)
        api.application.middlewares.insert(0, self.draining.middleware)
        # A client that leaves cancels its handler, and with it the work on the engine.
        return web.AppRunner(
            api.application,
            handler_cancellation=True,
            keepalive_timeout=self.config.client_timeout_s,
            shutdown_timeout=_LINGER_S,  # nothing is in flight by then
            lingering_time=_LINGER_S,  # of a body that is not read, as it is too long or too slow
            access_log=None,
        )


def _prompts(config: ServerConfig) -> Prompts:
    store = StoreOptions(
        max_bytes=config.tokenizer_cache_bytes,
        piece_chars=config.tokenizer_block_chars,
        min_overlap=config.tokenizer_min_overlap,
    )
    return Prompts(config.tokenizer_folders, store, num_threads=config.tokenizer_threads)


async def serve(config: ServerConfig) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends at once."""
    sys.setswitchinterval(SWITCH_S)
    raise_descriptor_limit()
    stopping = stopped_by_signals()
    async with RouterService(config) as service:
        logger.info(
            "listening on %s, mode %s, block size %s, %d workers",
            service.url,
            config.router.mode,
            config.router.block_size or "as the events say",
            len(config.workers),
        )
        await stopping.wait()
        logger.info("stopping, requests in flight have %g s", config.grace_s)
