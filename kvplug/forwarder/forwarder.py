"""Forwarder: KV events of many engines from ZMQ to NATS, in one process.

In:  a ForwarderConfig, or engines and a connection.
Out: one event thread for all streams, one connection for all subjects; the state of each.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from kvplug.errors import ConfigError
from kvplug.forwarder.config import ZmqKvEventPublisherConfig
from kvplug.forwarder.engine import ForwardedEngine
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.replay import ReplaySettings
from kvplug.nats.connection import NatsConnection
from kvplug.nats.permissions import PUBLISHER_NAME
from kvplug.nats.settings import NatsSettings
from kvplug.transports import TRANSPORTS, TransportFactory

logger = logging.getLogger(__name__)

_STOP_S: Final = 3.0


class Forwarder:
    """start, stop. Read engines and connection."""

    def __init__(
        self,
        settings: NatsSettings,
        engines: Sequence[ZmqKvEventPublisherConfig],
        *,
        replay_settings: ReplaySettings | None = None,
        transports: Mapping[str, TransportFactory] = TRANSPORTS,
    ) -> None:
        """`transports`: encrypted ones with keys (kvplug.transports.transports_with)."""
        self.connection = NatsConnection(settings, PUBLISHER_NAME)
        self._configs = {
            ForwardedEngine(config, rank, self.connection, settings=replay_settings): config
            for config in engines
            for rank in config.ranks
        }
        self.engines = tuple(self._configs)
        self._events = EventThread(transports)

    def start(self) -> None:
        """Begin to forward; returns at once, whoever is there. ConfigError for an endpoint that
        cannot be.
        """
        self.connection.start()
        self._events.start()
        try:
            for engine, config in self._configs.items():
                endpoint, replay = config.endpoints_of(engine.rank.dp_rank)
                self._events.follow(engine, endpoint, config.zmq_topic, replay)
        except BaseException as error:
            self.stop()
            if isinstance(error, Exception):
                raise ConfigError(f"cannot forward events: {error}") from error
            raise

    def stop(self) -> None:
        """Send what is there, for a second at most, and end; again is harmless."""
        self._events.stop()
        closing = [threading.Thread(target=engine.close, daemon=True) for engine in self.engines]
        for each in closing:
            each.start()
        for each in closing:
            each.join(_STOP_S)
        self.connection.stop()
