"""Who gets a request: kvplug's own router, and the simple policies that it is compared with.

In:  a name.   Out: a Policy (kvplug/sim/replay/fleet.py).

    kv             Router with its defaults: cost in milliseconds
    kv:blocks=W    Router with the cost in blocks and weight W
    kv:events=off  Router that goes by its own decisions, as engines publish no events
    kv:capacity=C  Router that is told C times the caches' capacities, or nothing if C is 0
    kv:mode=NAME   Router in another mode. Requests of a session are named by it; with `direct` they
                   name the engine of a fixed share of the sessions
    kv:routers=N   N Routers that know nothing of each other's load; each request comes to one of
                   them by chance. With `sync_ms=D`, they tell each other (replica sync), D ms
                   later; `sync_loss=X` loses a share of that; `sync_s=S` cuts them off after S s
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

from kvplug.errors import ConfigError
from kvplug.router.config import Mode, RouterConfig
from kvplug.sim.replay.engine import CacheEvent, EngineSpec
from kvplug.sim.replay.fleet import Policy
from kvplug.sim.replay.kv import Kv
from kvplug.sim.replay.replicas import Replicas, SyncLink
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


_SIMPLE: Final[dict[str, Callable[[Sequence[EngineSpec], int], Policy]]] = {
    "round_robin": RoundRobin,
    "random": Random,
    "least_loaded": LeastLoaded,
    "cache_aware": CacheAware,
}
_OF_FLEET: Final[tuple[str, ...]] = ("capacity", "routers", "sync_ms", "sync_loss", "sync_s")
_SEED_OF_ROUTER: Final = 7919  # the dice of routers are their own
SETTINGS: Final = (
    *("host_credit", "disk_credit", "device_credit", "device_credit_decay", "request_weight"),
    *("temperature", "ttft_slo_ms"),
)
NAMES: Final = (
    *(
        "kv",
        "kv:routers=N",
        "kv:routers=N:sync_ms=DELAY",
        "kv:routers=N:sync_ms=DELAY:sync_loss=SHARE",
    ),
    "kv:routers=N:sync_ms=DELAY:sync_s=SECONDS",
    *("kv:blocks=WEIGHT", "kv:events=off", "kv:capacity=SHARE", "kv:mode=NAME"),
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
    values = dict(option.partition("=")[::2] for option in options)
    numbers: dict[str, float] = {
        key: _number(values.pop(key), name) for key in _OF_FLEET if key in values
    }
    settings: dict[str, Any] = {}
    for key, value in values.items():
        settings |= _setting(key, value, name)
    config = RouterConfig(block_size=specs[0].block_size, **settings)
    capacity = numbers.get("capacity", 1.0)
    if "routers" not in numbers:
        if len(numbers) > ("capacity" in numbers):
            raise ConfigError(f"policy {name!r}: expected routers=N beside what is said of sync")
        return Kv(specs, seed, config, capacity)
    routers = [
        Kv(specs, seed + _SEED_OF_ROUTER * at, config, capacity)
        for at in range(int(numbers["routers"]))
    ]
    return Replicas(routers, seed, _link_of(numbers))


def _link_of(numbers: dict[str, float]) -> SyncLink | None:
    if "sync_ms" not in numbers:
        return None
    return SyncLink(
        delay_s=numbers["sync_ms"] / 1e3,
        loss=numbers.get("sync_loss", 0.0),
        ends_s=numbers.get("sync_s", inf),
    )


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
