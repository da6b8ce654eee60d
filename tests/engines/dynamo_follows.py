"""Run by an interpreter with ai-dynamo-runtime: Dynamo's SelectionService follows an engine.

usage: python dynamo_follows.py PORT BLOCK_SIZE

In:  one JSON array of token ids a line.   Out: how many blocks of them Dynamo knows on the device.
The first line comes when it follows.
"""

import asyncio
import json
import os
import sys

os.environ.setdefault("DYN_LOG", "error")

from dynamo._core import SelectionService


def say(answer):
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def main(port, block_size):
    service = SelectionService(indexer_threads=1)
    await service.upsert_worker(
        {
            "worker_id": 1,
            "model_name": "m",
            "endpoint": "http://127.0.0.1:9",  # where requests would go
            "block_size": block_size,
            "data_parallel_start_rank": 0,
            "data_parallel_size": 1,
            "max_num_batched_tokens": 8192,
            "total_kv_blocks": 1000,
            "kv_events_endpoints": {0: f"tcp://127.0.0.1:{port}"},
        }
    )
    say("follows")
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = {"model_name": "m", "token_ids": json.loads(line)}
        answer = await service.overlap_scores(asked)
        say([each["device_blocks"] for each in answer["workers"]])
    os._exit(0)  # its threads would go on


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
