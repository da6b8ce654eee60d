"""vLLM changed in ways that no release is, and what the plug-in does then. Runs in vLLM's
interpreter, not in ours.

usage: python -m tests.engines.vllm_doctored RESULT.json

Out: {case: [whether it is recorded, what the log says]}
"""

import json
import logging
import os
import sys
from contextlib import contextmanager
from pathlib import Path

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import vllm
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager

from kvplug.engines.vllm import create_publisher, logger
from tests.engines.vllm_recorded_pools import SHA256, Side, full


class Scheduler:
    """As far as the publisher sees it."""

    def __init__(self, pool_class=BlockPool):
        self.kv_event_publisher = create_publisher(endpoint="tcp://127.0.0.1:0")
        self.kv_cache_manager = Side([full()], False).manager
        self.kv_cache_manager.block_pool.__class__ = pool_class
        self.kv_cache_manager.take_events()

    def update_from_output(self):
        """A step."""
        self.kv_event_publisher.publish([0.0, [], None])


@contextmanager
def changed(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def lines():
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel("WARNING")  # whatever vLLM's own level is
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def outcome(**more):
    with lines() as said:
        scheduler = Scheduler(**more)
        scheduler.update_from_output()
        publisher = scheduler.kv_event_publisher
        publisher.shutdown()
    return [publisher.recorder is not None, said]


def other_size(self):
    """Events as this vLLM does not make them."""
    events = [*take_events(self)]
    for event in events:
        if hasattr(event, "block_size"):
            event.block_size += 1
    return events


def raising(*_, **__):
    raise RuntimeError("not as it was")


class SharedPool(BlockPool):
    """A pool of another class, as some models have."""


take_events = KVCacheManager.take_events


def main(result_path):
    kv_cache_utils.init_none_hash(SHA256)
    none_hash = kv_cache_utils.NONE_HASH
    results = {"as it is": outcome()}
    with changed(vllm, "__version__", "0.99.0"):
        results["unknown version"] = outcome()
    with changed(KVCacheManager, "take_events", other_size):
        results["other events"] = outcome()
    with changed(BlockPool, "cache_full_blocks", raising):
        results["raising"] = outcome()
    results["other pool"] = outcome(pool_class=SharedPool)
    os.environ["KVPLUG_RECORDER"] = "off"
    results["off"] = outcome()
    assert kv_cache_utils.NONE_HASH is none_hash
    assert not logging.getLogger("vllm.v1.core.kv_cache_manager").disabled
    Path(result_path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
