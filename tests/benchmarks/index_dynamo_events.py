"""Events in Dynamo's JSON, as RadixTree.apply_event of ai-dynamo-runtime 1.6.1 reads it.

In:  Stored and Removed.   Out: bytes.
"""

from __future__ import annotations

import json

from tests.benchmarks.index_workload import Event, Stored


def encode(event: Event) -> bytes:
    """JSON; the id of an event is not looked at."""
    if isinstance(event, Stored):
        pairs = zip(event.names, event.hashes, strict=True)
        blocks = [{"block_hash": name, "tokens_hash": hash_} for name, hash_ in pairs]
        body: dict[str, object] = {"stored": {"parent_hash": event.parent, "blocks": blocks}}
    else:
        body = {"removed": {"block_hashes": event.names}}
    return json.dumps({"event_id": 1, "data": body}, separators=(",", ":")).encode()
