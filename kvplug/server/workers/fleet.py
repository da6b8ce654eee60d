"""The workers, from their start to their end: they come, are looked at and followed, and go.

In:  worker specs.   Out: the state of each worker; candidates for a model (serving.py).

A worker is looked at every `health_interval_s`; a request that cannot reach it marks it down at
once. When it comes up, it is asked for its data-parallel ranks. Its blocks leave the index when
its event stream goes (ingest/follower.py). A worker is known by its name: the URL of its API, or
the event endpoint by which it was named; then its publisher says the URL.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvplug.audit.audit import Audit
from kvplug.errors import TransportError
from kvplug.events import Rank
from kvplug.ingest.follower import Follower
from kvplug.ingest.trust import APPROXIMATE, UNUSED, TrustState
from kvplug.kernels import costing
from kvplug.router.core import Router
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.workers.asking import WorkerSession
from kvplug.server.workers.ejection import Ejections
from kvplug.server.workers.health_checks import HealthChecks
from kvplug.server.workers.rank_sources import RankSource, sources_of
from kvplug.server.workers.serving import Serving
from kvplug.server.workers.worker import Worker
from kvplug.server.workers.worker_events import WorkerEvents

if TYPE_CHECKING:
    from kvplug.cluster.replica import Replica

logger = logging.getLogger(__name__)


class Fleet(Serving):
    """start, stop; add, remove, set_draining; who serves what (serving.py) is kept up to date."""

    def __init__(
        self,
        config: ServerConfig,
        router: Router,
        audit: Audit,
        session: WorkerSession,
        replica: Replica | None = None,
    ) -> None:
        """`replica`: what the router shares with others."""
        ejections = Ejections(config.eject_after, config.ejection_s)
        super().__init__(map(Worker, config.workers), ejections)
        self._config, self._router, self._audit = config, router, audit
        self._replica = replica if config.router.follows_events else None
        self._events = self._make_events()
        has_nats = self._replica is not None
        self._checks = HealthChecks(config, router, session, self, self._events, has_nats=has_nats)
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._changing = asyncio.Lock()  # one worker comes or goes at a time
        self.on_removed: list[Callable[[Worker], object]] = []
        """Called with a worker that is one no more; requests may still be on it."""

    def _make_events(self) -> WorkerEvents:
        return WorkerEvents(self._config, self._router, self._audit, self._replica)

    async def start(self) -> None:
        """Follow all events, look at all workers once, then keep looking."""
        if self.uses_events:
            self._events.start()
        elif not self._config.router.needs_index:
            logger.info("weight 0: requests go by load alone, and no events are followed")
        else:
            seconds = self._config.router.approximate_ttl_s
            logger.info("approximate: what is routed counts as cached for %g s", seconds)
        sizes = {} if self._replica is None else await self._restore(self._replica)
        for worker in self.workers.values():
            known = [RankSource(rank) for rank in range(sizes.get(worker.name, 0))]
            self._checks.set_sources(worker, self._sources_of(worker.spec, known))
        if self._replica is not None:
            events = self._events
            self._replica.follow(lambda: events.followers, lambda: events.num_direct_messages)
        await asyncio.gather(*(self._checks.look_at(worker) for worker in self.workers.values()))
        for worker in self.workers.values():
            self._start_watching(worker)

    async def _restore(self, replica: Replica) -> dict[str, int]:
        """Begin with what the others know; returns how many ranks of each worker that is of."""
        await replica.prepared()
        sizes = {name: size for name, size in replica.dp_sizes.items() if size > 1}
        for worker in self.workers.values():
            size = worker.spec.dp_size or sizes.get(worker.name, 1)
            self._router.add_worker(worker.name, dp_size=size, block_size=worker.spec.block_size)
        await asyncio.to_thread(replica.restore)
        return sizes

    def _sources_of(self, spec: WorkerSpec, known: Sequence[RankSource] = ()) -> list[RankSource]:
        return sources_of(spec, known, has_nats=self._replica is not None)

    async def stop(self) -> None:
        """End what start began."""
        for task in self._watching.values():
            task.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)
        await asyncio.to_thread(self._events.stop)

    async def add(self, spec: WorkerSpec, taints: frozenset[str]) -> Worker:
        """Another worker, looked at once; ConfigError if it is there, or shares an endpoint,
        TransportError for an endpoint that no transport understands. Then nothing is changed.
        """
        async with self._changing:
            specs = [each.spec for each in self.workers.values()]
            replace(self._config, workers=(*specs, spec))  # checks them beside each other
            worker = Worker(spec)
            try:
                await asyncio.to_thread(self._checks.set_sources, worker, self._sources_of(spec))
            except TransportError:
                await asyncio.to_thread(self._router.remove_worker, spec.name)
                raise
            # Made anew, as others may be going through it.
            self.workers = {**self.workers, spec.name: worker}
            await self.set_taints(worker, taints)
            await self._checks.look_at(worker)
            self._start_watching(worker)
            logger.info("worker %s was added", spec.name)
            return worker

    async def remove(self, worker: Worker) -> None:
        """Forget a worker; requests that it has are not interrupted."""
        async with self._changing:
            if self.workers.get(worker.name) is not worker:
                return
            task = self._watching.pop(worker.name)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.workers = {name: each for name, each in self.workers.items() if each is not worker}
            self.note_change()
            self.ejections.forget(worker.name)
            for forget in self.on_removed:
                forget(worker)
            if self.uses_events:
                await asyncio.to_thread(self._events.set_sources, worker.spec, ())
            await asyncio.to_thread(self._router.remove_worker, worker.name)
            logger.info("worker %s was removed", worker.name)

    async def set_taints(self, worker: Worker, taints: frozenset[str]) -> None:
        """Names that requests may require or prefer, instead of those it has."""
        worker.taints = taints
        await asyncio.to_thread(self._router.add_worker, worker.name, taints=taints)

    def set_draining(self, worker: Worker, is_draining: bool) -> None:
        """Whether the worker gets no new requests; those that it has go on."""
        if worker.is_draining != is_draining:
            logger.info("worker %s is %s", worker.name, "drained" if is_draining else "used again")
        worker.is_draining = is_draining
        self.note_change()

    def num_in_flight(self, worker: Worker) -> int:
        """Requests of this router on the worker."""
        router, numbers = self._router, self._router.fleet_index.numbers
        with router.locked():
            return sum(
                int(router.load.ranks[numbers.number_of(rank)][costing.NUM_RUNNING])
                for rank in worker.ranks
                if rank in numbers
            )

    @property
    def uses_events(self) -> bool:
        """Whether the workers' events are followed; if not, none of them has a follower."""
        return self._config.router.follows_events

    @property
    def trust_without_events(self) -> TrustState:
        """Of every rank, if events are not used."""
        return APPROXIMATE if self._config.router.needs_index else UNUSED

    @property
    def hears_events(self) -> bool:
        """Whether what the engines publish is received; true where events are not used."""
        return not self.uses_events or self._events.is_alive

    @property
    def events_endpoint(self) -> str | None:
        """What engines connect to with their events, with the port that was taken."""
        return self._events.endpoint

    def follower_of(self, rank: Rank) -> Follower | None:
        """Who follows the events of the rank; None if nobody does."""
        return self.workers[rank.worker].followers.get(rank.dp_rank)

    def events_endpoint_of(self, rank: Rank) -> str | None:
        """Where the rank's events come from; None if they are not followed."""
        return self._events.endpoint_of(rank)

    def url_of(self, name: str) -> str:
        """Where the API of a worker is that was up."""
        worker = self.workers.get(name)
        return "" if worker is None else worker.url or ""

    def has_ranks(self, name: str) -> bool:
        """Whether requests to the worker must name a data-parallel rank."""
        return name in self.workers and len(self.workers[name].sources) > 1

    def block_size_of(self, worker: Worker) -> int | None:
        """Tokens per block; None while neither a flag nor an event said it."""
        return self._router.fleet_index.block_size_of(worker.name)

    def _start_watching(self, worker: Worker) -> None:
        task = asyncio.create_task(self._watch(worker), name=f"watch {worker.name}")
        self._watching[worker.name] = task

    async def _watch(self, worker: Worker) -> None:
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            await self._checks.look_at(worker)
