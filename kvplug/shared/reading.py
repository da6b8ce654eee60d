"""ReadingRouter: a Router that decides by an index that another process writes.

In:  a shared folder, workers, requests.   Out: Decisions, as of one router in one process.

Before each look at the fleet it takes over what is new: arrays that the writer has published, what
caches hold, the load of the other processes, and what they have sent where. After it, they can see
what this one is busy with. Where the index cannot be read in time, a request goes by load alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Unpack

import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError
from kvplug.events import Rank
from kvplug.kernels import matching, peer_load
from kvplug.router.config import RouterConfig
from kvplug.router.core import Router
from kvplug.router.first_tokens import UnreportedFirstTokens
from kvplug.router.fleet_index import FleetOptions
from kvplug.router.load import ActiveRequest, LoadListener
from kvplug.router.query_first_lock import QueryFirstLock
from kvplug.shared.attached import Attached, AttachedFleet
from kvplug.shared.folder import SharedFolder
from kvplug.shared.peers import Peers, Place

U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


class ReadingRouter(Router):
    """A Router without events. `num_given_up` counts requests that were routed by load alone, as
    the index could not be read in time; `peers`: what the processes tell each other.
    """

    def __init__(
        self,
        config: RouterConfig,
        folder: SharedFolder,
        place: Place,
        *,
        clock: Callable[[], float] = time.monotonic,
        random_: random.Random | None = None,
    ) -> None:
        self._folder = folder
        super().__init__(config, clock=clock, random_=random_)
        self.peers = Peers(folder, place)
        self._slots = self.peers.slots_of([])
        self._last_ms, self._wants_news = 0.0, True
        self._decider.unreported = _Presumed(self.fleet_index, self.load)
        self.load.listener = _Telling(self)
        self._lock: QueryFirstLock = _NewsLock(self)

    def _new_fleet_index(self, **options: Unpack[FleetOptions]) -> AttachedFleet:
        self._attached_fleet = AttachedFleet(self._folder, **options)
        return self._attached_fleet

    @property
    def is_attached(self) -> bool:
        """Whether a writer has published an index, and it is in use."""
        return bool(self._attached_fleet.attached) and not self._attached_fleet.is_behind

    @property
    def generation(self) -> int:
        """Of the arrays that are in use; each writer's are later than those of the one before."""
        return int(self._attached_fleet.reads[matching.SEEN])

    @property
    def num_reads(self) -> int:
        """How often the index was asked."""
        return int(self._attached_fleet.reads[matching.NUM_READS])

    @property
    def num_given_up(self) -> int:
        """How often it gave no answer in time."""
        return int(self._attached_fleet.reads[matching.NUM_GIVEN_UP])

    def clear(self, rank: Rank) -> int:
        """Nothing: the writer clears."""
        return 0

    def forget_adapter(self, worker: str, lora_name: str) -> int:
        """Nothing: the writer forgets."""
        return 0

    def first_token(self, request_id: str) -> bool:
        """As Router."""
        with self._without_news():
            return super().first_token(request_id)

    def finish(self, request_id: str, num_tokens: int | None = None) -> bool:
        """As Router."""
        with self._without_news():
            return super().finish(request_id, num_tokens)

    def renew(self, request_id: str) -> bool:
        """As Router."""
        with self._without_news():
            return super().renew(request_id)

    @contextmanager
    def _without_news(self) -> Iterator[None]:
        """What says something of one request of this process need not know of others."""
        self._wants_news = False
        try:
            yield
        finally:
            self._wants_news = True

    def require_events(self, rank: Rank) -> None:
        """ConfigError: the writer applies events."""
        raise ConfigError(f"cannot apply events of {rank}: another process of this router does")

    def take_news(self) -> None:
        """What is new since the last look; for a process that nobody asks anything for a while."""
        with self._lock:
            pass

    def catch_up(self) -> None:
        """As `take_news`; the lock is held."""
        if not self._wants_news:
            return
        fleet = self._attached_fleet
        if fleet.is_behind and fleet.attach():
            self._fleet_changed()
        if fleet.have_facts_changed():
            for attached in fleet.attached:
                if attached.group in fleet.groups:  # else none of its workers is known here
                    self._take_facts(attached)
        peers = self.peers
        if peers.have_changed():
            place = peers.place
            self.shared_load.take(peers.rows, place.number, place.num_processes, self._slots)
            self.shared_load.note_last_request(peers.last_ms)
        for sent in peers.news():
            self.shared_load.note_sent(sent, self._clock())

    def show_load(self) -> None:
        """The others can see what this process is busy with; the lock is held."""
        if self.load.show_own(self._slots, self.peers.own_rows):
            self.peers.note_change(self._last_ms)

    def _take_facts(self, attached: Attached) -> None:
        index, ranks = attached.group.index, self.load.ranks.reshape(-1)
        changed = peer_load.take_facts(
            attached.facts, attached.fleet_numbers, ranks, index.confidence
        )
        if changed & peer_load.HAS_CAPACITY:
            self.load.version.count += 1  # the usual capacity may be another one
        if changed & peer_load.HAS_CONFIDENCE:
            attached.apply_confidence()

    def _fleet_changed(self) -> None:
        super()._fleet_changed()
        self._attached_fleet.forget_facts()
        ranks = self.fleet_index.numbers.ranks
        before, place = self._slots, self.peers.place
        self._slots = self.peers.slots_of(ranks)
        self.peers.leave(np.setdiff1d(before, self._slots))
        self.shared_load.take(self.peers.rows, place.number, place.num_processes, self._slots)

    def tell(self, request: ActiveRequest) -> None:
        """The others are told what this process has sent where."""
        self._last_ms = 1e3 * request.routed_s
        self.peers.tell(self.fleet_index.numbers.rank(request.rank_number), request)


class _Telling(LoadListener):
    def __init__(self, router: ReadingRouter) -> None:
        self._router = router

    def started(self, request: ActiveRequest) -> None:
        """As LoadListener."""
        self._router.tell(request)


class _NewsLock(QueryFirstLock):
    """Whoever takes it sees what is new, and shows what has become of it. Nobody ingests here."""

    def __init__(self, router: ReadingRouter) -> None:
        super().__init__()
        self._router = router

    def __enter__(self) -> None:
        super().__enter__()
        try:
            self._router.catch_up()
        except BaseException:
            super().__exit__(None, None, None)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._router.show_load()
        finally:
            super().__exit__(kind, error, trace)


class _Presumed(UnreportedFirstTokens):
    """No event is seen here, so first tokens that nobody reports are presumed by the time."""

    def _held(self, rank: Rank, hashes: U64) -> Mask:
        return np.ones(len(hashes), dtype=np.bool_)
