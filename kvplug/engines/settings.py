"""What an engine passes on from its --kv-events-config, and what its log says about that.

In:  the settings as the engine names them, KVPLUG_* variables, the engine's side's own logger.
Out: a PublisherConfig, PublisherVariables, and one line in the engine's log for each thing that is
not as expected.

The engines' configs refuse or drop fields that they do not know, so what is ours comes by
environment variables.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec

from kvplug.curve_keys import ServerKeys
from kvplug.engines.binding import endpoint_of_rank
from kvplug.engines.nats_target import NatsTarget
from kvplug.errors import ConfigError, KvplugError

LOG_LEVEL: Final = "KVPLUG_LOG_LEVEL"
WIRE: Final = "KVPLUG_WIRE"
WORKER_URL: Final = "KVPLUG_WORKER_URL"
CXL_POOLS: Final = "KVPLUG_CXL_POOLS"
TOPOLOGY: Final = "KVPLUG_TOPOLOGY"
CURVE_KEY_FILE: Final = "KVPLUG_CURVE_KEY_FILE"
CURVE_CLIENTS: Final = "KVPLUG_CURVE_CLIENTS"
RECORDER: Final = "KVPLUG_RECORDER"

WireName = Literal["kvplug", "vllm"]
_POOL_DIGITS: Final = 19  # of 2**63
_LEVELS: Final = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherConfig:
    """What vLLM's and SGLang's --kv-events-config say, for one data-parallel rank."""

    endpoint: str
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if not 0 <= value < 2**31:
                raise ConfigError(f"--kv-events-config: {name} must be 0 or more, got {value}")

    def of_rank(self, dp_rank: int) -> tuple[str, str | None]:
        """The endpoint and the replay endpoint of one rank."""
        replay = self.replay_endpoint and endpoint_of_rank(self.replay_endpoint, dp_rank)
        return endpoint_of_rank(self.endpoint, dp_rank), replay


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherVariables:
    """What environment variables say: the wire, what to say of the worker, keys, whether a recorder
    of ours takes the place of the engine's own, and where on NATS events go, if they go there.
    """

    wire: WireName = "kvplug"
    url: str = ""
    cxl_pools: tuple[int, ...] = ()
    topology: dict[str, str] = field(default_factory=dict)
    keys: ServerKeys | None = None
    records: bool = True
    nats: NatsTarget | None = None


def read_variables(environ: Mapping[str, str] = os.environ) -> PublisherVariables:
    """Read the KVPLUG_* variables; ConfigError for a value that fits nowhere.

    A key that cannot be used is such a value: nothing is published then, rather than to all.
    """
    return PublisherVariables(
        wire=_wire(environ.get(WIRE, "")),
        url=environ.get(WORKER_URL, ""),
        cxl_pools=_pools(environ.get(CXL_POOLS, "")),
        topology=_topology(environ.get(TOPOLOGY, "")),
        keys=_keys(environ.get(CURVE_KEY_FILE, ""), environ.get(CURVE_CLIENTS, "")),
        records=_records(environ.get(RECORDER, "")),
        nats=NatsTarget.from_variables(environ),
    )


def _wire(said: str) -> WireName:
    for name in get_args(WireName):
        if said == name:
            return name  # type: ignore[no-any-return]
    if said:
        expected = " or ".join(get_args(WireName))
        raise ConfigError(f"{WIRE}: expected {expected}, got {said!r}")
    return "kvplug"


def _records(said: str) -> bool:
    if said not in ("", "on", "off"):
        raise ConfigError(f"{RECORDER}: expected on or off, got {said!r}")
    return said != "off"


def _pools(said: str) -> tuple[int, ...]:
    names = [name.strip() for name in said.split(",")] if said.strip() else []
    if not all(name.isdecimal() and len(name) < _POOL_DIGITS for name in names):
        raise ConfigError(f'{CXL_POOLS}: expected numbers of pools like "1,2", got {said!r}')
    return tuple(map(int, names))


def _topology(said: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in said.split(",")] if said.strip() else []
    if not all(name.strip() and value.strip() for name, _, value in pairs):
        raise ConfigError(f'{TOPOLOGY}: expected names like "zone=a,host=b", got {said!r}')
    return {name.strip(): value.strip() for name, _, value in pairs}


def _keys(secret_key_file: str, clients: str) -> ServerKeys | None:
    if secret_key_file:
        return ServerKeys.from_files(Path(secret_key_file), Path(clients) if clients else None)
    if clients:
        raise ConfigError(f"{CURVE_CLIENTS} is set, so expected {CURVE_KEY_FILE} with a secret key")
    return None


def without_open_socket(
    config: PublisherConfig, keys: ServerKeys | None, logger: logging.Logger
) -> PublisherConfig:
    """`*` for an address is loopback, unless there are keys: who reads events learns what prompts
    have in common.
    """
    endpoints = config.endpoint, config.replay_endpoint or ""
    if keys is not None or not any(each.startswith("tcp://*:") for each in endpoints):
        return config
    logger.info(
        "kvplug: KV events are for this machine only (%s on 127.0.0.1); for others name an address "
        "in endpoint, such as tcp://0.0.0.0:5557, or set %s",
        config.endpoint,
        CURVE_KEY_FILE,
    )
    local = [each.replace("tcp://*:", "tcp://127.0.0.1:") for each in endpoints]
    return replace(config, endpoint=local[0], replay_endpoint=local[1] or None)


def read_config(settings: Mapping[str, object], logger: logging.Logger) -> PublisherConfig:
    """Check the settings; those that we do not know are named and have no effect."""
    known = {field.name for field in fields(PublisherConfig)}
    if unknown := sorted(settings.keys() - known):
        logger.warning(
            "kvplug: these settings of --kv-events-config have no effect: %s; expected only %s",
            ", ".join(unknown),
            ", ".join(sorted(known)),
        )
    kept = {name: value for name, value in settings.items() if name in known}
    return msgspec.convert(kept, PublisherConfig)


def set_log_level(logger: logging.Logger) -> None:
    """As $KVPLUG_LOG_LEVEL says, if it says something."""
    level = os.environ.get(LOG_LEVEL)
    if not level:
        return
    if level.lower() in _LEVELS:
        logger.setLevel(level.upper())
    else:
        logger.warning(
            "kvplug: %s is ignored: expected one of %s, got %r",
            LOG_LEVEL,
            ", ".join(_LEVELS),
            level,
        )


def warn(logger: logging.Logger, consequence: str, error: Exception) -> None:
    """What goes on without us; what we did not foresee is told with its traceback."""
    unforeseen = None if isinstance(error, KvplugError) else error
    logger.warning("kvplug: %s: %s", consequence, error, exc_info=unforeseen)
