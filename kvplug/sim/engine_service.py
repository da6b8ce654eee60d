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

from kvplug.engines.binding import local_endpoint
from kvplug.engines.life_stream import LifeStream
from kvplug.engines.numbered_batches import NumberedBatches
from kvplug.events import EventBatch
from kvplug.http_service import listening_on, stopped_by_signals, url_of
from kvplug.sim.api import Api
from kvplug.sim.engine import SimulatedEngine
from kvplug.sim.engine_config import SimConfig
from kvplug.sim.publishing import open_publishers
from kvplug.sim.ranks import Ranks
from kvplug.sim.runner import EngineRunner
from kvplug.sim.tokenizer import ByteTokenizer, Tokenizer

logger = logging.getLogger(__name__)

Publish = Callable[[EventBatch], None]


class EngineService:
    """An async context manager; inside, `url` and the endpoints are where it listens."""

    def __init__(self, config: SimConfig, tokenizer: Tokenizer | None = None) -> None:
        self.config = config
        self._tokenizer = tokenizer or ByteTokenizer()
        self.engines = [
            SimulatedEngine(
                config.scheduler, config.time_model, vocabulary=self._tokenizer.vocabulary
            )
            for _ in range(config.dp_size)
        ]
        self._publishers: list[LifeStream | NumberedBatches] = []

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as started:
            for publisher in open_publishers(self.config, self._tokenizer.digest):
                started.callback(publisher.shutdown)
                self._publishers.append(publisher)
            runners = [
                EngineRunner(engine, self._publish_as(rank))
                for rank, engine in enumerate(self.engines)
            ]
            self.stepping = await started.enter_async_context(_as_task(runners))
            self.event_sources = self._event_sources()
            api = Api(self.config, Ranks(runners), self._tokenizer, self.event_sources)
            self._runner = web.AppRunner(
                api.application,
                handler_cancellation=True,
                shutdown_timeout=self.config.grace_s,
                access_log=None,
            )
            started.push_async_callback(self._runner.cleanup)
            await self._listen()
            for publisher in self._publishers:
                if isinstance(publisher, LifeStream) and not publisher.life.about.url:
                    publisher.note(url=self.url)
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

    @property
    def events_endpoint(self) -> str | None:
        """Where rank 0 publishes its events, for somebody on the same machine."""
        return local_endpoint(self._publishers[0].endpoint) if self._publishers else None

    @property
    def replay_endpoint(self) -> str | None:
        """Where past events of rank 0 can be asked for."""
        return local_endpoint(self._publishers[0].answers_at or "") if self._publishers else None

    def addresses(self) -> dict[str, str | None]:
        """What a caller needs to reach it; of its events, those of rank 0."""
        return {"url": self.url, "events": self.events_endpoint, "replay": self.replay_endpoint}

    def _publish_as(self, rank: int) -> Publish:
        return self._publishers[rank].publish if self._publishers else _publish_nowhere

    def _event_sources(self) -> dict[str, dict[str, object]]:
        """As vLLM 0.32 says it."""
        return {
            str(rank): {
                "enable_kv_cache_events": True,
                "publisher": "zmq" if self.config.wire == "vllm" else "kvplug",
                "endpoint": publisher.endpoint,
                "replay_endpoint": publisher.answers_at,
                "buffer_steps": self.config.buffer_steps,
                "topic": self.config.topic,
            }
            for rank, publisher in enumerate(self._publishers)
        }

    async def _listen(self) -> None:
        await self._runner.setup()
        with listening_on(self.config.host, self.config.port):
            await web.TCPSite(self._runner, self.config.host, self.config.port).start()


def _publish_nowhere(batch: EventBatch) -> None:
    """For an engine without an events endpoint."""


@asynccontextmanager
async def _as_task(runners: list[EngineRunner]) -> AsyncIterator[asyncio.Task[None]]:
    stepping = asyncio.create_task(_run(runners), name="step-engine")
    try:
        yield stepping
    finally:
        stepping.cancel()
        with suppress(asyncio.CancelledError):
            await stepping


async def _run(runners: list[EngineRunner]) -> None:
    """Until one of them fails; then its error is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for runner in runners:
                tasks.create_task(runner.run())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


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
