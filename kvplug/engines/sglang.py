"""SGLang's side: the publisher `kvplug` for --kv-events-config.

In:  the entry point `sglang.srt.plugins`, which calls `register` in every process of SGLang.
Out: a name that SGLang's EventPublisherFactory knows, the publisher behind it, and hooks in the
schedulers that use it (kvplug/engines/sglang_scheduler.py).

SGLang applies `format` where events are recorded, before they come here, and its config drops keys
that it does not know. SGLang is imported only inside functions; read against SGLang 0.5.23.
"""

from __future__ import annotations

import atexit
import logging
from typing import TYPE_CHECKING, Final

from kvplug.engines.about_engine import about_sglang
from kvplug.engines.binding import local_endpoint
from kvplug.engines.life import RECORDER_FAILED
from kvplug.engines.sender_process import SenderProcess
from kvplug.engines.settings import (
    PublisherConfig,
    PublisherVariables,
    read_config,
    read_variables,
    set_log_level,
    warn,
)
from kvplug.engines.sglang_scheduler import register_hooks
from kvplug.errors import ConfigError
from kvplug.protocol import WorkerHello

if TYPE_CHECKING:
    from sglang.srt.disaggregation.kv_events import EventBatch, EventPublisher

NAME: Final = "kvplug"

# SGLang's handler and format are the root logger's.
logger = logging.getLogger("sglang.kvplug")


def register() -> None:
    """Make SGLang know the publisher `kvplug`; again is harmless.

    Starts no thread, socket or lock. What goes wrong is logged and SGLang goes on without us; it
    refuses to start only if its config names a publisher that could not be registered.
    """
    try:
        from sglang.srt.disaggregation.kv_events import EventPublisherFactory

        if NAME not in EventPublisherFactory._registry:
            EventPublisherFactory.register_publisher(NAME, create_publisher)
            register_hooks()
    except Exception as error:  # noqa: BLE001  # SGLang's insides may have changed in any way
        warn(logger, f"SGLang goes on without the publisher {NAME!r}", error)


def create_publisher(
    *, attn_dp_rank: int = 0, bind: bool | None = None, **settings: object
) -> EventPublisher:
    """What SGLang calls in each scheduler that publishes; a silent one if ours cannot be made."""
    from sglang.srt.disaggregation.kv_events import EventPublisher, NullEventPublisher

    try:
        set_log_level(logger)
        _require_bind(bind)
        # SGLang's class comes last: it brings the defaults of methods that later versions may add.
        kind = type("KvplugEventPublisher", (SglangPublisher, EventPublisher), {})
        variables = read_variables()
        about = about_sglang(attn_dp_rank, variables)
        publisher = kind(read_config(settings, logger), attn_dp_rank, about, variables)
        atexit.register(publisher.shutdown)  # SGLang itself never calls it
    except Exception as error:  # noqa: BLE001  # no publisher is no reason for no engine
        warn(logger, "the engine serves without KV events", error)
        return NullEventPublisher()
    else:
        return publisher


def _require_bind(bind: bool | None) -> None:
    if bind is False:
        raise ConfigError(
            '--kv-events-config: expected "bind" true or left out: the publisher kvplug is '
            'something to connect to and connects to nothing itself, as "zmq" can'
        )


class SglangPublisher:
    """The methods of SGLang's EventPublisher, over a sender process."""

    def __init__(
        self,
        config: PublisherConfig,
        attn_dp_rank: int,
        about: WorkerHello | None = None,
        variables: PublisherVariables | None = None,
    ) -> None:
        variables = variables or read_variables()
        self.records = variables.records
        self._is_our_wire = variables.wire == "kvplug"
        self._attn_dp_rank = attn_dp_rank
        self._topic = config.topic
        about = about or WorkerHello(dp_rank=attn_dp_rank)
        self.publisher = SenderProcess(config, about, logger)

    def publish(self, events: EventBatch) -> None:
        """Hand over the events of one step; called on the scheduler's thread."""
        self.publisher.publish(events)

    def begin_notes(self, page_size: int, *, is_dynamo: bool) -> None:
        """From now on batches may have notes of SGLang's tree (kvplug/engines/sglang_notes.py)."""
        self.publisher.tell_recorder(
            {
                "recorder": "sglang",
                "page_size": page_size,
                "dynamo_format": is_dynamo,
                "names_extra_keys": self._is_our_wire,
            }
        )

    def on_recorder_failed(self, error: Exception) -> None:
        """SGLang's own recorder goes on, and events may be missing."""
        self.publisher.lose(1, RECORDER_FAILED)
        self.publisher.tell_recorder({})
        warn(logger, "blocks are unknown, and from now on SGLang records KV events itself", error)

    def shutdown(self) -> None:
        """Send what is queued and close."""
        self.publisher.shutdown()

    def describe_local_source(self, block_size: int) -> dict[str, object] | None:
        """Where a process on the same machine finds the stream; None for what it cannot reach."""
        endpoint = local_endpoint(self.publisher.endpoint)
        if endpoint is None:
            return None
        source: dict[str, object] = {
            "dp_rank": self._attn_dp_rank,
            "endpoint": endpoint,
            "topic": self._topic,
            "block_size": block_size,
        }
        replay_endpoint = local_endpoint(self.publisher.answers_at or "")
        return source if replay_endpoint is None else source | {"replay_endpoint": replay_endpoint}
