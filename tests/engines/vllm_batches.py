"""Run by vLLM's own interpreter: what vLLM's own types make of payloads.

In:  payloads as hex, one a line.   Out: for each one JSON object, whose events have their kinds.
"""

import json
import sys

import msgspec
from vllm.distributed.kv_events import KVEventBatch

decode = msgspec.msgpack.Decoder(KVEventBatch).decode
for line in sys.stdin:
    batch = decode(bytes.fromhex(line))
    events = [
        {"kind": type(each).__name__, **msgspec.structs.asdict(each)} for each in batch.events
    ]
    sys.stdout.write(json.dumps({"rank": batch.data_parallel_rank, "events": events}) + "\n")
