"""Publishers of `make bench-cluster`: what engines say, in a process of their own.

In:  cases as JSON lines (tests/benchmarks/sides.py): open, paced, close.
Out: when each event was handed to `publish`, ns of the monotonic clock, which all processes share;
CPU seconds.

An event stores 16 blocks that nobody has seen. With `removes`, every second one removes the oldest
blocks, so that an engine holds as much as at first.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from typing import Any

from kvplug.engines.kv_event_publisher import KvEventPublisher
from tests.benchmarks.cluster_events import BLOCK_SIZE, blocks_of, tokens_of
from tests.benchmarks.sides import serve


class Engine:
    """say: publish the next event. `keep`: how many of its events' blocks it holds, 0 for all."""

    def __init__(
        self, number: int, publisher: KvEventPublisher, num_blocks: int, keep: int
    ) -> None:
        self.publisher = publisher
        self._num_blocks, self._keep = num_blocks, keep
        self._next = number << 24
        self._held: deque[int] = deque()

    def say(self) -> None:
        if self._keep and len(self._held) > self._keep:
            names = blocks_of(self._held.popleft(), self._num_blocks)
            self.publisher.publish_removed(block_hashes=names)
            return
        number, self._next = self._next, self._next + 1
        self._held.append(number)
        self.publisher.publish_stored(
            token_ids=tokens_of(number, self._num_blocks),
            block_hashes=blocks_of(number, self._num_blocks),
        )


engines: list[Engine] = []


def measure(case: dict[str, Any]) -> Any:
    return {"open": open_all, "paced": paced, "close": close}[case["what"]](case)


def open_all(case: dict[str, Any]) -> list[str]:
    """Publishers of all workers of the case; their endpoints."""
    os.environ["KVPLUG_NATS_FLEET"] = case.get("fleet", "default")
    os.environ["KVPLUG_NATS_STREAM"] = "off" if case["via"] == "core" else "on"
    for number, worker in enumerate(case["workers"], len(engines)):
        more = {} if case["endpoint"].startswith("tcp") else {"worker": worker}
        publisher = KvEventPublisher(case["endpoint"], kv_block_size=BLOCK_SIZE, **more)
        number = case.get("first", 0) + number
        engines.append(Engine(number, publisher, case.get("blocks", 16), case.get("keep", 0)))
    return [each.publisher.endpoint for each in engines]


def paced(case: dict[str, Any]) -> dict[str, Any]:
    """Events at `rate` a second, one engine after the other; `silent`: all but publishing."""
    say = [(lambda: None) if case.get("silent") else each.say for each in engines]
    stamps, pause_s = [], 1 / case["rate"]
    began_s, cpu_s = time.perf_counter(), time.process_time()
    for n in range(case["num"]):
        rest_s = began_s + n * pause_s - time.perf_counter()
        if rest_s > 0:
            time.sleep(rest_s)
        stamps.append(time.monotonic_ns())
        say[n % len(say)]()
    elapsed_s = time.perf_counter() - began_s
    return {"stamps": stamps, "elapsed_s": elapsed_s, "cpu_s": time.process_time() - cpu_s}


def close(case: dict[str, Any]) -> int:
    """How many events were dropped."""
    del case
    num_dropped = sum(each.publisher.num_dropped for each in engines)
    for each in engines:
        each.publisher.shutdown()
    engines.clear()
    return num_dropped


if __name__ == "__main__":
    serve(measure, sys.stdin)
