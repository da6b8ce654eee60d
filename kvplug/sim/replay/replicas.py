"""Several routers before one fleet, in virtual time, and what they tell each other of their load.

In:  requests, each to a random router; how long messages take, how many are lost.
Out: a Policy (kvplug/sim/replay/fleet.py).

Events of engines reach all routers. Load is exchanged by the code that replicas run over NATS
(kvplug/cluster/load_exchange.py), with messages on this clock.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from kvplug.cluster.load_exchange import ROWS_EVERY_S, LoadExchange
from kvplug.errors import ConfigError
from kvplug.sim.replay.engine import CacheEvent
from kvplug.sim.replay.fleet import Policy
from kvplug.sim.replay.kv import Kv
from kvplug.sim.replay.workload import Request

_MAX_ROUTERS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncLink:
    """Between replicas: a message takes `delay_s`, `loss` is the share that is lost. `ends_s`: when
    all are cut off from each other, and go on without.
    """

    delay_s: float
    loss: float = 0.0
    ends_s: float = float("inf")


class Replicas(Policy):
    """Routers that know of each other's load by a link, or not at all."""

    def __init__(self, routers: Sequence[Kv], seed: int, link: SyncLink | None) -> None:
        if not 1 <= len(routers) <= _MAX_ROUTERS:
            raise ConfigError(f"expected 1 to {_MAX_ROUTERS} routers, got {len(routers)}")
        self._routers, self._link = routers, link
        self._random = random.Random(seed)
        self._router_of: dict[int, int] = {}
        self._exchanges = [
            LoadExchange(each.router, str(number), _nothing, life=number)
            for number, each in enumerate(routers)
        ]
        self._due: list[tuple[float, int, int, int, bytes | None]] = []
        self._order = count()
        for number, each in enumerate(routers if link else ()):
            each.router.load.listener = self._exchanges[number]
            self._at(ROWS_EVERY_S * self._random.random(), number, number, None)

    def choose(self, number: int, request: Request, now: float) -> int:
        """By a router that the request comes to by chance."""
        self._run_until(now)
        at = self._router_of[number] = self._random.randrange(len(self._routers))
        engine = self._routers[at].choose(number, request, now)
        self._tell(at, now)
        return engine

    def on_first_token(self, number: int, now: float) -> None:
        """Told to the router that has sent the request."""
        self._run_until(now)
        at = self._router_of[number]
        self._routers[at].on_first_token(number, now)
        self._tell(at, now)

    def on_finished(self, number: int, num_answer_tokens: int, now: float) -> None:
        """As the first token."""
        self._run_until(now)
        at = self._router_of.pop(number)
        self._routers[at].on_finished(number, num_answer_tokens, now)
        self._tell(at, now)

    def on_cache_events(self, engine: int, events: list[CacheEvent], now: float) -> None:
        """All hear them."""
        self._run_until(now)
        for at, router in enumerate(self._routers):
            router.on_cache_events(engine, events, now)
            self._tell(at, now)

    def _tell(self, sender: int, now: float) -> None:
        if self._link is not None:
            self._send(sender, self._exchanges[sender].news(), now)

    def _send(self, sender: int, payloads: list[bytes], now: float) -> None:
        assert self._link is not None
        if now >= self._link.ends_s:
            return
        for payload in payloads:
            for reader in range(len(self._routers)):
                if reader != sender and self._random.random() >= self._link.loss:
                    self._at(now + self._link.delay_s, reader, sender, payload)

    def _at(self, time: float, reader: int, sender: int, payload: bytes | None) -> None:
        heapq.heappush(self._due, (time, next(self._order), reader, sender, payload))

    def _run_until(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            time, _, reader, sender, payload = heapq.heappop(self._due)
            self._routers[reader].set_time(time)
            if payload is None:
                self._every_second(reader, time)
            else:
                self._exchanges[reader].hear(str(sender), payload)

    def _every_second(self, number: int, now: float) -> None:
        assert self._link is not None
        exchange = self._exchanges[number]
        self._send(number, exchange.rows(), now)
        exchange.tick(is_connected=now < self._link.ends_s)
        self._at(now + ROWS_EVERY_S, number, number, None)


def _nothing() -> None:
    pass
