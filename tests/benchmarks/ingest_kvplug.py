"""kvplug's side of `make bench-ingest`: an EventThread that feeds a Router, on one core."""

import gc
import os
import sys
import threading
import time

import numpy as np

from kvplug import Rank, Router, RouterConfig, codec
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from kvplug.transports.zmq import message_of
from tests.benchmarks.ingest_frames import frames
from tests.benchmarks.ingest_tokens import BLOCK_SIZE
from tests.benchmarks.sides import serve

CORES = sorted(os.sched_getaffinity(0))
TIMEOUT_S = 60.0

router = Router(RouterConfig(block_size=BLOCK_SIZE, speculative_ttl_s=0.0))


def messages_of(seed, blocks_per_event, num_blocks):
    """As the transport hands them over."""
    return [message_of(each) for each in frames(seed, blocks_per_event, num_blocks)]


def measure(case):
    return {"stream": stream, "memory": memory, "queries": queries}[case["what"]](case)


def stream(case):
    """[when the last block was in, monotonic ns], with every thread on one core."""
    os.sched_setaffinity(0, CORES[:1])
    router.add_worker(case["worker"])
    follower, listener = Follower(router, Rank(case["worker"])), EventThread()
    listener.start()
    listener.follow(follower, f"tcp://127.0.0.1:{case['port']}")
    deadline = time.monotonic() + TIMEOUT_S
    while follower.num_stored < case["blocks"]:
        time.sleep(0.001)
        assert time.monotonic() < deadline, f"{follower.num_stored} blocks, {follower.skipped}"
    ended = time.monotonic_ns()
    listener.stop()
    router.remove_worker(case["worker"])
    assert not follower.skipped
    return [ended]


def memory(case):
    """[ns for all blocks], without the socket: as the listener hands messages over."""
    os.sched_setaffinity(0, CORES[:1])
    router.add_worker(case["worker"])
    messages = messages_of(case["seed"], case["blocks_per_event"], case["blocks"])
    follower = Follower(router, Rank(case["worker"]))
    began = time.monotonic_ns()
    for at in range(0, len(messages), 32):
        follower.receive(messages[at : at + 32])
    ended = time.monotonic_ns()
    assert follower.num_stored == case["blocks"] + 1
    router.remove_worker(case["worker"])
    return [ended - began]


def queries(case):
    """Latencies of Router.route in ns, idle or while another thread applies events."""
    os.sched_setaffinity(0, CORES)
    router.add_worker("queried")
    messages = messages_of(7, 16, 2048)
    asked = Follower(router, Rank("queried"))
    asked.receive(messages)
    tokens = router_tokens(messages)
    stop, feeder = threading.Event(), None
    if case["ingest"]:
        begun = threading.Event()
        feeder = threading.Thread(target=feed, args=(case["blocks_per_event"], begun, stop))
        feeder.start()
        begun.wait()
        os.sched_setaffinity(0, CORES[-1:])  # of this thread
    latencies = []
    for _ in range(case["calls"]):
        began = time.perf_counter_ns()
        decision = router.route(tokens)
        latencies.append(time.perf_counter_ns() - began)
        router.finish(decision.request_id)
        time.sleep(0.0005)  # queries come as requests do, not back to back
    stop.set()
    if feeder is not None:
        feeder.join()
    router.remove_worker("queried")
    return latencies


def router_tokens(messages):
    """The first 512 blocks of the chain that `messages` store."""
    stored = [event for m in messages for event in codec.decode(m.payload).events][:32]
    return np.array([t for event in stored for t in event.token_ids], dtype=np.uint32)


def feed(blocks_per_event, begun, stop):
    """Apply the same messages again and again, as a listener hands them over."""
    os.sched_setaffinity(0, CORES[:1])
    messages = messages_of(11, blocks_per_event, 32768)
    router.add_worker("feeder")
    rank = Rank("feeder")
    while not stop.is_set():
        follower = Follower(router, rank)
        for at in range(0, len(messages), 256):
            follower.receive(messages[at : at + 256])
            begun.set()
            if stop.is_set():
                break
        router.clear(rank)
    router.remove_worker("feeder")


if __name__ == "__main__":
    gc.freeze()
    serve(measure, sys.stdin)
