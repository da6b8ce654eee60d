"""Where on NATS an engine publishes, and under which name.

In:  $KVPLUG_NATS*, or what a program says; what is known of the engine.
Out: a NatsTarget, and a connection of its own to it; ConfigError if the engine has no name there.

The name is the URL of the engine's API as the router's --worker has it, so that both sides find
each other without being told. Only here nats-py is imported, as few engines need it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import Logger
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kvplug.errors import ConfigError
from kvplug.events import EventBatch
from kvplug.nats.permissions import PUBLISHER_NAME
from kvplug.nats.settings import SERVERS, NatsSettings
from kvplug.nats.subjects import PublisherName
from kvplug.protocol import WorkerHello

if TYPE_CHECKING:
    from kvplug.engines.nats_batches import NatsBatches
    from kvplug.engines.nats_stream import NatsStream
    from kvplug.nats.connection import NatsConnection

WORKER: Final = "KVPLUG_NATS_WORKER"
STREAM: Final = "KVPLUG_NATS_STREAM"

_SCHEMES: Final = ("nats://", "tls://")
# A host that stands for all addresses is no name.
_ANY_HOST: Final = ("0.0.0.0", "::", "*", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsTarget:
    """worker: the name, "" for the engine's URL; uses_stream: whether a stream keeps the events."""

    settings: NatsSettings
    worker: str = ""
    uses_stream: bool = True

    @classmethod
    def from_variables(cls, environ: Mapping[str, str] = os.environ) -> NatsTarget | None:
        """As $KVPLUG_NATS* say; None if they name no server."""
        settings = NatsSettings.from_variables(environ)
        worker, stream = environ.get(WORKER, ""), environ.get(STREAM, "")
        if stream not in ("", "on", "off"):
            raise ConfigError(f"{STREAM}: expected on or off, got {stream!r}")
        if settings is None:
            if worker or stream:
                raise ConfigError(f"{WORKER} or {STREAM} is set, so expected {SERVERS}")
            return None
        return cls(settings=settings, worker=worker, uses_stream=stream != "off")

    def name(self, about: WorkerHello) -> PublisherName:
        """Of the engine that this is said of."""
        worker = (self.worker or _with_host(about.url)).rstrip("/")
        if not worker:
            raise ConfigError(
                f"an engine that publishes to NATS needs a name: expected {WORKER}, or in a "
                "program `worker`, to be the URL of its API as the router's --worker has it, such "
                "as http://10.0.0.7:8000"
            )
        return PublisherName(worker, about.dp_rank)

    def open_stream(
        self,
        about: WorkerHello,
        decode: Callable[[Any], EventBatch],
        logger: Logger,
        max_queue_size: int = 100_000,
    ) -> NatsStream:
        """Publish kvplug's own wire; a server that is not there is tried for ever."""
        from kvplug.engines.nats_stream import NatsStream

        name = self.name(about)
        return NatsStream(
            self._connect(name, logger), name, about, decode, logger,
            max_queue_size=max_queue_size, uses_stream=self.uses_stream, closes=True,
        )  # fmt: skip

    def open_batches(
        self, about: WorkerHello, encode: Callable[[Any], bytes], logger: Logger, **sizes: int
    ) -> NatsBatches:
        """The same with the stock wire; `sizes`: max_queue_size, buffer_steps."""
        from kvplug.engines.nats_batches import NatsBatches

        name = self.name(about)
        return NatsBatches(
            self._connect(name, logger), name, encode, logger,
            uses_stream=self.uses_stream, closes=True, **sizes,
        )  # fmt: skip

    def _connect(self, name: PublisherName, logger: Logger) -> NatsConnection:
        from kvplug.nats.connection import NatsConnection

        connection = NatsConnection(self.settings, PUBLISHER_NAME)
        connection.start()
        logger.info("kvplug: KV events of %s go to NATS at %s", name, self.settings.servers[0])
        return connection


def is_nats(endpoint: str) -> bool:
    """Whether events that are to be published there go to NATS."""
    return endpoint.startswith(_SCHEMES)


def _with_host(url: str) -> str:
    """A URL that names one host, else ""."""
    try:
        return "" if urlsplit(url).hostname in _ANY_HOST else url
    except ValueError:
        return ""
