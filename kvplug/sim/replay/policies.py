"""Who gets a request: kvplug's own router, and the simple policies that it is compared with.

In:  a name.   Out: a Policy (kvplug/sim/replay/fleet.py).

    kv             Router with its defaults: cost in milliseconds
    kv:blocks=W    Router with the cost in blocks and weight W
    kv:events=off  Router that goes by its own decisions, as engines publish no events
    kv:capacity=C  Router that is told C times the caches' capacities, or nothing if C is 0
    kv:mode=NAME   Router in another mode. Requests of a session are named by it; with `direct` they
                   name the engine of a fixed share of the sessions
    kv:NAME=X      Router with another number in its RouterConfig: SETTINGS has those that can be
    cache_aware    an approximate tree of what was sent where, as vLLM's router and SGLang's have it
    round_robin, least_loaded, random

Several options of kv are parted by colons: kv:blocks=1:request_weight=2.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final, get_args
from zlib import crc32

import numpy as np

from kvplug.errors import ConfigError
from kvplug.events import Rank, Tier
from kvplug.packed import PackedEvent, PackedRemoved, PackedStored, encode
from kvplug.router.config import Mode, RouterConfig
from kvplug.router.core import Router
from kvplug.router.options import RouteOptions
from kvplug.sim.replay.engine import CacheEvent, EngineSpec
from kvplug.sim.replay.fleet import Policy
from kvplug.sim.replay.workload import Request


class _Counting:
    """Requests in flight per engine; events are of no use."""

    def __init__(self, specs: Sequence[EngineSpec], seed: int) -> None:
        self.num_running = [0] * len(specs)
        self.random = random.Random(seed)
        self._engine_of: dict[int, int] = {}

    def choose(self, number: int, request: Request, now: float) -> int:
        engine = self.pick(number, request)
        self.num_running[engine] += 1
        self._engine_of[number] = engine
        return engine

    def pick(self, number: int, request: Request) -> int:
        raise NotImplementedError

    def on_first_token(self, number: int, now: float) -> None:
        """Nothing."""

    def on_finished(self, number: int, num_answer_tokens: int, now: float) -> None:
        self.num_running[self._engine_of.pop(number)] -= 1

    def on_cache_events(self, engine: int, events: list[CacheEvent], now: float) -> None:
        """Nothing."""

    def _least(self) -> int:
        least = min(self.num_running)
        return self.random.choice([i for i, n in enumerate(self.num_running) if n == least])


class RoundRobin(_Counting):
    """By turns."""

    def pick(self, number: int, request: Request) -> int:
        """The next one."""
        return number % len(self.num_running)


class Random(_Counting):
    """By chance."""

    def pick(self, number: int, request: Request) -> int:
        """Any."""
        return self.random.randrange(len(self.num_running))


class LeastLoaded(_Counting):
    """The fewest requests in flight."""

    def pick(self, number: int, request: Request) -> int:
        """One of those that have the fewest."""
        return self._least()


class CacheAware(_Counting):
    """vllm-router 0.1.17 and SGLang's router: where the longest prefix was sent before, if it is
    more than CACHE_THRESHOLD of the prompt, unless loads differ by more than BALANCE_ABS requests
    and by BALANCE_REL; else the least loaded. Evictions are not noticed.
    """

    CACHE_THRESHOLD, BALANCE_ABS, BALANCE_REL = 0.3, 64, 1.5

    def __init__(self, specs: Sequence[EngineSpec], seed: int) -> None:
        super().__init__(specs, seed)
        self._sent_to: dict[int, int] = {}

    def pick(self, number: int, request: Request) -> int:
        """By tree, or by load."""
        most, least = max(self.num_running), min(self.num_running)
        blocks, known = request.blocks.tolist(), 0
        while known < len(blocks) and blocks[known] in self._sent_to:
            known += 1
        is_unbalanced = most - least > self.BALANCE_ABS and most > self.BALANCE_REL * least
        is_known = known > self.CACHE_THRESHOLD * max(1, len(blocks))
        engine = (
            self._sent_to[blocks[known - 1]] if is_known and not is_unbalanced else self._least()
        )
        self._sent_to.update(dict.fromkeys(blocks, engine))
        return engine


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


_SIMPLE: Final[dict[str, Callable[[Sequence[EngineSpec], int], Policy]]] = {
    "round_robin": RoundRobin,
    "random": Random,
    "least_loaded": LeastLoaded,
    "cache_aware": CacheAware,
}
SETTINGS: Final = (
    *("host_credit", "disk_credit", "device_credit", "device_credit_decay", "request_weight"),
    *("temperature", "ttft_slo_ms"),
)
NAMES: Final = (
    *("kv", "kv:blocks=WEIGHT", "kv:events=off", "kv:capacity=SHARE", "kv:mode=NAME"),
    *(f"kv:{name}=NUMBER" for name in SETTINGS),
    *_SIMPLE,
)


def make_policy(name: str, specs: Sequence[EngineSpec], seed: int) -> Policy:
    """The policy of this name, new; ConfigError for one that nobody knows."""
    if name in _SIMPLE:
        return _SIMPLE[name](specs, seed)
    kind, *options = name.split(":")
    if kind != "kv":
        raise _unknown(name)
    settings: dict[str, Any] = {}
    capacity = 1.0
    for option in options:
        key, _, value = option.partition("=")
        if key == "capacity":
            capacity = _number(value, name)
        else:
            settings |= _setting(key, value, name)
    return Kv(specs, seed, RouterConfig(block_size=specs[0].block_size, **settings), capacity)


def _setting(key: str, value: str, name: str) -> dict[str, Any]:
    """Of RouterConfig."""
    match key, value:
        case "events", "off":
            return {"use_kv_events": False}
        case "mode", _ if value in get_args(Mode):
            return {"mode": value}
        case "blocks", _:
            return {"overlap_score_weight": _number(value, name)}
    if key in SETTINGS:
        return {key: _number(value, name)}
    raise _unknown(name)


def _unknown(name: str) -> ConfigError:
    return ConfigError(f"policy {name!r}: expected one of {', '.join(NAMES)}")


def _number(text: str, name: str) -> float:
    try:
        number = float(text)
    except ValueError as error:
        raise ConfigError(f"policy {name!r}: expected a number, got {text!r}") from error
    if not 0 <= number < inf:
        raise ConfigError(f"policy {name!r}: expected a finite number of at least 0, got {text}")
    return number
