"""The event streams of the workers: one follower for each data-parallel rank that has a publisher.

In:  worker specs, the sources of their ranks.   Out: followers that keep the router up to date.

Of several routers that share what they know (kvplug/cluster), a follower begins where the snapshot
ends that the router began with.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from kvplug.audit.audit import Audit
from kvplug.errors import TransportError, UnknownRankError
from kvplug.events import Rank
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from kvplug.router.core import Router
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.workers.rank_sources import RankSource
from kvplug.server.workers.worker import Worker
from kvplug.topics import PREFIX, Topic
from kvplug.transports import TRANSPORTS, transports_with

if TYPE_CHECKING:
    from kvplug.cluster.replica import Replica  # needs the extra

logger = logging.getLogger(__name__)


class WorkerEvents:
    """start, set_sources, stop; endpoint_of a rank. The first two may wait for the
    event thread.
    """

    def __init__(
        self, config: ServerConfig, router: Router, audit: Audit, replica: Replica | None = None
    ) -> None:
        self._config, self._router, self._audit = config, router, audit
        self._replica = replica
        keys = config.event_keys
        transports = TRANSPORTS if keys is None else transports_with(keys)
        more = {} if replica is None else replica.transports
        self._thread = EventThread({**transports, **more})
        self._followers: dict[Rank, Follower] = {}
        self._sources: dict[Rank, RankSource] = {}
        self.endpoint: str | None = None
        """What engines connect to with their events, with the port that was taken."""

    @property
    def is_alive(self) -> bool:
        """Whether events are received."""
        return self._thread.is_alive

    def start(self) -> None:
        """Receive, and let engines connect if they are to."""
        self._thread.start()
        if self._config.events_bind is not None:
            self.endpoint = self._thread.bind(self._config.events_bind)
        if self._replica is not None:
            self._replica.start(self._thread)

    @property
    def followers(self) -> list[Follower]:
        """All there are."""
        return list(self._followers.values())

    @property
    def num_direct_messages(self) -> int:
        """That came from the engines themselves, and not over NATS."""
        followers = self._followers.copy()
        direct = [rank for rank in followers if self._sources[rank].over_nats is None]
        return sum(followers[rank].num_messages for rank in direct)

    def stop(self) -> None:
        """Close all streams."""
        self._thread.stop()

    def endpoint_of(self, rank: Rank) -> str | None:
        """Where the rank's events come from; None if it is not followed."""
        if rank not in self._followers:
            return None
        return self._sources[rank].events or self.endpoint

    def set_sources(self, spec: WorkerSpec, sources: Sequence[RankSource]) -> dict[int, Follower]:
        """The worker's ranks publish there from now on; returns, by rank, who follows them.

        A stream that goes on is not interrupted; a rank whose publisher nobody knows is missing.

        TransportError for an endpoint in `spec` that no transport understands.
        """
        for rank in [rank for rank in self._followers if rank.worker == spec.name]:
            gone = rank.dp_rank >= len(sources)
            if gone or not self._is_same(rank, sources[rank.dp_rank]):
                self._unfollow(rank)
        for number, source in enumerate(sources):
            rank = Rank(spec.name, number)
            self._sources[rank] = source
            if rank in self._followers:
                self._followers[rank].engine_rank = source.engine_rank
                self._followers[rank].hides_states = source.hides_states
            else:
                self._follow(spec, rank, source)
        return {rank.dp_rank: f for rank, f in self._followers.items() if rank.worker == spec.name}

    def warn_of_unfollowed(self, worker: Worker) -> None:
        """A worker came up: say which of its ranks publish nothing that is received here."""
        unknown = [rank for rank in worker.ranks if rank not in self._followers]
        if not unknown:
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

    def _is_same(self, rank: Rank, source: RankSource) -> bool:
        before = self._sources[rank]
        return (before.events, before.replay) == (source.events, source.replay)

    def _unfollow(self, rank: Rank) -> None:
        self._thread.unfollow(self._followers.pop(rank))
        self._router.clear(rank)

    def _follow(self, spec: WorkerSpec, rank: Rank, source: RankSource) -> None:
        topic = self._topic_of(spec, source)
        if topic is None and source.events is not None:
            self._connect(spec, rank, source, source.events)
        elif topic is not None and (rank.dp_rank == 0 or source.over_nats is not None):
            follower = self._new_follower(rank, source)
            self._thread.follow_topic(follower, topic)
            self._followers[rank] = follower
        else:
            self._distrust(rank)

    def _distrust(self, rank: Rank) -> None:
        """Nothing is known of its blocks."""
        with suppress(UnknownRankError):  # its worker may have been removed just now
            self._router.set_confidence(rank, 0.0)

    def _topic_of(self, spec: WorkerSpec, source: RankSource) -> Topic | None:
        """By which it is known at `endpoint`, or on NATS; None if its events come directly."""
        if source.over_nats is not None:
            return Topic.parse(f"{PREFIX}{source.over_nats}")
        is_here = self.endpoint is not None and spec.events is None
        return Topic.parse(spec.topic) if is_here else None

    def _connect(self, spec: WorkerSpec, rank: Rank, source: RankSource, events: str) -> None:
        follower = self._new_follower(rank, source)
        try:
            self._thread.follow(follower, events, spec.topic, source.replay)
        except TransportError as error:
            if spec.events is not None:
                raise
            logger.warning("worker %s: its events cannot be followed: %s", rank, error)
            self._distrust(rank)
        else:
            self._followers[rank] = follower

    def _new_follower(self, rank: Rank, source: RankSource) -> Follower:
        # While some of its events are missing, its blocks are worth what the audit measures.
        follower = Follower(
            self._router,
            rank,
            engine_rank=source.engine_rank,
            evidence=self._audit.evidence_of(rank),
        )
        follower.hides_states = source.hides_states
        if self._replica is not None:
            self._replica.resume(follower)
        return follower
