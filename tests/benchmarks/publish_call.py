"""What one publish() takes from the engine's thread, and how fast batches leave: stock zmq, and
kvplug on either wire.

usage: python -m tests.benchmarks.run_in_vllm tests.benchmarks.publish_call

Bursts of batches of 16 blocks, faster than any engine makes them, one publisher after the other in
each round; nobody subscribes.
"""

import os
import statistics
import sys
import tempfile
import threading
import time

from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import (
    BlockStored,
    EventPublisherFactory,
    KVEventBatch,
    ZmqEventPublisher,
)

from kvplug.engines.vllm import register

NUM_BLOCKS, BLOCK_SIZE, BURST, NUM_ROUNDS = 16, 16, 5000, 15


def batch(number):
    first = number * NUM_BLOCKS
    event = BlockStored(
        block_hashes=[2**63 + first + i for i in range(NUM_BLOCKS)],
        parent_block_hash=None,
        token_ids=list(range(NUM_BLOCKS * BLOCK_SIZE)),
        block_size=BLOCK_SIZE,
        lora_id=None,
        medium="GPU",
        lora_name=None,
    )
    return KVEventBatch(ts=0.0, events=[event])


def everything_is_sent(publisher):
    if isinstance(publisher, ZmqEventPublisher):
        return publisher._event_queue.unfinished_tasks == 0
    ours = publisher.publisher
    return ours.counters.num_applied + ours.num_dropped == ours.num_published


def burst(publisher):
    """(us per publish() call, thousand batches per second until the last is sent)."""
    batches = [batch(number) for number in range(BURST)]
    pause, started = threading.Event(), time.perf_counter()
    for each in batches:
        publisher.publish(each)
    published = time.perf_counter()
    while not everything_is_sent(publisher):
        pause.wait(0.0005)
    ended = time.perf_counter()
    return (published - started) / BURST * 1e6, BURST / (ended - started) / 1e3


def create(name, path):
    config = KVEventsConfig(enable_kv_cache_events=True, publisher=name, endpoint=f"ipc://{path}")
    return EventPublisherFactory.create(config)


def main():
    register()
    folder = tempfile.mkdtemp(prefix="kvplug-bench-")
    publishers = {"zmq": create("zmq", f"{folder}/zmq")}
    for wire in ("vllm", "kvplug"):
        os.environ["KVPLUG_WIRE"] = wire
        publishers[f"kvplug, wire {wire}"] = create("kvplug", f"{folder}/{wire}")
    figures = {name: [] for name in publishers}
    for _ in range(NUM_ROUNDS + 1):
        for name, publisher in publishers.items():
            figures[name].append(burst(publisher))
    for name, values in figures.items():
        calls, rates = zip(*values[1:], strict=True)
        sys.stdout.write(
            f"{name}: publish() {statistics.median(calls):.2f} us "
            f"({min(calls):.2f} to {max(calls):.2f}); {statistics.median(rates):.0f} k batches/s "
            f"({min(rates):.0f} to {max(rates):.0f})\n"
        )
    for publisher in publishers.values():
        publisher.shutdown()


if __name__ == "__main__":
    main()
