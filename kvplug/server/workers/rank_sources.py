"""Where an engine publishes the events of each of its data-parallel ranks.

In:  a worker's settings; what its engine answers to GET /kv_event_sources (vLLM 0.32) or GET
     /server_info (SGLang 0.5.23).
Out: a RankSource for each rank.

The engines bind one port for each rank, the first one's and those above it. Of an endpoint with a
wildcard, the worker's URL says the host. Only `tcp://` is reached from another machine: an endpoint
of another scheme, or with a loopback address, counts if the worker's URL has a loopback address,
too. Only `tcp://` has a next port. An engine that publishes to NATS has `nats://WORKER/RANK`, as
it is called there; what is not reached from here may come over NATS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from kvplug.events import MAX_DP_SIZE
from kvplug.nats.subjects import PublisherName
from kvplug.server.config import WorkerSpec
from kvplug.server.worker_spec import OVER_NATS, socket_of
from kvplug.server.workers.hosts import in_brackets, is_loopback, is_wildcard
from kvplug.transports import TRANSPORTS

_NATS: Final = "nats://"


class RankSource(msgspec.Struct, frozen=True):
    """The event publisher of one rank.

    engine_rank: what its batches call the rank; None: whatever they say. events: None if it
    publishes none, or nobody knows where; replay: where it sends past events again; hides_states:
    whether its model has windows or states of which its events say nothing; unreached: where it
    publishes, if that cannot be reached from here.
    """

    engine_rank: int | None = None
    events: str | None = None
    replay: str | None = None
    hides_states: bool = False
    unreached: str | None = None

    @property
    def over_nats(self) -> PublisherName | None:
        """Who it is there; None if its events come another way."""
        if self.events is None or not self.events.startswith(_NATS):
            return None
        return PublisherName.parse(self.events.removeprefix(_NATS))


class _Publisher(msgspec.Struct):
    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None


class _Described(msgspec.Struct):
    endpoint_port_base: int
    endpoint_host: str = "*"
    replay_endpoint_port_base: int | None = None


class _ServerInfo(msgspec.Struct):
    """uses_mamba_radix_cache: whether the model keeps states; internal_states: of each rank, with
    `memory_usage.token_capacity_swa`, the room for windows if they have a pool of their own.
    """

    page_size: int
    dp_size: int = 1
    kv_events: _Described | None = None
    uses_mamba_radix_cache: Any = None
    internal_states: Any = None

    @property
    def hides_states(self) -> bool:
        """Whether the model has windows or states; SGLang publishes nothing of them."""
        states = self.internal_states if isinstance(self.internal_states, list) else []
        rooms = [_get(_get(each, "memory_usage"), "token_capacity_swa") for each in states]
        return self.uses_mamba_radix_cache is True or any(room is not None for room in rooms)


def _get(value: object, key: str) -> object:
    return value.get(key) if isinstance(value, dict) else None


def of_vllm(body: bytes) -> list[RankSource]:
    """From GET /kv_event_sources: by rank, the settings of its publisher; none without events.

    ValueError for anything else, as below.
    """
    publishers = msgspec.json.decode(body, type=dict[int, _Publisher])
    return [_of_publisher(rank, publishers[rank]) for rank in sorted(publishers)]


def of_sglang(body: bytes) -> list[RankSource]:
    """From GET /server_info, which names the ports of rank 0."""
    info = msgspec.json.decode(body, type=_ServerInfo)
    if not 1 <= info.dp_size <= MAX_DP_SIZE:
        limits = f"[1, {MAX_DP_SIZE}]"
        raise ValueError(f"/server_info: expected dp_size in {limits}, got {info.dp_size}")
    ranks = range(info.dp_size)
    if info.kv_events is None:
        return [RankSource(rank, hides_states=info.hides_states) for rank in ranks]
    described = info.kv_events
    host, replay = described.endpoint_host, described.replay_endpoint_port_base
    return [
        RankSource(
            rank,
            f"tcp://{host}:{described.endpoint_port_base + rank}",
            None if replay is None else f"tcp://{host}:{replay + rank}",
            info.hides_states,
        )
        for rank in ranks
    ]


def sources_of(
    spec: WorkerSpec, found: Sequence[RankSource], *, has_nats: bool = False
) -> list[RankSource]:
    """What to follow of a worker: what its settings say, and else what its engine said, `found`.

    Settings name the endpoints of rank 0; those of the others are as far above them as the engine
    says, and else at the next ports. has_nats: what nobody names comes over NATS.
    """
    num_ranks = spec.dp_size or max(1, len(found))
    said = dict(enumerate(found))
    sources = [
        _source(spec, rank, said.get(rank), said.get(0), num_ranks) for rank in range(num_ranks)
    ]
    if not has_nats:
        return sources
    return [_or_over_nats(spec, rank, each) for rank, each in enumerate(sources)]


def _or_over_nats(spec: WorkerSpec, rank: int, source: RankSource) -> RankSource:
    """Under the name that its settings say, else the engine, else its own."""
    if source.events is not None:
        return source
    named = source.unreached or ""
    if spec.topic or not named.startswith(_NATS):
        named = f"{_NATS}{PublisherName(spec.topic or spec.name, rank)}"
    return msgspec.structs.replace(source, events=named, unreached=None)


def _source(
    spec: WorkerSpec, rank: int, said: RankSource | None, first: RankSource | None, num_ranks: int
) -> RankSource:
    alone = None if num_ranks == 1 else rank
    engine_rank = alone if said is None else said.engine_rank
    hides = said is not None and said.hides_states
    if spec.events == OVER_NATS:
        named = None if said is None else said.events
        return RankSource(engine_rank, None, None, hides, named)
    if spec.events is None:
        events, replay = (said.events, said.replay) if said is not None else (None, None)
        reached = _reached(events, spec.name), _reached(replay, spec.name)
        return RankSource(engine_rank, *reached, hides, None if reached[0] else events)
    distance = rank
    if said is not None and first is not None:
        distance = _distance(said.events, first.events, rank)
    replay = None if spec.replay is None else _at_distance(spec.replay, distance)
    return RankSource(engine_rank, _at_distance(spec.events, distance), replay, hides)


def _of_publisher(rank: int, settings: _Publisher) -> RankSource:
    if not settings.enable_kv_cache_events or settings.publisher == "null":
        return RankSource(rank)
    return RankSource(rank, settings.endpoint, settings.replay_endpoint)


def _reached(endpoint: str | None, url: str) -> str | None:
    """An endpoint of an engine, as somebody connects to it who knows the engine by this URL."""
    if endpoint is None:
        return None
    scheme, _, address = endpoint.partition("://")
    host = "127.0.0.1" if socket_of(url) is not None else urlsplit(url).hostname or ""
    if scheme not in TRANSPORTS:
        return None
    if scheme != "tcp":
        return endpoint if is_loopback(host) else None
    at, _, port = address.rpartition(":")
    if port in ("", "0", "*"):
        return None
    if is_wildcard(at):
        at = in_brackets(host)
    elif is_loopback(at) and not is_loopback(host):
        return None
    return f"tcp://{at}:{port}"


def _distance(endpoint: str | None, first: str | None, default: int) -> int:
    """How many ports lie between two endpoints, if both have one."""
    port, base = _port_of(endpoint), _port_of(first)
    return default if port is None or base is None else port - base


def _at_distance(endpoint: str, num_ports: int) -> str | None:
    if num_ports == 0:
        return endpoint
    port = _port_of(endpoint)
    if port is None or not 0 < port + num_ports < 2**16:
        return None
    return f"{endpoint.rpartition(':')[0]}:{port + num_ports}"


def _port_of(endpoint: str | None) -> int | None:
    if endpoint is None or not endpoint.startswith("tcp://"):
        return None
    port = endpoint.rpartition(":")[2]
    return int(port) if port.isdecimal() and port != "0" else None
