"""EngineService: a simulated engine behind HTTP and ZMQ; start, serve, stop.

In:  a SimConfig and a tokenizer.   Out: a listening engine, until it is told to stop.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import TracebackType
from typing import Self

import msgspec
from aiohttp import web

from kvplug import codec
from kvplug.engines.binding import local_endpoint
from kvplug.engines.publisher import Publisher
from kvplug.engines.settings import PublisherConfig
from kvplug.events import EventBatch
from kvplug.http_service import listening_on, stopped_by_signals, url_of
from kvplug.sim.api import Api
from kvplug.sim.engine import SimulatedEngine
from kvplug.sim.engine_config import SimConfig
from kvplug.sim.runner import EngineRunner
from kvplug.sim.tokenizer import ByteTokenizer, Tokenizer

logger = logging.getLogger(__name__)


class EngineService:
    """An async context manager; inside, `url` and the endpoints are where it listens."""

    def __init__(self, config: SimConfig, tokenizer: Tokenizer | None = None) -> None:
        self.config = config
        self._tokenizer = tokenizer or ByteTokenizer()
        self.engine = SimulatedEngine(
            config.scheduler, config.time_model, vocabulary=self._tokenizer.vocabulary
        )
        self.events_endpoint: str | None = None
        self.replay_endpoint: str | None = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as started:
            runner = EngineRunner(self.engine, self._start_publishing(started))
            self.stepping = await started.enter_async_context(_as_task(runner))
            api = Api(self.config, runner, self._tokenizer)
            self._runner = web.AppRunner(
                api.application,
                handler_cancellation=True,
                shutdown_timeout=self.config.grace_s,
                access_log=None,
            )
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
        return url_of(*self._runner.addresses[0][:2])

    def addresses(self) -> dict[str, str | None]:
        """What a caller needs to reach it."""
        return {"url": self.url, "events": self.events_endpoint, "replay": self.replay_endpoint}

    def _start_publishing(self, started: AsyncExitStack) -> Callable[[EventBatch], None]:
        if self.config.events_endpoint is None:
            return _publish_nowhere
        config = PublisherConfig(
            endpoint=self.config.events_endpoint,
            replay_endpoint=self.config.replay_endpoint,
            topic=self.config.topic,
            buffer_steps=self.config.buffer_steps,
        )
        publisher = Publisher(config, 0, codec.encode, logger, must_bind=True)
        started.callback(publisher.shutdown)
        self.events_endpoint = local_endpoint(publisher.endpoint)
        self.replay_endpoint = local_endpoint(publisher.replay_endpoint or "")
        return publisher.publish

    async def _listen(self) -> None:
        await self._runner.setup()
        with listening_on(self.config.host, self.config.port):
            await web.TCPSite(self._runner, self.config.host, self.config.port).start()


def _publish_nowhere(batch: EventBatch) -> None:
    """For an engine without an events endpoint."""


@asynccontextmanager
async def _as_task(runner: EngineRunner) -> AsyncIterator[asyncio.Task[None]]:
    stepping = asyncio.create_task(runner.run(), name="step-engine")
    try:
        yield stepping
    finally:
        stepping.cancel()
        with suppress(asyncio.CancelledError):
            await stepping


async def serve(config: SimConfig, tokenizer: Tokenizer | None) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends at once. Says on stdout where it listens."""
    stopping = stopped_by_signals()
    async with EngineService(config, tokenizer) as service:
        sys.stdout.write(msgspec.json.encode(service.addresses()).decode() + "\n")
        sys.stdout.flush()
        stopped = asyncio.create_task(stopping.wait())
        # A fault in a step must not leave an engine that takes requests and answers none.
        await asyncio.wait({stopped, service.stepping}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
