"""Run by vLLM's own interpreter: what `register` changes, and what stays as it was."""

import os
import sys
import threading

import pydantic
from vllm.config import VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    EventPublisher,
    EventPublisherFactory,
    KVEventBatch,
)

from kvplug.engines.vllm import register


def rejected(publisher):
    try:
        KVEventsConfig(enable_kv_cache_events=True, publisher=publisher)
    except pydantic.ValidationError:
        return True
    return False


def publish_one():
    config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="kvplug", endpoint="tcp://127.0.0.1:0", hwm=5
    )
    publisher = EventPublisherFactory.create(config, 3)
    assert isinstance(publisher, EventPublisher)
    publisher.publish(KVEventBatch(ts=1.0, events=[AllBlocksCleared()]))
    publisher.publish("no batch")
    publisher.shutdown()
    counters = publisher.publisher
    assert (counters.num_published, counters.counters.num_applied) == (2, 1)
    assert counters.failures.total() == 1
    resolved = publisher.get_publisher_config()
    assert (resolved.publisher, resolved.hwm) == ("kvplug", 5)
    assert not resolved.endpoint.endswith(":0")
    assert pydantic.TypeAdapter(KVEventsConfig).validate_python(
        {"publisher": "kvplug", "endpoint": resolved.endpoint}
    )


def main():
    assert rejected("kvplug")  # hence: register first
    num_threads = threading.active_count()
    register()
    register()
    assert threading.active_count() == num_threads
    assert not rejected("kvplug")
    assert rejected("kvplgu")
    assert KVEventsConfig(enable_kv_cache_events=True).publisher == "zmq"
    assert KVEventsConfig().publisher == "null"
    assert VllmConfig(kv_events_config=KVEventsConfig(publisher="kvplug")).kv_events_config

    child = os.fork()
    if child == 0:
        publish_one()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "publishing in a fork failed"
    publish_one()
    assert not {"numba", "llvmlite"} & set(sys.modules)
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main()
