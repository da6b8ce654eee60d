"""A reader: serves clients, by the index that the writer writes.

In:  a configuration, a shared folder, the listening socket.   Out: answers, until it is told to
stop.

It looks at the workers itself, as it sends them requests, and follows none of their events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final

import uvloop
from aiohttp import web

from kvplug.ingest.follower import Follower
from kvplug.server.api.prompts import Prompts
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.diagnosis.board import Diagnosis
from kvplug.server.diagnosis.finding import Finding
from kvplug.server.processes.peers import Peers, PeerServer, counts_of, stopped
from kvplug.server.proxy.listening import raise_descriptor_limit
from kvplug.server.service import SWITCH_S, RouterService
from kvplug.server.workers.asking import WorkerSession
from kvplug.server.workers.fleet import Fleet
from kvplug.server.workers.rank_sources import RankSource
from kvplug.server.workers.worker import Worker
from kvplug.server.workers.worker_events import WorkerEvents
from kvplug.shared.folder import SharedFolder
from kvplug.shared.peers import Place
from kvplug.shared.reading import ReadingRouter

logger = logging.getLogger(__name__)

# A process that is asked nothing keeps up with what the others send.
_NEWS_S: Final = 0.1
_FIRST_PAGE_S: Final = 60.0


class EventsElsewhere(WorkerEvents):
    """The writer follows the events."""

    def start(self) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""

    @property
    def is_alive(self) -> bool:
        """Whether they are received is the writer's to say."""
        return True

    def set_sources(self, spec: WorkerSpec, sources: Sequence[RankSource]) -> dict[int, Follower]:
        """Nobody follows them here."""
        return {}

    def warn_of_unfollowed(self, worker: Worker) -> None:
        """Nothing."""


class ReaderFleet(Fleet):
    """The workers, without their events."""

    def _make_events(self) -> WorkerEvents:
        return EventsElsewhere(self._config, self._router, self._audit)


class DiagnosisElsewhere(Diagnosis):
    """The writer asks the engines, and hears their events."""

    def start(self) -> None:
        """Nothing."""

    def look(self) -> list[Finding]:
        """Nothing."""
        return []


class ReaderService(RouterService):
    """A router on a socket that others accept from, too."""

    def __init__(
        self, config: ServerConfig, folder: SharedFolder, place: Place, bound: socket.socket
    ) -> None:
        self.reading = ReadingRouter(config.router, folder, place)
        # An answer is compared with what the events said until then, which only the writer knows.
        super().__init__(replace(config, audit_sample=0.0), self.reading)
        self._folder, self._place, self._bound = folder, place, bound

    async def _join_cluster(self, started: AsyncExitStack) -> None:
        """The writer has."""

    def _make_fleet(self, session: WorkerSession) -> Fleet:
        return ReaderFleet(self.config, self.router, self.audit, session)

    def _make_diagnosis(self, prompts: Prompts, session: WorkerSession) -> Diagnosis:
        return DiagnosisElsewhere(self.config, self.fleet, self.audit, prompts, session)

    def _make_runner(self, prompts: Prompts) -> web.AppRunner:
        runner = super()._make_runner(prompts)
        name = f"reader{self._place.number}"
        self.peers = Peers(self._folder, self._place, lambda: counts_of(self.reading, name))
        application = runner.app
        application.middlewares.insert(1, self.peers.middleware)
        return runner

    async def _listen(self) -> None:
        self._peer_server = PeerServer(self._folder, f"reader{self._place.number}", self._runner)
        await self._peer_server.start()
        await self._first_page()
        await self._listener.start(self._runner, self.config.host, self.config.port, self._bound)

    def _stop_listening(self) -> None:
        super()._stop_listening()
        self._peer_server.stop()

    async def _first_page(self) -> None:
        """Until there is an index: without one all requests would go by load."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_PAGE_S):
                while not self.reading.is_attached:
                    self.reading.take_news()
                    await asyncio.sleep(0.01)

    async def keep_up(self) -> None:
        """Take news where no request does."""
        while True:
            self.reading.take_news()
            await asyncio.sleep(_NEWS_S)


def run_reader(
    config: ServerConfig,
    folder: SharedFolder,
    place: Place,
    bound: socket.socket,
    alive_at: int,
    ready: Callable[[], None],
) -> None:
    """Serve until a signal, or until nobody has the other end of the pipe any more."""
    raise_descriptor_limit()
    uvloop.run(_serve(config, folder, place, bound, alive_at, ready))


async def _serve(
    config: ServerConfig,
    folder: SharedFolder,
    place: Place,
    bound: socket.socket,
    alive_at: int,
    ready: Callable[[], None],
) -> None:
    sys.setswitchinterval(SWITCH_S)
    stopping = stopped(alive_at)
    async with ReaderService(config, folder, place, bound) as service:
        keeping_up = asyncio.create_task(service.keep_up(), name="keep up")
        ready()
        await stopping.wait()
        keeping_up.cancel()
