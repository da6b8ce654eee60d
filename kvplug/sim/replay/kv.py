"""kvplug's own router as a policy.

In:  requests, first tokens, ends, events of caches.   Out: engines, by the router's decisions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from zlib import crc32

import numpy as np

from kvplug.events import Rank, Tier
from kvplug.packed import PackedEvent, PackedRemoved, PackedStored, encode
from kvplug.router.config import RouterConfig
from kvplug.router.core import Router
from kvplug.router.options import RouteOptions
from kvplug.sim.replay.engine import CacheEvent, EngineSpec
from kvplug.sim.replay.workload import Request


class Kv:
    """kvplug's Router, told what a router is told: events, first tokens, ends, and so many times
    the caches' capacities.
    """

    def __init__(
        self, specs: Sequence[EngineSpec], seed: int, config: RouterConfig, capacity: float = 1.0
    ) -> None:
        self._now = 0.0
        self.router = Router(config, clock=lambda: self._now, random_=random.Random(seed))
        self._ranks = [Rank(f"engine-{number}") for number in range(len(specs))]
        self._engine_of = {rank: number for number, rank in enumerate(self._ranks)}
        self._ids: dict[int, str] = {}
        for rank, spec in zip(self._ranks, specs, strict=True):
            self.router.add_worker(rank.worker)
            if capacity:
                self.router.set_cache_capacity(rank, capacity * spec.num_blocks)

    def choose(self, number: int, request: Request, now: float) -> int:
        """By the router's decision."""
        self._now = now
        decision = self.router.route_hashed(
            request.blocks, request.num_tokens, **self.options(request)
        )
        self._ids[number] = decision.request_id
        return self._engine_of[decision.rank]

    def options(self, request: Request) -> RouteOptions:
        """What the request says of itself."""
        return {"session": request.session, "worker": self._named(request)}

    def _named(self, request: Request) -> str:
        """The engine that the request names."""
        if self.router.config.mode != "direct" or not request.session:
            return ""
        number = crc32(request.session.encode()) % len(self._ranks)
        return self._ranks[number].worker

    def set_time(self, now: float) -> None:
        """What the router's clock says until the next call."""
        self._now = now

    def on_first_token(self, number: int, now: float) -> None:
        """The prefill is done."""
        self._now = now
        self.router.first_token(self._ids[number])

    def on_finished(self, number: int, num_answer_tokens: int, now: float) -> None:
        """The request is over."""
        self._now = now
        self.router.finish(self._ids.pop(number), num_answer_tokens)

    def on_cache_events(self, engine: int, events: list[CacheEvent], now: float) -> None:
        """As the engine would publish them."""
        if not self.router.config.follows_events:
            return
        self._now = now
        packed: list[PackedEvent] = []
        for event in events:
            # A block is named behind its parent, so it goes to the host before both leave the GPU.
            for block, parent in event.offloaded:
                name = np.array([block], dtype=np.uint64)
                packed.append(PackedStored(name, name, parent, Tier.HOST))
            if event.dropped:
                packed.append(PackedRemoved(np.array(event.dropped, dtype=np.uint64), Tier.HOST))
            if event.removed:
                packed.append(PackedRemoved(np.array(event.removed, dtype=np.uint64)))
            if len(event.stored):
                packed.append(PackedStored(event.stored, event.stored, event.parent))
        if packed:
            self.router.apply_packed(self._ranks[engine], encode(packed))
