"""What publishing KV events costs SGLang's scheduler, per block. Runs in SGLang's environment.

In:  SGLang's own caches without a model: RadixCache, UnifiedRadixCache with its Python and its Rust
     tree. Sequences of 64 pages, each inserted, drained and published as in a step of its own; then
     all are evicted.
Out: a table, and last a line of JSON (tests/benchmarks/engine.py).

usage: python -m tests.benchmarks.engine_sglang [rounds]

The modes come in random order within each round. `off`: no events; `taken`: the Rust tree's events
are taken from its binding and dropped; `stock`: SGLang's recorder and ZmqEventPublisher; `ours`:
kvplug's recorder, and its publisher with its sender process, which has to be done before the next
mode begins. Differences are taken within a round. All is CPU time: "thread" of the thread that a
scheduler would run in; "process" of all threads of its process, of which those of Python take
turns. What runs in another process is not in it.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import time
from array import array

os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "never")
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import torch
from sglang.srt.disaggregation.kv_events import KVEventBatch, ZmqEventPublisher
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvplug.engines.settings import PublisherConfig
from kvplug.engines.sglang import SglangPublisher
from kvplug.engines.sglang_recorder import recorder_for
from tests.engines import sglang_cache_driver

NUM_SEQUENCES, PAGES = 300, 64
NUM_BLOCKS = NUM_SEQUENCES * PAGES
MODES = {
    "simple": ("off", "stock", "ours"),
    "python": ("off", "stock", "ours"),
    "rust": ("off", "taken", "stock", "ours"),
}
NAMES = {
    "simple": "RadixCache",
    "python": "UnifiedRadixCache, Python",
    "rust": "UnifiedRadixCache, Rust",
}
PAGE_SIZES = (1, 16, 64)
LOOPBACK = "tcp://127.0.0.1:0"


class Nobody:
    """A publisher of nothing."""

    def publish(self, batch):
        pass

    def settle(self):
        pass


class Stock(Nobody):
    def __init__(self):
        self._publisher = ZmqEventPublisher(0, endpoint=LOOPBACK, bind=True)
        self.publish = self._publisher.publish

    def settle(self):
        while self._publisher._event_queue.qsize():
            time.sleep(0.01)


class Ours(Nobody):
    def __init__(self):
        self._publisher = SglangPublisher(PublisherConfig(endpoint=LOOPBACK), 0)
        self.publish, self.begin_notes = self._publisher.publish, self._publisher.begin_notes

    def settle(self):
        sender = self._publisher.publisher
        while sender.counters.num_applied < sender.num_published:
            time.sleep(0.01)


def run(kind, page_size, mode, publisher):
    """us per block: inserts in the thread, in the process; evictions in the thread."""
    cache = make_cache(kind, page_size, mode, publisher)
    owner = getattr(cache, "tree_core", cache)
    take = owner._binding.take_events if mode == "taken" else cache.take_events
    publish = Nobody().publish if mode == "taken" else publisher.publish
    keys, values = make_sequences(PAGES * page_size)

    def drain():
        if events := take():
            publish(KVEventBatch(ts=0.0, events=events))

    take()
    gc.collect()
    inserting = Span(publisher)
    for key, value in zip(keys, values, strict=True):
        cache.insert(InsertParams(key=key, value=value))
        if mode != "off":
            drain()
    thread_us, process_us = inserting.us_per_block()
    evicting = Span(publisher)
    cache.evict(EvictParams(num_tokens=10**9))
    if mode != "off":
        drain()
    return thread_us, process_us, evicting.us_per_block()[0]


class Span:
    """From now on until it is asked."""

    def __init__(self, publisher):
        self._settle = publisher.settle
        self._thread, self._process = time.thread_time(), time.process_time()

    def us_per_block(self):
        """Of this thread until now, and of the process until all is published."""
        thread_s = time.thread_time() - self._thread
        waiting = time.thread_time()
        self._settle()
        waiting = time.thread_time() - waiting
        process_s = time.process_time() - self._process - waiting
        return 1e6 * thread_s / NUM_BLOCKS, 1e6 * process_s / NUM_BLOCKS


def make_cache(kind, page_size, mode, publisher):
    sglang_cache_driver.NUM_TOKENS = NUM_BLOCKS * page_size + 1024
    cache, _ = sglang_cache_driver.make_cache(kind, page_size=page_size, enabled=mode != "off")
    if mode == "ours":
        publisher.begin_notes(page_size, is_dynamo=False)
        recorder_for(getattr(cache, "tree_core", cache), _fail)
    return cache


def make_sequences(num_tokens):
    """Any token of a large vocabulary is as likely as any other."""
    rnd = random.Random(1)
    keys = [
        RadixKey(array("q", (rnd.randrange(150_000) for _ in range(num_tokens))))
        for _ in range(NUM_SEQUENCES)
    ]
    return keys, torch.arange(NUM_SEQUENCES * num_tokens).reshape(NUM_SEQUENCES, num_tokens)


def _fail(error):
    raise error


def measure(kind, page_size, num_rounds, publishers):
    """{mode: [[insert, evict, cpu of insert], a round each]}."""
    found = {mode: [] for mode in MODES[kind]}
    for _ in range(num_rounds):
        for mode in random.sample(MODES[kind], len(MODES[kind])):
            found[mode].append(run(kind, page_size, mode, publishers.get(mode, Nobody())))
    return found


def added(found, mode, to, column):
    """Of one mode over another, within each round: quartiles and median."""
    pairs = zip(found[mode], found[to], strict=True)
    first, median, third = statistics.quantiles((a[column] - b[column] for a, b in pairs), n=4)
    return {"value": median, "min": first, "max": third}


def compared(found, to, column=0):
    """What ours and stock add to a mode, and their ratio."""
    ours, stock = added(found, "ours", to, column), added(found, "stock", to, column)
    return {**ours, "stock": stock["value"], "ratio": stock["value"] / ours["value"]}


def report(kind, page_size, found):
    base = "taken" if kind == "rust" else "off"
    thread, process, evict = (compared(found, base, column) for column in range(3))
    off = statistics.median(each[0] for each in found["off"])
    taken = added(found, "taken", "off", 0)["value"] if kind == "rust" else 0.0
    sys.stdout.write(
        f"{NAMES[kind]:24s} page {page_size:2d}: off {off:.2f}, recorded and taken +{taken:.2f}; "
        f"stock +{thread['stock']:.3f}, ours +{thread['value']:.3f} "
        f"({thread['min']:.3f} to {thread['max']:.3f}), ratio {thread['ratio']:.1f}; process: "
        f"stock +{process['stock']:.2f}, ours +{process['value']:.2f}; "
        f"evict: stock +{evict['stock']:.3f}, ours +{evict['value']:.3f}\n"
    )
    sys.stdout.flush()
    more = {"process_us": process["value"], "process_us_stock": process["stock"], "taken": taken}
    return thread | more


def main():
    torch.set_num_threads(1)
    num_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    publishers = {"stock": Stock(), "ours": Ours()}
    results = {}
    for kind in MODES:
        for page_size in PAGE_SIZES:
            found = measure(kind, page_size, num_rounds, publishers)
            results[kind, page_size] = report(kind, page_size, found)
    trees = {kind: results[kind, 16] for kind in ("simple", "python")}
    metrics = {
        "sglang_insert_drain": min(trees.values(), key=lambda each: each["ratio"]),
        "sglang_rust_added_us": results["rust", 16],
    }
    metrics |= {
        f"sglang_{kind}_page_{page_size}": each for (kind, page_size), each in results.items()
    }
    sys.stdout.write(json.dumps(metrics) + "\n")
    os._exit(0)  # SGLang's publisher has a thread that waits


if __name__ == "__main__":
    main()
