"""A forwarder for one engine, as a KvEventPublisher has it: KvEventPublisher(zmq_config=...).

In:  a ZmqKvEventPublisherConfig, where NATS is.   Out: events of the engine's ZMQ socket, on NATS.
"""

from __future__ import annotations

from kvplug.errors import ConfigError
from kvplug.events import EventBatch
from kvplug.forwarder.config import ZmqKvEventPublisherConfig
from kvplug.forwarder.forwarder import Forwarder
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import PublisherName
from kvplug.setting import shown


class InProcessForwarder:
    """The face of kvplug/engines/life_stream.py; forwards from the start on."""

    answers_at = None

    def __init__(self, config: object, settings: NatsSettings) -> None:
        if not isinstance(config, ZmqKvEventPublisherConfig):
            raise ConfigError(
                f"zmq_config must be a ZmqKvEventPublisherConfig, got {shown(config)}"
            )
        self._name = PublisherName(config.worker_id, config.dp_rank)
        self._forwarder = Forwarder(settings, (config,))
        self._forwarder.start()

    @property
    def endpoint(self) -> str:
        """As a reader's transport has it: nats://WORKER/RANK."""
        return f"nats://{self._name}"

    @property
    def num_dropped(self) -> int:
        """Messages that could not wait for a server any longer."""
        outputs = [engine.output for engine in self._forwarder.engines]
        return sum(output.outbox.num_dropped for output in outputs if output is not None)

    def publish(self, _: EventBatch) -> None:
        """ConfigError: the engine itself publishes."""
        raise ConfigError("with zmq_config, events are the engine's own: expected no publish call")

    def shutdown(self) -> None:
        """Send what waits, for a second at most, and end."""
        self._forwarder.stop()
