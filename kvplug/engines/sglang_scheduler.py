"""What kvplug does inside SGLang's scheduler: it puts its recorder in, and publishes each step.

In:  hooks of SGLang's HookRegistry, which `register_hooks` registers in every process.
Out: where kvplug publishes, its recorder in the place of SGLang's own, if that is known to be safe;
     the events of a step with the step, and a reset at once.

SGLang by itself publishes after a prefill, after every 40 steps of decoding, and when it is idle.
No exception of ours comes out of here. Read against SGLang 0.5.23.
"""

from __future__ import annotations

import logging
from typing import Any, Final, Protocol

from kvplug.engines.settings import warn
from kvplug.engines.sglang_guard import objection
from kvplug.engines.sglang_recorder import recorder_for

SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"

logger = logging.getLogger("sglang.kvplug")


class Attachable(Protocol):
    """kvplug's publisher, as far as a scheduler is concerned."""

    records: bool
    """Whether recorders are wanted."""

    def begin_notes(self, page_size: int, *, is_dynamo: bool) -> None:
        """From now on batches may have notes of SGLang's tree."""

    def on_recorder_failed(self, error: Exception) -> None:
        """SGLang's own recorder goes on, and events may be missing."""


def register_hooks() -> None:
    """Once a process, before SGLang applies its hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{SCHEDULER}.init_kv_events_publisher", attach, HookType.AFTER)
    HookRegistry.register(f"{SCHEDULER}.flush_cache", publish_flush, HookType.AFTER)


def attach(_: object, scheduler: Any) -> None:  # noqa: ANN401
    """After a scheduler has made its publisher. SGLang goes on as it is with any other."""
    try:
        publisher = _publisher_of(scheduler)
        if publisher is not None:
            _record(scheduler.tree_cache, publisher)
            EachStep(scheduler)
    except Exception as error:  # noqa: BLE001  # SGLang's insides may have changed in any way
        warn(logger, "SGLang records and publishes KV events in its own way", error)


def publish_flush(_: object, scheduler: Any, *args: object, **more: object) -> None:  # noqa: ANN401
    """After a flush of the cache: an idle scheduler would publish it with its next look around."""
    try:
        if _publisher_of(scheduler) is not None:
            scheduler.kv_events_publisher.publish_kv_events()
    except Exception as error:  # noqa: BLE001  # SGLang publishes it later
        warn(logger, "a flush is published late", error)


def _publisher_of(scheduler: Any) -> Any:  # noqa: ANN401
    component = getattr(scheduler, "kv_events_publisher", None)
    publisher = getattr(component, "kv_event_publisher", None)
    return publisher if hasattr(publisher, "begin_notes") else None


def _record(cache: Any, publisher: Attachable) -> None:  # noqa: ANN401
    owner = getattr(cache, "tree_core", cache)
    stock = getattr(owner, "kv_events", None)
    if not publisher.records or stock is None or not stock.enabled:
        return
    if (reason := objection(owner)) is not None:
        logger.warning(
            "kvplug: SGLang's own recorder of KV events stays: %s; the events are the same, and "
            "cost the scheduler what they cost with any publisher",
            reason,
        )
        return
    publisher.begin_notes(cache.page_size, is_dynamo=_is_dynamo(stock))
    recorder_for(owner, publisher.on_recorder_failed)


def _is_dynamo(recorder: Any) -> bool:  # noqa: ANN401
    names = "dynamo_format", "_dynamo_format"
    return any(getattr(recorder, name, False) for name in names)


class EachStep:
    """Publishes behind process_batch_result of one scheduler, and lets go of it after a failure."""

    def __init__(self, scheduler: Any) -> None:  # noqa: ANN401
        self._scheduler = scheduler
        self._process = scheduler.process_batch_result
        self._publish = scheduler.kv_events_publisher.publish_kv_events
        scheduler.process_batch_result = self

    def __call__(self, *args: object, **more: object) -> object:
        """In the place of process_batch_result, with its arguments."""
        result = self._process(*args, **more)
        try:
            self._publish()
        except Exception as error:  # noqa: BLE001  # SGLang publishes later, in its own way
            del self._scheduler.process_batch_result
            warn(logger, "events of a step are published when SGLang does so itself", error)
        return result
