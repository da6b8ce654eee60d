"""Chooser: a Router over the data-parallel ranks of one engine, and followers of their events.

In:  where the ranks publish; requests, and what becomes of them.   Out: a rank for each.

Ranks are numbered from 0 here, whatever the engine calls them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from kvplug.curve_keys import ClientKeys
from kvplug.dp_balancing.balancer import Request
from kvplug.dp_balancing.rank_streams import RankStream
from kvplug.events import Rank
from kvplug.hashing import Hashes
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from kvplug.router.config import RouterConfig
from kvplug.router.core import Router
from kvplug.router.decider import Decision
from kvplug.router.options import RouteOptions
from kvplug.transports import transports_with

logger = logging.getLogger(__name__)

_NEW_TOKENS_SHARE: Final = 0.05  # of the last request in the mean


class Chooser:
    """start, choose, stop; tell `router` what becomes of requests."""

    worker: Final = "engine"
    """What the router calls the one worker that it has."""

    def __init__(
        self,
        streams: Sequence[RankStream],
        keys: ClientKeys | None = None,
        expiry_s: float = 600.0,
    ) -> None:
        self.router = Router(RouterConfig(request_expiry_s=expiry_s))
        self.router.add_worker(self.worker, dp_size=len(streams))
        self.mean_new_tokens = 0.0
        self._streams = streams
        self._thread = EventThread() if keys is None else EventThread(transports_with(keys))
        self._followers = [
            Follower(self.router, Rank(self.worker, number), engine_rank=stream.engine_rank)
            for number, stream in enumerate(streams)
        ]

    def start(self) -> None:
        """Follow the ranks from now on. TransportError for an endpoint that none understands."""
        self._thread.start()
        for follower, stream in zip(self._followers, self._streams, strict=True):
            self._thread.follow(follower, stream.events, stream.topic, stream.replay)

    def stop(self) -> None:
        """Follow nobody any more."""
        self._thread.stop()

    @property
    def num_ranks(self) -> int:
        """Of the engine."""
        return len(self._followers)

    @property
    def num_connected(self) -> int:
        """Ranks whose events arrive; 0 if nobody receives them."""
        if not self._thread.is_alive:
            return 0
        return sum(follower.connected for follower in self._followers)

    def choose(self, request: Request) -> Decision:
        """Where it goes; it is load there until `router.finish`. Errors as of `Router.route`."""
        options: RouteOptions = {"reports_first_token": request.reports_first_token}
        if request.rank is not None:
            options["dp_rank"] = request.rank
        if request.max_tokens is not None:
            options["max_tokens"] = request.max_tokens
        decision = self._decide(request, options)
        num_new = request.num_tokens - decision.cached_tokens
        self.mean_new_tokens += _NEW_TOKENS_SHARE * (num_new - self.mean_new_tokens)
        return decision

    def adopt(self, request_id: str, number: int, num_tokens: int) -> None:
        """The engine has chosen the rank for this one itself; it is load there, too."""
        self.router.adopt(request_id, Rank(self.worker, number), (), num_tokens)

    def report(self, counts: Sequence[tuple[int, int]]) -> None:
        """How many requests each rank runs, and how many wait there, whoever sent them. Those that
        wait are taken to have as much to compute as requests from here, on average.
        """
        for number, (num_running, num_waiting) in enumerate(counts[: self.num_ranks]):
            self.router.set_reported_load(
                Rank(self.worker, number),
                num_running=num_running,
                num_waiting=num_waiting,
                waiting_tokens=round(num_waiting * self.mean_new_tokens),
            )

    def _decide(self, request: Request, options: RouteOptions) -> Decision:
        router, request_id = self.router, request.request_id
        if self.is_by_load(request) or request.items:
            hashes = () if self.is_by_load(request) else self._hashes_with_items(request)
            return router.route_hashed(hashes, request.num_tokens, request_id=request_id, **options)
        assert request.tokens is not None
        space = request.namespace
        return router.route(request.tokens, request_id=request_id, namespace=space, **options)

    def is_by_load(self, request: Request) -> bool:
        """Whether nobody knows which of the ranks' blocks are its."""
        return request.tokens is None or (request.has_extra_key and not self._tells_extra_keys)

    @property
    def _tells_extra_keys(self) -> bool:
        about = [follower.about for follower in self._followers]
        return all(each is not None and each.names_extra_keys for each in about)

    def _hashes_with_items(self, request: Request) -> Hashes:
        from kvplug.dp_balancing.multimodal import block_keys

        assert request.tokens is not None
        hasher = self.router.index_of(Rank(self.worker)).hasher
        keys = block_keys(request.items, hasher.block_size)
        return hasher.sequence_hashes(request.tokens, request.namespace, extra_keys=keys)


def rehearse() -> None:
    """A request from its choice to its end, so that no first one waits for what is loaded late."""
    router = Router(RouterConfig(block_size=16))
    router.add_worker(Chooser.worker, dp_size=2)
    decision = router.route(range(100), request_id="rehearsal")
    router.set_reported_load(decision.rank, num_running=1, num_waiting=1, waiting_tokens=16)
    router.first_token("rehearsal")
    router.finish("rehearsal", 1)
