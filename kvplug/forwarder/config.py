"""What a forwarder is told: the engines whose events it takes from ZMQ, the NATS servers that get
them.

In:  values, or the text of `--engine`.   Out: frozen objects, or a ConfigError in one sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvplug.engines.binding import endpoint_of_rank
from kvplug.errors import ConfigError, TransportError
from kvplug.events import MAX_BLOCK_SIZE, MAX_DP_SIZE
from kvplug.nats.flags import NatsFlags, servers_of
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import PublisherName
from kvplug.setting import Limits, check_settings, setting, shown, whole
from kvplug.transports import require_one_transport, scheme_of

FORM: Final = (
    "WORKER,events=ENDPOINT,block_size=N[,replay=ENDPOINT][,topic=PREFIX][,dp_rank=N][,dp_size=N]"
    "[,local_indexer=off]"
)
_FIELD_OF: Final = {
    "events": "zmq_endpoint",
    "block_size": "kv_block_size",
    "replay": "zmq_replay_endpoint",
    "topic": "zmq_topic",
    "dp_rank": "dp_rank",
    "dp_size": "dp_size",
    "local_indexer": "enable_local_indexer",
    "hides_states": "hides_states",
}
_NUMBERS: Final = {"block_size": MAX_BLOCK_SIZE, "dp_rank": MAX_DP_SIZE - 1, "dp_size": MAX_DP_SIZE}
_SWITCHES: Final = ("local_indexer", "hides_states")
_SCHEMES: Final = ("tcp", "ipc")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZmqKvEventPublisherConfig:
    """An engine that publishes its KV events over ZMQ; ConfigError for what cannot be.

    worker_id: what routers call it, as their --worker has it: the URL of its API. kv_block_size:
    tokens per block. zmq_endpoint: of its publisher, `tcp://host:port` or `ipc://path`; zmq_topic:
    only topics that begin so. zmq_replay_endpoint: where a stock publisher sends events again, so
    that lost ones are repaired. dp_rank: the data-parallel rank at these endpoints; dp_size: how
    many there are, with the ports above. hides_states: the model has windows or states of which
    the engine says nothing (docs/events.md).

    enable_local_indexer: tell routers all that the engine holds when they ask. False: only the last
    16 MiB of events; a router that needs more is STALE until the cache is cleared.
    """

    worker_id: str
    kv_block_size: int
    zmq_endpoint: str
    zmq_topic: str = ""
    enable_local_indexer: bool = True
    zmq_replay_endpoint: str | None = None
    dp_rank: int = 0
    dp_size: int = 1
    hides_states: bool = False

    def __post_init__(self) -> None:
        worker = str(self.worker_id).rstrip("/")  # S1's are numbers
        if not worker or not worker.isprintable():
            raise ConfigError(f"worker_id must be a text, got {shown(self.worker_id)}")
        object.__setattr__(self, "worker_id", worker)
        for name, lowest, highest in (
            ("kv_block_size", 1, MAX_BLOCK_SIZE),
            ("dp_rank", 0, MAX_DP_SIZE - 1),
            ("dp_size", 1, MAX_DP_SIZE - whole(self.dp_rank)),
        ):
            if not lowest <= whole(getattr(self, name)) <= highest:
                got = shown(getattr(self, name))
                raise ConfigError(f"{name} must be in [{lowest}, {highest}], got {got}")
        self._require_endpoints()

    def _require_endpoints(self) -> None:
        try:
            for each in filter(None, (self.zmq_endpoint, self.zmq_replay_endpoint)):
                scheme_of(each, list(_SCHEMES))
            if self.zmq_replay_endpoint is not None:
                require_one_transport(self.zmq_endpoint, self.zmq_replay_endpoint)
        except (TransportError, AttributeError) as error:
            raise ConfigError(f"engine {self.worker_id}: {error}") from error

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its data-parallel ranks."""
        return tuple(range(self.dp_rank, self.dp_rank + self.dp_size))

    def endpoints_of(self, rank: int) -> tuple[str, str | None]:
        """Of events and of replays, of one of its ranks."""
        steps, replay = rank - self.dp_rank, self.zmq_replay_endpoint
        return (
            endpoint_of_rank(self.zmq_endpoint, steps),
            replay and endpoint_of_rank(replay, steps),
        )

    @classmethod
    def parse(cls, text: str) -> ZmqKvEventPublisherConfig:
        """From the form that `--engine` has; ConfigError."""
        worker, *settings = text.split(",")
        given: dict[str, str] = {}
        for part in settings:
            key, equals, value = part.partition("=")
            if key not in _FIELD_OF or not equals or key in given:
                raise ConfigError(f"engine {text!r}: cannot read {part!r}; expected {FORM}")
            given[key] = value
        if missing := [key for key in ("events", "block_size") if key not in given]:
            raise ConfigError(f"engine {text!r}: {missing[0]}= is missing; expected {FORM}")
        return cls(worker_id=worker, **_values(given, text))

    @property
    def text(self) -> str:
        """In that form."""
        shown_values = {
            key: value
            for key, name in _FIELD_OF.items()
            if (value := getattr(self, name)) not in (None, "")
        }
        parts = [f"{key}={_flag_text(value)}" for key, value in shown_values.items()]
        return ",".join([self.worker_id, *parts])


def _values(given: Mapping[str, str], text: str) -> dict[str, Any]:
    return {_FIELD_OF[key]: _value(key, value, text) for key, value in given.items()}


def _value(key: str, value: str, text: str) -> object:
    if key in _NUMBERS:
        if not (value.isascii() and value.isdecimal() and int(value) <= _NUMBERS[key]):
            limits = f"a whole number up to {_NUMBERS[key]}"
            raise ConfigError(f"engine {text!r}: {key}={value!r}; expected {limits}")
        return int(value)
    if key in _SWITCHES:
        if value not in ("on", "off"):
            raise ConfigError(f"engine {text!r}: {key}={value!r}; expected on or off")
        return value == "on"
    return value


def _flag_text(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwarderConfig(NatsFlags):
    """All that `python -m kvplug.forwarder` is told."""

    engines: tuple[ZmqKvEventPublisherConfig, ...] = setting(
        (),
        "an engine; repeat for each. `WORKER`: what routers call it, the URL of its API as in "
        "their `--worker`. `events`: where it publishes KV events; `replay`: the `replay_endpoint` "
        "of a stock publisher; `topic`: only topics with this prefix; `block_size`: its tokens per "
        "block; `dp_size`: number of data-parallel ranks, which have the ports above; "
        "`local_indexer=off`: tell routers that ask the last 16 MiB of events, not all that the "
        "engine holds",
        flag=f"--engine {FORM}",
        default_text="required",
        parse=ZmqKvEventPublisherConfig.parse,
    )
    host: str = setting("127.0.0.1", "address of `/health` and `/metrics`", flag="--host")
    port: int = setting(
        8010,
        "port of `/health` and `/metrics`; 0 takes a free one, and the log says which",
        limits=Limits("in [0, 65535]", lambda value: 0 <= whole(value) < 2**16),
        flag="--port",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.engines:
            raise ConfigError("engine: expected one at least")
        if self.nats is None:
            raise ConfigError("nats: expected the URL of a NATS server")
        self.settings_at(servers_of(self.nats))  # checks itself
        names = [
            PublisherName(each.worker_id, rank) for each in self.engines for rank in each.ranks
        ]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"engine {name.worker} rank {name.rank} is given twice: expected a worker and "
                    "rank of its own for each"
                )

    @property
    def nats_settings(self) -> NatsSettings:
        """Where the events go."""
        assert self.nats is not None
        return self.settings_at(servers_of(self.nats))
