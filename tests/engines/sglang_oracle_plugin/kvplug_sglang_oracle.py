"""A plug-in for SGLang, in tests only: what the radix cache of a scheduler really holds.

In:  a connection to the unix socket $ORACLE_SOCKET.<data-parallel rank>, a line of JSON:
     [[token ids, salt], ...], or null.
Out: how many leading tokens of each the tree holds, how many token slots the tree holds in all, and
     what was published so far; for null, the digest of every page on the device and in host memory;
     for "inserted", all inserts: [[Unix time, token ids], ...].

The default tree is compiled and lists nothing by content, so it is asked, by the walk that a
request's own prefix takes. What nobody asked for shows in the number of slots. Pages are listed
node by node; numbers of slots show that no node is missing. Asking changes nothing and goes by no
event.
"""

import contextlib
import functools
import json
import os
import socket
import sys
import threading
import time
from array import array

from published import last_number

NOTES = {
    "block_stored": "BlockStored",
    "block_removed": "BlockRemoved",
    "all_blocks_cleared": "AllBlocksCleared",
}
# Nodes are numbered from 1 on; so many missing in a row are the end.
MAX_MISSING = 10_000
INSERT = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.insert"
TARGET = (
    "sglang.srt.managers.scheduler_components.kv_events_publisher."
    "SchedulerKvEventsPublisher.publish_kv_events"
)


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, publish_and_count, HookType.AROUND)
    HookRegistry.register(INSERT, note_time, HookType.AFTER)


inserted = []


def note_time(result, cache, params):
    inserted.append((time.time(), params.key.raw_token_ids()))


def publish_and_count(publish_kv_events, component):
    from sglang.srt.runtime_context import get_parallel

    oracle = start_oracle(
        get_parallel().dp_rank or 0, component.kv_event_publisher, component.tree_cache
    )
    publish_kv_events(component)
    oracle.num_drains += 1


@functools.cache
def start_oracle(rank, publisher, cache):
    return Oracle(rank, publisher, cache)


class Oracle:
    """Counts what the scheduler publishes, and asks its tree when asked."""

    def __init__(self, rank, publisher, cache):
        self._publisher, self._tree = publisher, cache.tree_core
        self._controller = cache.cache_controller
        self._publish = publisher.publish
        publisher.publish = self._count_and_publish
        self.num_drains = 0
        self._num_batches, self._num_events = 0, {}
        path = f"{os.environ['ORACLE_SOCKET']}.{rank}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of an engine that was killed
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        threading.Thread(target=self._serve, args=(listener,), daemon=True).start()

    def _count_and_publish(self, batch):
        self._num_batches += 1
        for event in batch.events:
            # A tuple is what kvplug's recorder noted.
            is_note = isinstance(event, tuple)
            kind = NOTES.get(event[0], event[0]) if is_note else type(event).__name__
            self._num_events[kind] = self._num_events.get(kind, 0) + 1
        self._publish(batch)

    def _serve(self, listener):
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as line:
                asked = json.loads(line.readline())
                is_list = asked == "inserted"
                said = (
                    [(at, ids.tolist()) for at, ids in inserted] if is_list else self._answer(asked)
                )
                line.write(json.dumps(said))

    def _answer(self, asked):
        return {
            "num_drains": self.num_drains,
            "num_batches": self._num_batches,
            "last": last_number(self._publisher, self._num_batches),
            "num_events": self._num_events,
            "publisher": type(self._publisher).__name__,
            "source": self._publisher.describe_local_source(self._tree.page_size),
            "tree": type(self._tree).__name__,
            "numba_is_loaded": "numba" in sys.modules,
            "num_slots": len(self._tree.all_values_flatten()),
            "held": [self._held(tokens, salt) for tokens, salt in asked or ()],
            **(self._pages() if asked is None else {}),
        }

    def _pages(self):
        """By tier; fails if a page is missing or is there twice."""
        nodes, page_size = list(self._nodes()), self._tree.page_size
        device = [d for node in nodes if self._is_on_device(node) for d in self._digests(node)]
        host = [d for node in nodes if self._tree.is_backuped(node) for d in self._digests(node)]
        assert len(set(device)) == len(device) == len(self._tree.all_values_flatten()) // page_size
        num_in_host = 0
        if self._controller is not None:
            pool = self._controller.mem_pool_host
            num_in_host = (pool.size - pool.available_size()) // page_size
        assert len(set(host)) == len(host) == num_in_host, (len(host), num_in_host)
        return {"device": device, "host": host}

    def _nodes(self):
        number, num_missing = 0, 0
        while num_missing < MAX_MISSING:
            number += 1
            try:
                is_root = self._tree.is_root(number)
            except KeyError:
                num_missing += 1
                continue
            num_missing = 0
            if not is_root:
                yield number

    def _is_on_device(self, node):
        return not self._tree.is_full_device_evicted(node)

    def _digests(self, node):
        return self._tree.get_hash_values(node)

    def _held(self, tokens, salt):
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return self._tree.match_full_device_prefix(RadixKey(array("q", tokens), cache_salt=salt))[0]
