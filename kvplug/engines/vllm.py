"""vLLM's side: the publisher `kvplug` for --kv-events-config.

In:  the entry point `vllm.general_plugins`, which calls `register` in every process of vLLM.
Out: a name that vLLM's config accepts, and the publisher behind it.

Where the config is made before vLLM loads its plug-ins, as in `LLM(kv_events_config=...)`, call
`register` first. vLLM is imported only inside functions; read against vLLM 0.32.0.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NamedTuple,
    get_args,
    get_origin,
    get_type_hints,
)

from kvplug.engines.about_engine import about_vllm, note_address, vllm_core, vllm_scheduler
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
from kvplug.engines.vllm_guard import refusal
from kvplug.engines.vllm_prompts import PromptPacker
from kvplug.engines.vllm_recorder import Recorder, context_of, objection
from kvplug.protocol import WorkerHello

if TYPE_CHECKING:
    from vllm.config.kv_events import KVEventsConfig
    from vllm.distributed.kv_events import EventBatch, EventPublisher

NAME: Final = "kvplug"

# Below vLLM's own logger, so that its handler and its format apply.
logger = logging.getLogger("vllm.kvplug")

_NOT_RECORDED: Final = "KV events are made by vLLM's own code, which takes longer"


def register() -> None:
    """Make vLLM know the publisher `kvplug`; again is harmless.

    Starts no thread, socket or lock: vLLM may fork afterwards. An exception here would end the
    engine, so what goes wrong is logged and vLLM goes on without us.
    """
    try:
        _accept_name()
        _offer_publisher()
        note_address()
    except Exception as error:  # noqa: BLE001  # vLLM's insides may have changed in any way
        warn(logger, f"vLLM goes on without the publisher {NAME!r}", error)


def _accept_name() -> None:
    """Add our name to those that KVEventsConfig accepts for `publisher`; others stay refused."""
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config.kv_events import KVEventsConfig

    accepted = get_type_hints(KVEventsConfig)["publisher"]
    if get_origin(accepted) is not Literal or NAME in get_args(accepted):
        return  # any string is accepted, or ours already
    widened: object = Literal[(*get_args(accepted), NAME)]
    KVEventsConfig.__annotations__["publisher"] = widened
    KVEventsConfig.__dataclass_fields__["publisher"].type = widened
    KVEventsConfig.__pydantic_fields__["publisher"].annotation = widened
    rebuild_dataclass(KVEventsConfig, force=True)


def _offer_publisher() -> None:
    from vllm.distributed.kv_events import EventPublisherFactory

    if NAME not in EventPublisherFactory._registry:
        EventPublisherFactory.register_publisher(NAME, create_publisher)


def create_publisher(*, data_parallel_rank: int = 0, **settings: object) -> EventPublisher:
    """What vLLM calls in the process of each engine core; a silent one if ours cannot be made."""
    from vllm.distributed.kv_events import EventPublisher, NullEventPublisher

    try:
        set_log_level(logger)
        config, variables = read_config(settings, logger), read_variables()
        # vLLM's class comes last: it brings the defaults of methods that later versions may add.
        kind = type("KvplugEventPublisher", (VllmPublisher, EventPublisher), {})
        about = about_vllm(data_parallel_rank, variables)
        return kind(config, data_parallel_rank, about, _engine_to_record(variables))
    except Exception as error:  # noqa: BLE001  # no publisher is no reason for no engine
        warn(logger, "the engine serves without KV events", error)
        return NullEventPublisher()


class Recorded(NamedTuple):
    """What of an engine is recorded: its scheduler, and its core, None for a scheduler alone."""

    scheduler: Any
    core: Any = None


def _engine_to_record(variables: PublisherVariables) -> Recorded | None:
    """The engine that makes the publisher; None if its events are to be vLLM's own."""
    if not variables.records or (scheduler := vllm_scheduler()) is None:
        return None
    if reason := refusal():
        logger.warning("kvplug: %s: %s", _NOT_RECORDED, reason)
        return None
    return Recorded(scheduler, vllm_core())


class VllmPublisher:
    """The methods of vLLM's EventPublisher, over a sender process."""

    def __init__(
        self,
        config: PublisherConfig,
        data_parallel_rank: int,
        about: WorkerHello | None = None,
        to_record: Recorded | None = None,
    ) -> None:
        self._data_parallel_rank = data_parallel_rank  # as vLLM's own base class has it
        self._config = config
        about = about or WorkerHello(dp_rank=data_parallel_rank)
        self.publisher = SenderProcess(config, about, logger)
        self.recorder: Recorder | None = None
        self._packer: PromptPacker | None = None
        self._to_record = to_record

    def publish(self, events: EventBatch) -> None:
        """Hand over the events of one step; called on the engine's thread."""
        self.publisher.publish(events)
        if self._to_record is not None:
            # The step's events are taken, and no block is between two states.
            engine, self._to_record = self._to_record, None
            self.record(*engine)

    def shutdown(self) -> None:
        """Send what is queued and close; vLLM seldom calls it: `vllm serve` is killed instead."""
        self.publisher.shutdown()

    def record(self, scheduler: Any, core: Any = None) -> None:  # noqa: ANN401
        """Record this scheduler's blocks between two of its steps, if they can be; does not raise.
        `end_record` ends it. With its engine core prompts are packed when they arrive.
        """
        try:
            manager = scheduler.kv_cache_manager
            if reason := objection(manager):
                logger.warning("kvplug: %s: %s", _NOT_RECORDED, reason)
                return
            self.publisher.tell_recorder(context_of(manager))
            self.recorder = Recorder(manager, self._publish_now, self._go_on_without)
            if core is not None:
                self._packer = PromptPacker(core)
        except Exception as error:  # noqa: BLE001  # vLLM's insides may have changed in any way
            warn(logger, _NOT_RECORDED, error)

    def end_record(self) -> None:
        """Let vLLM make its own events from now on."""
        if self.recorder is not None:
            if notes := self.recorder.detach():
                self._publish_now(notes)
            self.recorder = None
            self._end_packing()

    def _end_packing(self) -> None:
        if self._packer is not None:
            self._packer.detach()
            self._packer = None

    def _publish_now(self, notes: list[Any]) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        self.publish(KVEventBatch(ts=time.time(), events=notes))

    def _go_on_without(self, error: Exception) -> None:
        self._end_packing()
        self.publisher.lose(1, RECORDER_FAILED)
        warn(logger, f"blocks are unknown, and from now on {_NOT_RECORDED}", error)

    def get_publisher_config(self) -> KVEventsConfig:
        """Where this rank really publishes, for GET /kv_event_sources."""
        from vllm.config.kv_events import KVEventsConfig

        settings = asdict(self._config) | {
            "endpoint": self.publisher.endpoint,
            "replay_endpoint": self.publisher.answers_at,
        }
        return KVEventsConfig(enable_kv_cache_events=True, publisher=NAME, **settings)
