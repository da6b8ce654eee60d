"""A look at a worker: whether it is well, what it serves, where its events are.

In:  what a worker answers.   Out: changes of the Worker, of the router's ranks, of who serves what.

One failed look says little of a worker that takes connections, as it may be busy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeGuard

import aiohttp

from kvplug.http_service import is_local_shortage
from kvplug.protocol import WorkerHello
from kvplug.router.core import Router
from kvplug.server.config import ServerConfig
from kvplug.server.workers import rank_sources
from kvplug.server.workers.asking import WorkerSession
from kvplug.server.workers.model_cards import (
    cards_of,
    model_of,
    root_of_sglang,
    served_by,
    with_root,
)
from kvplug.server.workers.rank_sources import RankSource, sources_of
from kvplug.server.workers.serving import Serving
from kvplug.server.workers.worker import Worker
from kvplug.server.workers.worker_events import WorkerEvents
from kvplug.server.workers.worker_url import url_said

logger = logging.getLogger(__name__)

# In a row, until a worker that takes connections is down.
_FAILED_LOOKS: Final = 2
_OF_SGLANG: Final = "/server_info"
_SAYS_SOURCES: Final[dict[str, Callable[[bytes], list[RankSource]]]] = {
    "/kv_event_sources": rank_sources.of_vllm,
    _OF_SGLANG: rank_sources.of_sglang,
}


class HealthChecks:
    """look_at a worker; set_sources of its events."""

    def __init__(
        self,
        config: ServerConfig,
        router: Router,
        session: WorkerSession,
        serving: Serving,
        events: WorkerEvents,
        *,
        has_nats: bool = False,
    ) -> None:
        """`has_nats`: what nobody names comes over NATS."""
        self._has_nats = has_nats
        self._config, self._router, self._session = config, router, session
        self._serving, self._events = serving, events
        self._uses_events = config.router.follows_events

    async def look_at(self, worker: Worker) -> None:
        """Ask it whether it is well and what it serves; note what is new."""
        url = worker.url
        try:
            url = self._url_of(worker)
            await self._get(url, "/health")
            found = () if worker.is_up else await self._ask_for_sources(worker, url)
            # Each time: adapters come and go while the engine runs.
            said = await self._get(url, "/v1/models")
            models, cards = with_root(served_by(said), worker.root), cards_of(said)
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
            worker.url = url
            self._note_failure(worker, error)
            return
        worker.num_failed_looks = 0
        if cards != worker.cards:
            worker.cards = cards
            self._serving.note_cards()
        self._note_said(worker)
        if models != worker.models:
            worker.models = models
            self._serving.note_change()
            await asyncio.to_thread(self._forget_reloaded, worker)
            # In a thread, as it waits for a run of events to end.
            await asyncio.to_thread(self._router.add_worker, worker.name, model=model_of(models))
        if not worker.is_up:
            was_down_because = worker.down_because
            sources = sources_of(worker.spec, found, has_nats=self._has_nats)
            await asyncio.to_thread(self.set_sources, worker, sources)
            if not self._uses_events:  # it may come back with an empty cache
                await asyncio.to_thread(self._clear, worker)
            if worker.down_because == was_down_because:
                self._bring_up(worker, url)

    def _bring_up(self, worker: Worker, url: str) -> None:
        worker.url, worker.down_because = url, None
        worker.num_times_up += 1
        self._serving.ejections.note_success(worker.name)  # it may be another engine
        self._serving.note_change()
        logger.info("worker %s is up, serving %s", worker.shown, ", ".join(worker.models))
        if self._uses_events:
            self._events.warn_of_unfollowed(worker)

    def _url_of(self, worker: Worker) -> str:
        """Where its API is; ValueError if its publisher has to say that, and did not.

        While it is up nothing changes: no hello takes requests away from an engine that answers.
        """
        if worker.spec.url is not None:
            return worker.spec.url
        if worker.is_up and worker.url is not None:
            return worker.url
        follower = worker.followers.get(0)
        url = url_said(
            worker.about,
            worker.name,
            has_spoken=follower is not None and follower.num_messages > 0,
            is_ours=follower is not None and follower.speaks_ours,
        )
        for other in self._serving.workers.values():
            if other is not worker and other.url == url:
                raise ValueError(f"its hello says {url}, which is worker {other.name} already")
        return url

    async def _ask_for_sources(self, worker: Worker, url: str) -> Sequence[RankSource]:
        """What the engine says of its ranks; nothing if it knows no such question."""
        for path, read in _SAYS_SOURCES.items():
            try:
                answer = await self._get(url, path)
                worker.root = root_of_sglang(answer) if path == _OF_SGLANG else ""
                return read(answer)
            except aiohttp.ClientResponseError:
                continue  # no such route
            except ValueError:
                logger.info("worker %s: %s says nothing of event streams", worker.name, path)
        about = worker.about
        # An engine that is one rank of many has an API of its own.
        return [RankSource(rank) for rank in range(about.dp_size)] if _is_first(about) else ()

    def _note_said(self, worker: Worker) -> None:
        said = worker.about or WorkerHello()
        if (said.tokenizer, said.names_extra_keys) != (worker.tokenizer, worker.names_extra_keys):
            worker.tokenizer, worker.names_extra_keys = said.tokenizer, said.names_extra_keys
            self._serving.note_change()

    def set_sources(self, worker: Worker, sources: list[RankSource]) -> None:
        """The worker has these ranks. Waits for a run of events to end."""
        if sources == worker.sources:
            return
        if len(sources) < len(worker.sources):
            self._router.remove_worker(worker.name)
        block_size, model = worker.spec.block_size, model_of(worker.models)
        self._router.add_worker(
            worker.name, dp_size=len(sources), model=model, block_size=block_size
        )
        worker.sources = sources
        if self._uses_events:
            worker.followers = self._events.set_sources(worker.spec, sources)

    def _forget_reloaded(self, worker: Worker) -> None:
        """An adapter that was loaded from another path reuses nothing of what it computed before
        (vLLM 0.32 hashes the path).
        """
        paths = {each.lora_name: each.lora_path for each in worker.models.values()}
        for lora_name, path in paths.items():
            before = worker.lora_paths.get(lora_name, path)
            if before != path and self._uses_events:
                num = self._router.forget_adapter(worker.name, lora_name)
                text = "worker %s: adapter %r is loaded from %r now, %d blocks of it from %r are "
                text += "forgotten"
                logger.info(text, worker.name, lora_name, path, num, before)
        worker.lora_paths |= paths

    def _clear(self, worker: Worker) -> None:
        for rank in worker.ranks:
            self._router.clear(rank)

    def _note_failure(self, worker: Worker, error: Exception) -> None:
        reason = str(error) or type(error).__name__
        if is_local_shortage(error):
            logger.warning("worker %s cannot be looked at: %s", worker.name, reason)
            return
        worker.num_failed_looks += 1
        is_rejected = isinstance(error, aiohttp.ClientConnectorError)
        if worker.is_up and worker.num_failed_looks < _FAILED_LOOKS and not is_rejected:
            return  # it may be busy
        if worker.down_because != reason:
            logger.warning(
                "worker %s %s: %s; looking again every %g s",
                worker.shown,
                "is not known yet" if worker.url is None else "is not reachable",
                reason,
                self._config.health_interval_s,
            )
        self._serving.take_down(worker, reason)

    async def _get(self, url: str, path: str) -> bytes:
        timeout_s = self._config.connect_timeout_s
        async with self._session.get(url, path, timeout_s=timeout_s) as response:
            response.raise_for_status()
            return await response.read()


def _is_first(about: WorkerHello | None) -> TypeGuard[WorkerHello]:
    return about is not None and about.dp_rank == 0
