"""RouterService: start, serve, stop.

In:  a ServerConfig.   Out: a listening router, until it is told to stop.

Stopping has an order: accept no more, let requests in flight end within `grace_s`, stop looking at
workers, close the event sockets and the connections to the workers.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from aiohttp import web

from kvplug.audit.router import AuditedRouter
from kvplug.errors import TransportError
from kvplug.server.app import Api
from kvplug.server.config import ServerConfig
from kvplug.server.diagnosis.board import Diagnosis
from kvplug.server.fleet import Fleet
from kvplug.server.health import Health
from kvplug.server.metrics import Metrics
from kvplug.server.prompts import Prompts
from kvplug.server.proxy import Proxy
from kvplug.server.upstream import Upstream

logger = logging.getLogger(__name__)


class RouterService:
    """An async context manager; inside, `url` is where it listens."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.router = AuditedRouter(config.router, sample=config.audit_sample)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as started:
            upstream = await started.enter_async_context(Upstream(self.config))
            session = upstream.session
            self.fleet = Fleet(self.config, self.router, session)
            self.proxy = Proxy(self.router, self.fleet, upstream)
            started.push_async_callback(self.fleet.stop)
            await self.fleet.start()
            prompts = Prompts(self.config.tokenizer)
            self.diagnosis = Diagnosis(self.config, self.fleet, self.router, prompts, session)
            started.push_async_callback(self.diagnosis.stop)
            self.diagnosis.start()
            self._runner = self._make_runner(prompts)
            started.push_async_callback(self._runner.cleanup)
            await self._listen()
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
        host, port = self._runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _make_runner(self, prompts: Prompts) -> web.AppRunner:
        metrics = Metrics(self.router, self.fleet, self.proxy, prompts, self.diagnosis)
        health = Health(self.fleet, self.router, self.diagnosis)
        api = Api(self.config, self.fleet, self.proxy, prompts, metrics, health)
        # A client that leaves cancels its handler, and with it the work on the engine.
        return web.AppRunner(
            api.application,
            handler_cancellation=True,
            shutdown_timeout=self.config.grace_s,
            access_log=None,
        )

    async def _listen(self) -> None:
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.config.host, self.config.port)
        try:
            await site.start()
        except OSError as error:
            address = f"{self.config.host}:{self.config.port}"
            raise TransportError(f"cannot listen on {address}: {error.strerror}") from error


def _raise_descriptor_limit() -> None:
    """A stream takes two descriptors, and 1,024, the usual soft limit, is for programs that use
    select(2), which this one does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve(config: ServerConfig) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends at once."""
    _raise_descriptor_limit()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _stop_or_abort, stopping)
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


def _stop_or_abort(stopping: asyncio.Event) -> None:
    if stopping.is_set():
        raise SystemExit(1)
    stopping.set()
