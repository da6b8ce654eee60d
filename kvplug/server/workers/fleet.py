"""The workers: which are up, what they serve, and whether their events arrive.

In:  worker specs.   Out: candidates for a model, and the state of each worker.

A worker is looked at every `health_interval_s`; a request that cannot reach it marks it down at
once. When it comes up, it is asked for its data-parallel ranks. Its blocks leave the index when
its event stream goes (ingest/follower.py). A worker is known by its name: the URL of its API, or
the event endpoint by which it was named; then its publisher says the URL.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeGuard

import aiohttp

from kvplug.audit.audit import Audit
from kvplug.errors import TransportError
from kvplug.events import Rank
from kvplug.http_service import is_local_shortage
from kvplug.ingest.follower import Follower
from kvplug.ingest.trust import APPROXIMATE, UNUSED, TrustState
from kvplug.kernels import costing
from kvplug.protocol import WorkerHello
from kvplug.router.core import Router
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.workers import rank_sources
from kvplug.server.workers.asking import WorkerSession
from kvplug.server.workers.ejection import Ejections
from kvplug.server.workers.model_cards import (
    Cards,
    ModelTable,
    Served,
    cards_of,
    joined,
    model_of,
    root_of_sglang,
    served_by,
    with_root,
)
from kvplug.server.workers.rank_sources import RankSource, sources_of
from kvplug.server.workers.worker_events import WorkerEvents
from kvplug.server.workers.worker_url import url_said

logger = logging.getLogger(__name__)

# In a row, until a worker that takes connections is down.
_FAILED_LOOKS = 2
_OF_SGLANG: Final = "/server_info"
_SAYS_SOURCES: Final[dict[str, Callable[[bytes], list[RankSource]]]] = {
    "/kv_event_sources": rank_sources.of_vllm,
    _OF_SGLANG: rank_sources.of_sglang,
}


@dataclass(slots=True)
class Worker:
    """One engine as the router sees it; `down_because` is None while it is up.

    url: of its API; None until its publisher says it, if it was named by its event endpoint;
    sources: of the events of each data-parallel rank; followers: of those that publish; models: by
    name, what it serves, adapters included; cards: by name, what it says of each; lora_paths: by
    adapter, where it was last loaded from, of former adapters, too; tokenizer: the digest that its
    hello said last; names_extra_keys: as its hello said last; root: where it loaded its tokenizer
    from, if /v1/models does not say it; num_times_up: how often it came up, as each time it may be
    another engine; num_failed_looks: since it last answered one; taints: names that
    requests may require or prefer; is_draining: it gets no new requests.
    """

    spec: WorkerSpec
    sources: list[RankSource] = field(default_factory=list)
    followers: dict[int, Follower] = field(default_factory=dict)
    down_because: str | None = "not looked at yet"
    models: dict[str, Served] = field(default_factory=dict)
    cards: Cards = field(default_factory=dict)
    lora_paths: dict[str, str] = field(default_factory=dict)
    tokenizer: str = ""
    names_extra_keys: bool = False
    root: str = ""
    num_times_up: int = 0
    num_failed_looks: int = 0
    taints: frozenset[str] = frozenset()
    is_draining: bool = False
    url: str | None = field(init=False)

    def __post_init__(self) -> None:
        self.url = self.spec.url

    @property
    def name(self) -> str:
        """By which the router knows it, whatever becomes of it."""
        return self.spec.name

    @property
    def about(self) -> WorkerHello | None:
        """What the publisher of its first rank said of it last; None for a stock one."""
        return self.followers[0].about if 0 in self.followers else None

    @property
    def is_up(self) -> bool:
        """Whether requests are sent to it."""
        return self.down_because is None

    @property
    def state(self) -> str:
        """`unknown`: nobody has said yet where its API is."""
        if self.is_up:
            return "draining" if self.is_draining else "up"
        return "unknown" if self.url is None else "down"

    @property
    def ranks(self) -> list[Rank]:
        """Its data-parallel ranks, in order."""
        return [Rank(self.name, number) for number in range(len(self.sources))]


class Fleet:
    """start, stop; candidates, models, mark_down."""

    def __init__(
        self, config: ServerConfig, router: Router, audit: Audit, session: WorkerSession
    ) -> None:
        self.workers = {spec.name: Worker(spec) for spec in config.workers}
        self._config, self._router, self._session = config, router, session
        self._cards: Cards | None = None  # of all, once they are asked for
        self.ejections = Ejections(config.eject_after, config.ejection_s)
        self.changed = asyncio.Event()
        """Set when a worker comes, goes, or serves something else; then there is a new one."""
        self._note_models()
        self._audit = audit
        self._events = self._make_events()
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._changing = asyncio.Lock()  # one worker comes or goes at a time

    def _make_events(self) -> WorkerEvents:
        return WorkerEvents(self._config, self._router, self._audit)

    async def start(self) -> None:
        """Follow all events, look at all workers once, then keep looking."""
        if self.uses_events:
            self._events.start()
        elif not self._config.router.needs_index:
            logger.info("weight 0: requests go by load alone, and no events are followed")
        else:
            seconds = self._config.router.approximate_ttl_s
            logger.info("approximate: what is routed counts as cached for %g s", seconds)
        for worker in self.workers.values():
            self._set_sources(worker, sources_of(worker.spec, ()))
        await asyncio.gather(*(self._look_at(worker) for worker in self.workers.values()))
        for worker in self.workers.values():
            self._start_watching(worker)

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
                await asyncio.to_thread(self._set_sources, worker, sources_of(spec, ()))
            except TransportError:
                await asyncio.to_thread(self._router.remove_worker, spec.name)
                raise
            # Made anew, as others may be going through it.
            self.workers = {**self.workers, spec.name: worker}
            await self.set_taints(worker, taints)
            await self._look_at(worker)
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
            self._note_models()
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
        self._note_models()

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

    @property
    def may_grow(self) -> bool:
        """Whether a worker may come up that serves what is missing."""
        return not self.workers or not all(worker.is_up for worker in self.workers.values())

    @property
    def models(self) -> Mapping[str, Served]:
        """What the workers that are up serve, by the name that is asked for, in order."""
        return self._table.served

    def cards(self) -> Cards:
        """What the workers that are up say of these models, by name and in order."""
        if self._cards is None:
            self._cards = joined(each.cards for each in self.workers.values() if each.is_up)
        return self._cards

    def served_as(self, model: str) -> Served | None:
        """What is meant by a name that is asked for, or None."""
        return self._table.known.get(model)

    def candidates(self, model: str) -> frozenset[str]:
        """Names of the workers that serve the model: those that are up and not ejected; if none
        is, those that did when they were, as one may be back before it is looked at.
        """
        return self.ejections.usable(self._table.workers(model))

    def tokenizers_of(self, model: str) -> frozenset[str]:
        """The digests of the tokenizers that those workers have, as far as they say so."""
        return self._tokenizers.get(model, frozenset())

    def names_extra_keys(self, model: str) -> bool:
        """Whether all those workers say of which extra_key their blocks are."""
        return model in self._named_extra_keys

    def block_size_of(self, worker: Worker) -> int | None:
        """Tokens per block; None while neither a flag nor an event said it."""
        return self._router.fleet_index.block_size_of(worker.name)

    def mark_down(self, name: str, reason: str) -> None:
        """A request could not reach the worker."""
        worker = self.workers.get(name)
        if worker is None:  # it was removed meanwhile
            return
        if worker.is_up:
            logger.warning("worker %s is down: %s", name, reason)
        self._take_down(worker, reason)

    def _take_down(self, worker: Worker, reason: str) -> None:
        was_up, worker.down_because = worker.is_up, reason
        if was_up:
            self._note_models()

    def _note_said(self, worker: Worker) -> None:
        said = worker.about or WorkerHello()
        if (said.tokenizer, said.names_extra_keys) != (worker.tokenizer, worker.names_extra_keys):
            worker.tokenizer, worker.names_extra_keys = said.tokenizer, said.names_extra_keys
            self._note_models()

    def _note_models(self) -> None:
        """A worker came up, went down, or serves something else."""
        up = {name: each.models for name, each in self.workers.items() if each.is_up}
        down = {name: each.models for name, each in self.workers.items() if not each.is_up}
        draining = {name for name, each in self.workers.items() if each.is_draining}
        self._table = ModelTable(up, down, draining)
        self._cards = None
        self.changed.set()
        self.changed = asyncio.Event()
        digests = {name: each.tokenizer for name, each in self.workers.items() if each.tokenizer}
        said = {model: self._table.workers(model) & digests.keys() for model in self._table.known}
        self._tokenizers = {
            model: frozenset(digests[name] for name in names) for model, names in said.items()
        }
        self._named_extra_keys = {
            model
            for model in self._table.known
            if all(self.workers[name].names_extra_keys for name in self._table.workers(model))
        }

    def _start_watching(self, worker: Worker) -> None:
        task = asyncio.create_task(self._watch(worker), name=f"watch {worker.name}")
        self._watching[worker.name] = task

    async def _watch(self, worker: Worker) -> None:
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            await self._look_at(worker)

    async def _look_at(self, worker: Worker) -> None:
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
            worker.cards, self._cards = cards, None
        self._note_said(worker)
        if models != worker.models:
            worker.models = models
            self._note_models()
            await asyncio.to_thread(self._forget_reloaded, worker)
            # In a thread, as it waits for a run of events to end.
            await asyncio.to_thread(self._router.add_worker, worker.name, model=model_of(models))
        if not worker.is_up:
            was_down_because = worker.down_because
            await asyncio.to_thread(self._set_sources, worker, sources_of(worker.spec, found))
            if not self.uses_events:  # it may come back with an empty cache
                await asyncio.to_thread(self._clear, worker)
            if worker.down_because == was_down_because:
                self._bring_up(worker, url)

    def _bring_up(self, worker: Worker, url: str) -> None:
        worker.url, worker.down_because = url, None
        worker.num_times_up += 1
        self.ejections.note_success(worker.name)  # it may be another engine
        self._note_models()
        logger.info("worker %s is up, serving %s", _shown(worker), ", ".join(worker.models))
        self._warn_of_unfollowed(worker)

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
        for other in self.workers.values():
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

    def _set_sources(self, worker: Worker, sources: list[RankSource]) -> None:
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
        if self.uses_events:
            worker.followers = self._events.set_sources(worker.spec, sources)

    def _forget_reloaded(self, worker: Worker) -> None:
        """An adapter that was loaded from another path reuses nothing of what it computed before
        (vLLM 0.32 hashes the path).
        """
        paths = {each.lora_name: each.lora_path for each in worker.models.values()}
        for lora_name, path in paths.items():
            before = worker.lora_paths.get(lora_name, path)
            if before != path and self.uses_events:
                num = self._router.forget_adapter(worker.name, lora_name)
                text = "worker %s: adapter %r is loaded from %r now, %d blocks of it from %r are "
                text += "forgotten"
                logger.info(text, worker.name, lora_name, path, num, before)
        worker.lora_paths |= paths

    def _warn_of_unfollowed(self, worker: Worker) -> None:
        unknown = [rank for rank in worker.ranks if self.follower_of(rank) is None]
        if not unknown or not self.uses_events:
            return
        unreached = [worker.sources[rank.dp_rank].unreached for rank in unknown]
        text = "no endpoint of its events is known; start the engine with --kv-events-config, and "
        text += "name its endpoint with events="
        if unreached[0] is not None:
            text = f"its events are at {unreached[0]}, which is not reached from here; publish at "
            text += "an address of its machine (tcp://*:5557 with a stock publisher, "
            text += "tcp://0.0.0.0:5557 with kvplug's), or name it with events="
        names = ", ".join(map(str, unknown))
        logger.warning("%s: only its load counts, as %s", names, text)

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
                _shown(worker),
                "is not known yet" if worker.url is None else "is not reachable",
                reason,
                self._config.health_interval_s,
            )
        self._take_down(worker, reason)

    async def _get(self, url: str, path: str) -> bytes:
        timeout_s = self._config.connect_timeout_s
        async with self._session.get(url, path, timeout_s=timeout_s) as response:
            response.raise_for_status()
            return await response.read()


def _shown(worker: Worker) -> str:
    """For the log: its name, and where it is if that is something else."""
    return worker.name if worker.url in (None, worker.name) else f"{worker.name} ({worker.url})"


def _is_first(about: WorkerHello | None) -> TypeGuard[WorkerHello]:
    return about is not None and about.dp_rank == 0
