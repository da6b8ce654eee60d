"""A plug-in for vLLM, in tests only: what the block pool of an engine core really holds.

In:  a connection to the unix socket $ORACLE_SOCKET.<data-parallel rank>.
Out: one JSON object per connection: the ids of the cached blocks, and what was published so far.
"""

import contextlib
import functools
import json
import os
import socket
import sys
import threading

from published import kind_of, last_number


def register():
    """Let each scheduler that vLLM makes in this process, or in a fork of it, answer questions."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if hasattr(Scheduler, "oracle_pid"):
        return
    Scheduler.oracle_pid = os.getpid()
    original = Scheduler.__init__

    @functools.wraps(original)
    def init_with_oracle(self, *args, **kwargs):
        original(self, *args, **kwargs)
        Oracle(self).start()

    Scheduler.__init__ = init_with_oracle


class Oracle:
    """Counts what the scheduler publishes, and reads its pool when asked."""

    def __init__(self, scheduler):
        self._is_fork = scheduler.oracle_pid != os.getpid()
        self._pool = scheduler.kv_cache_manager.block_pool
        self._rank = scheduler.parallel_config.data_parallel_index
        self._publisher = scheduler.kv_event_publisher
        self._publish = scheduler.kv_event_publisher.publish
        scheduler.kv_event_publisher.publish = self._count_and_publish
        self._num_batches, self._num_events, self._most_copies = 0, {}, 1

    def start(self):
        path = f"{os.environ['ORACLE_SOCKET']}.{self._rank}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of an engine that was killed
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        threading.Thread(target=self._serve, args=(listener,), daemon=True).start()

    def _count_and_publish(self, batch):
        self._num_batches += 1
        for event in batch.events:
            kind = kind_of(event)
            self._num_events[kind] = self._num_events.get(kind, 0) + 1
        copies = (len(b) for b in self._cache().values() if isinstance(b, dict))
        self._most_copies = max(self._most_copies, *copies, 1)
        self._publish(batch)

    def _serve(self, listener):
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(json.dumps(self._answer()).encode())

    def _answer(self):
        return {
            "rank": self._rank,
            "is_fork": self._is_fork,
            "publisher": type(self._publisher).__name__,
            "blocks": self._blocks(),
            "num_batches": self._num_batches,
            "last": last_number(self._publisher, self._num_batches),
            "num_events": self._num_events,
            "most_copies": self._most_copies,
            "numba_is_loaded": "numba" in sys.modules,
        }

    def _blocks(self):
        from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

        while True:
            with contextlib.suppress(RuntimeError):  # the engine changed its dict meanwhile
                keys = list(self._cache())
                return [maybe_convert_block_hash(get_block_hash(key)) for key in keys]

    def _cache(self):
        return self._pool.cached_block_hash_to_block._cache
